"""Statistics, order of rounds, error limits, peers and the report's round trip."""

import importlib
import io
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.accuracy import ProductsByOnednn, judge, normalised_errors
from benchmarks.peers import Peer, added, parse_peers
from benchmarks.schema import CaseResult, PeerResult, Report, from_json, resume_report
from benchmarks.stats import calls_for, geomean, interleave, median_interval, spread
from benchmarks.steps import begun, replace_text, run_steps, without_folders, write_json
from benchmarks.table import print_report, seconds, time_text
from benchmarks.timing import TimingSettings, measure


def test_spread_is_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_geomean() -> None:
    assert geomean([2.0, 8.0]) == pytest.approx((4.0, 2))
    assert math.isnan(geomean([]).value)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            geomean([1.0, bad])


@given(st.integers(1, 6), st.integers(0, 30))
def test_every_round_has_every_peer_and_first_places_are_shared(peers: int, rounds: int) -> None:
    orders = list(interleave(range(peers), rounds))
    assert len(orders) == rounds
    assert all(sorted(order) == list(range(peers)) for order in orders)
    firsts = [sum(order[0] == peer for order in orders) for peer in range(peers)]
    assert max(firsts) - min(firsts) <= 1


def test_calls_for() -> None:
    assert calls_for(1e-3, 5e-3) == 5
    assert calls_for(1.0, 5e-3) == 1
    assert calls_for(0.0, 5e-3) == calls_for(1e-12, 5e-3) == 10_000


@pytest.mark.parametrize(
    "argument, told",
    [
        ("--out=/opt/me/results", "--out=…/results"),
        ("onnxruntime=/opt/a=b/bin/python", "onnxruntime=…/python"),
        ("/tmp", "…/tmp"),
        ("benchmarks/results", "benchmarks/results"),
        ("cuda:sm_80,cuda:sm_90", "cuda:sm_80,cuda:sm_90"),
        ("norm, N=4096 a/b", "norm, N=4096 a/b"),
    ],
)
def test_results_tell_no_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch, argument: str, told: str) -> None:
    assert without_folders(argument) == told
    monkeypatch.setattr("sys.argv", ["/opt/me/checkout/benchmarks/__main__.py", "--suite", argument])
    assert begun()["command"] == ["python", "-m", "benchmarks", "--suite", told]


def test_measure_interleaves_after_the_warm_up() -> None:
    log: list[str] = []
    calls = {name: lambda name=name: log.append(name) for name in "ab"}
    samples = measure(calls, TimingSettings("cpu", rounds=4, least_s=0.0, warmup_s=0.0))
    assert log[-8:] == list("abbaabba")
    assert all(len(s.seconds) == 4 and s.calls == 1 for s in samples.values())


def test_flush_times_the_call_alone() -> None:
    samples = measure({"a": lambda: None}, TimingSettings("cpu", 2, least_s=0.0, warmup_s=0.0, flush=True))
    assert max(samples["a"].seconds) < 1e-3


def test_errors_are_normalised_by_the_largest_value() -> None:
    reference = {"y": torch.tensor([100.0, 1.0], dtype=torch.float64)}
    assert normalised_errors({"y": torch.tensor([100.0, 2.0])}, reference)["y"] == pytest.approx(0.01)


def test_rounding_noise_around_zero_is_no_error_but_a_wrong_value_is() -> None:
    reference = {"big": torch.tensor([1.0]), "zero": torch.tensor([1e-18])}
    assert normalised_errors({"big": torch.tensor([1.0]), "zero": torch.tensor([1e-9])}, reference)["zero"] < 1e-4
    assert normalised_errors({"big": torch.tensor([1.0]), "zero": torch.tensor([1e-2])}, reference)["zero"] > 9e-3


def test_a_small_tensor_keeps_its_own_scale_until_it_moves_nothing() -> None:
    reference = {"big": torch.tensor([1.0]), "small": torch.tensor([1e-2]), "tiny": torch.tensor([1e-6])}
    values = {"big": torch.tensor([1.0]), "small": torch.tensor([2e-2]), "tiny": torch.tensor([2e-6])}
    errors = normalised_errors(values, reference)
    assert errors["small"] == pytest.approx(1) and errors["tiny"] == pytest.approx(1e-2)


def test_not_finite_and_integer_tensors() -> None:
    nan, inf = torch.tensor([math.nan]), torch.tensor([math.inf])
    assert normalised_errors({"y": nan}, {"y": nan})["y"] == 0
    assert normalised_errors({"y": inf}, {"y": inf})["y"] == 0
    assert normalised_errors({"y": nan}, {"y": torch.ones(1)})["y"] == math.inf
    assert normalised_errors({"y": torch.tensor([1])}, {"y": torch.tensor([2])})["y"] == math.inf
    assert normalised_errors({}, {"y": nan})["y"] == math.inf


def test_limit_is_twice_eager_and_a_floor() -> None:
    exact = {"y": torch.tensor([1.0], dtype=torch.float64)}
    eager = {"y": torch.tensor([1.001])}
    assert judge({"y": torch.tensor([1.0019])}, eager, exact, torch.float32).ok
    assert not judge({"y": torch.tensor([1.0021])}, eager, exact, torch.float32).ok
    perfect = {"y": torch.tensor([1.0])}
    assert judge({"y": torch.tensor([1.0 + 2e-7])}, perfect, exact, torch.float32).ok
    assert not judge({"y": torch.tensor([math.nan])}, perfect, exact, torch.float32).ok


def test_limit_follows_the_library_of_torchs_that_errs_most() -> None:
    exact = {"y": torch.tensor([1.0], dtype=torch.float64)}
    eager, other, value = ({"y": torch.tensor([v])} for v in (1.001, 1.004, 1.007))
    assert not judge(value, eager, exact, torch.float32).ok
    told = judge(value, eager, exact, torch.float32, [other])
    assert told.ok and told.eager_error == pytest.approx(4e-3, rel=1e-3)
    assert not judge({"y": torch.tensor([1.009])}, eager, exact, torch.float32, [other]).ok


def test_products_by_onednn() -> None:
    """The same products, gradients too, within what rounding leaves; other types and shapes are eager's."""
    x, weight, bias = torch.randn(5, 67), torch.randn(9, 67, requires_grad=True), torch.randn(9)

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, bias = given
        y = torch.nn.functional.linear(x, weight, bias)
        return y, *torch.autograd.grad(y.square().sum(), weight)

    wanted = step(x.double(), weight.double().detach().requires_grad_(), bias.double())
    with ProductsByOnednn():
        found = step(x, weight, bias)
        exact, empty = step(*(t.detach().double().requires_grad_() for t in (x, weight, bias))), x[:0] @ weight.t()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    for got, want in zip(exact, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert empty.shape == (0, 9)


def test_peers() -> None:
    assert parse_peers("eager, inductor,eager") == (Peer("eager"), Peer("inductor"))
    with pytest.raises(ValueError, match="did you mean 'inductor'"):
        parse_peers("inducter")
    with pytest.raises(ValueError, match="no peers"):
        parse_peers(" , ")
    assert added({"a": 1}, {"a": 3, "b": 2}) == {"a": 2, "b": 2}


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_each_compiled_peer_has_its_own_code() -> None:
    compiled = [Peer("aot_eager").compile(twice, False) for _ in range(2)]
    assert torch.equal(compiled[0](torch.ones(3)), torch.full((3,), 2.0))
    assert compiled[0].__wrapped__.__code__ is not compiled[1].__wrapped__.__code__


def report() -> Report:
    cases = [
        CaseResult(
            name=f"case{i}",
            variant="odd",
            mode="inference",
            dtype="float32",
            nbytes=1000,
            floor_s=1e-3,
            peers={
                "eager": PeerResult(samples=[4e-3, 4e-3], calls_per_sample=2),
                "mlc": PeerResult(
                    samples=[2e-3, 2e-3, 2e-3],
                    accuracy={"error": 1e-7, "worst": "output 0", "eager_error": 1e-7, "limit": 2e-7, "ok": True},
                    counts={"forward": {"kernels_generated": 3, "library_calls": 1}},
                ),
                "broken": PeerResult(error="RuntimeError: no"),
            },
        )
        for i in range(3)
    ]
    return Report("kernels", "cpu", ["python"], "2026-01-01T00:00:00+00:00", {}, {}, {}, None, cases)


def test_report_round_trip() -> None:
    before = report()
    after = from_json(json.dumps(before.to_json()))
    assert after == before
    assert after.geomeans() == {"mlc/eager": pytest.approx((2.0, 3))}
    assert after.cases[0].share("mlc") == pytest.approx(0.5)
    assert after.cases[0].ratio("broken", "eager") is None


def test_a_report_without_a_steady_time_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="of the extra `bench`")
    plot = importlib.import_module("benchmarks.plot")
    unsteady = report()
    for case in unsteady.cases:
        case.peers["mlc"].samples = [1e-3, 5e-3, 9e-3]
    assert unsteady.geomeans() == {}
    for suite in ("kernels", "models", "memory", "deploy"):
        unsteady.suite = suite
        plot.write_plot(unsteady, tmp_path / f"{suite}.png")
        assert (tmp_path / f"{suite}.png").stat().st_size > 1000


def test_report_writes_infinity_as_text(tmp_path: Path) -> None:
    before = report()
    before.cases[0].peers["mlc"].accuracy = {"error": math.inf, "ok": False}
    write_json(tmp_path / "r.json", before.to_json())
    after = from_json((tmp_path / "r.json").read_text()).cases[0].peers["mlc"].accuracy
    assert after == {"error": "inf", "ok": False}


def test_a_stopped_run_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    """After each step the file holds all results so far. What raised is tried again, what is done is not."""
    path, calls, first = tmp_path / "r.json", [], report()
    first.cases.clear()

    def steps(of: Report, bad: str, stop: str) -> dict:  # type: ignore[type-arg]
        def step(name: str) -> None:
            calls.append(name)
            if name == stop:
                raise KeyboardInterrupt
            if name == bad:
                raise RuntimeError("no\nsuch kernel")
            of.cases.append(CaseResult(name, "odd", "inference", "float32", peers={"mlc": PeerResult(samples=[1e-3])}))

        return {n: lambda _, n=n: step(n) for n in "abcd"}

    with pytest.raises(KeyboardInterrupt):
        run_steps(first, steps(first, "b", "d"), path, lambda _: None)
    kept = json.loads(path.read_text())
    assert (
        not kept["complete"] and kept["done"] == ["a", "c"] and kept["failed"] == {"b": "RuntimeError: no such kernel"}
    )
    again, changed = resume_report(path, report())
    assert [c.name for c in again.cases] == ["a", "c"] and not changed and calls == ["a", "b", "c", "d"]
    run_steps(again, steps(again, "", ""), path, lambda _: None)
    assert calls[4:] == ["b", "d"] and [c.name for c in again.cases] == ["a", "c", "b", "d"]
    whole = json.loads(path.read_text())
    assert whole["complete"] and not whole["failed"] and len(whole["cases"]) == 4
    other = report()
    other.settings["size"] = "tiny"
    with pytest.raises(ValueError, match="made with settings"):
        resume_report(path, other)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_file_is_whole_whenever_writing_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    replace_text(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        replace_text(path, "new and longer")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_other_schemas_are_refused() -> None:
    with pytest.raises(ValueError, match="the field 'schema'"):
        from_json("{}")
    with pytest.raises(ValueError, match="version 99"):
        from_json(json.dumps(report().to_json() | {"version": 99}))


def test_table_shows_ratio_count_and_error() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(report(), console)
    text = console.export_text()
    assert "2.00×" in text and "RuntimeError: no" in text and "3 (1 lib)" in text
    assert "geometric mean of 3 speed-ups 2.000×" in text


def test_seconds() -> None:
    assert [seconds(s) for s in (2.0, 1.5e-3, 2e-6, 3e-9, None)] == ["2 s", "1.5 ms", "2 µs", "3 ns", "-"]


def test_times_that_vary_too_much_are_in_no_mean() -> None:
    steady = {"eager": PeerResult([2.0] * 4), "mlc": PeerResult([1.0] * 4)}
    wild = {"eager": PeerResult([8.0] * 4), "mlc": PeerResult([0.5, 0.6, 3.0, 4.0])}
    cases = [CaseResult(n, "small", "inference", "float32", peers=p) for n, p in (("a", steady), ("b", wild))]
    report = Report("models", "cpu", [], "", {}, {}, {}, None, cases)
    assert report.geomeans()["mlc/eager"] == pytest.approx((2.0, 1)) and report.unsteady("mlc", "eager") == 1
    assert "unsteady" in time_text(wild["mlc"]).plain and "unsteady" not in time_text(steady["mlc"]).plain


def test_an_interval_of_the_median_holds_it_as_often_as_it_says() -> None:
    generator = random.Random(7)
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval(range(5)) == (0, 4) and median_interval(range(9)) == (1, 7)
    for count in (6, 9, 20):
        draws = [[generator.expovariate(math.log(2)) for _ in range(count)] for _ in range(4000)]
        held = sum(low <= 1.0 <= high for low, high in map(median_interval, draws))
        assert held / len(draws) > 0.94
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])
