"""Decisions from end to end: a wrong cost is found out by running the graph, kept, and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_mlc
from torch_mlc.dynamo_backend.caches.surroundings import surroundings
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE, Tuning
from torch_mlc.dynamo_backend.reports.report import GraphReport
from torch_mlc.dynamo_backend.searching import search
from torch_mlc.runtime.settings.options import OptionError, Options
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.cost import convolution
from torch_mlc.scheduler.decisions import ChosenFor, DecisionError, DecisionOverrides
from torch_mlc.scheduler.facts.contraction import Decision
from torch_mlc.scheduler.tuning.database import Database, Verdict
from torch_mlc.scheduler.tuning.flips import FlipSearch
from torch_mlc.scheduler.tuning.race import Estimate

LARGE = torch.randn(128, 320), torch.randn(320, 256)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


IMAGES = torch.randn(4, 16, 48, 48), torch.randn(16, 1, 3, 3)


def depthwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.conv2d(torch.relu(x), w, padding=1, groups=16))


def explained(folder: Path, fn: Any = product, given: Any = LARGE, **options: Any) -> GraphReport:
    torch._dynamo.reset()
    with torch.no_grad():
        (graph,) = torch_mlc.explain(fn, *given, options={"cache_dir": str(folder), **options}).graphs
    return graph


def decided(graph: GraphReport, kind: str = "product") -> tuple[str, str, ChosenFor]:
    (record,) = (d for d in graph.decisions if d.kind == kind)
    return record.chosen, record.default, record.source


@pytest.fixture
def wrong_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depthwise convolutions are taken to be a library's, which needs several times as long for them."""
    decide = convolution._decide_cpu

    def wrong(*given: Any) -> Decision:
        found = decide(*given)
        return found if found.otherwise is None else convolution._between(found.otherwise, 1e4, 0.9e4)

    monkeypatch.setattr(convolution, "_decide_cpu", wrong)


def test_a_wrong_cost_is_found_out_kept_and_replayed(
    tmp_path: Path, wrong_cost: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "DECISIONS_SHARE", 0.95)
    monkeypatch.setattr(search, "WHOLE_SHARE", 1.0)  # no time for kernels
    before = explained(tmp_path, depthwise, IMAGES)
    assert decided(before, "convolution") == ("library", "library", ChosenFor.COST)
    tuned = explained(tmp_path, depthwise, IMAGES, tune=1, tune_budget=150)
    assert decided(tuned, "convolution") == ("loops", "library", ChosenFor.MEASURED)
    assert len(before.libraries) == 1 and not tuned.libraries
    told = capfd.readouterr().err
    assert "otherwise" in told and "searched" in told
    for mode in ("replay", "0"):
        replayed = explained(tmp_path, depthwise, IMAGES, tune=mode)
        assert decided(replayed, "convolution") == ("loops", "library", ChosenFor.RECORDED)
        assert replayed.program.splitlines()[1:] == tuned.program.splitlines()[1:], "but for the graph's name"
    for kept in ({"tune": "replay", "tune_numerics": "same"}, {"tune": "model"}):
        assert decided(explained(tmp_path, depthwise, IMAGES, **kept), "convolution")[0] == "library"


def test_a_decision_by_hand_is_taken_and_told(tmp_path: Path) -> None:
    plain = explained(tmp_path)
    (record,) = (d for d in plain.decisions if d.kind == "product")
    assert record.chosen == "library"
    other = explained(tmp_path, decisions={record.name: "loops"})
    assert decided(other) == ("loops", "library", ChosenFor.OVERRIDE)
    assert f"decided by hand: {record.name} is loops (library by cost)" in str(other) and not other.libraries
    assert record.name in plain.decided and "others" in plain.decided.splitlines()[0]
    with pytest.raises(Exception, match="has no way 'magic'; there are loops, library") as error:
        explained(tmp_path, decisions={record.name: "magic"})
    assert isinstance(error.value.__cause__ or error.value, (DecisionError, Exception))


def test_other_decisions_are_other_keys(tmp_path: Path) -> None:
    by_hand = Options.resolve(None, {"decisions": {"product:ab": "loops"}}, {})
    assert by_hand.decisions == Options.resolve(None, {"decisions": by_hand.decisions}, {}).decisions
    keys = [surroundings(o, ["cpu"])["settings"] for o in (Options(), by_hand)]
    assert keys[0] != keys[1] and "product" in keys[1]
    file = tmp_path / "decisions.json"
    file.write_text('{"product:ab": "loops"}')
    assert Options.resolve(None, {}, {"MLC_DECISIONS": str(file)}).decisions == by_hand.decisions
    for wrong in ("[]", "{", '{"product": "loops"}'):
        file.write_text(wrong)
        with pytest.raises(OptionError, match="decisions"):
            Options.resolve(None, {}, {"MLC_DECISIONS": str(file)})


def test_results_are_the_same_by_either_decision(tmp_path: Path) -> None:
    (record,) = (d for d in explained(tmp_path).decisions if d.kind == "product")
    torch._dynamo.reset()
    x, w = LARGE
    fn = torch.compile(product, backend="mlc", options={"decisions": {record.name: "loops"}})
    torch.testing.assert_close(fn(x, w), product(x, w), rtol=1e-4, atol=1e-4)


def test_schedules_that_make_no_faster_graph_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = FlipSearch(DecisionOverrides(), 1.0, 0.0, 0.0, 1e-3)
    monkeypatch.setattr(search, "search_flips", lambda *given, **more: nothing)
    monkeypatch.setattr(search, "race_graphs", lambda *given: (Estimate(1.02, 1.01, 1.03, 36), 0.004))
    monkeypatch.setattr(Tuning, "found_faster", property(lambda tuning: tuning.budget is not None))
    monkeypatch.setattr(search, "WHOLE_SHARE", 0.95)
    tuned = explained(tmp_path, tune=1, tune_budget=20)
    assert {k.chosen for k in tuned.kernels} == {"by default"}
    told = capfd.readouterr().err
    assert "the whole graph is not faster by them for sure (0.98x), so it keeps the default ones" in told
    again = explained(tmp_path, tune="replay")
    assert decided(again, "schedules") == ("default", "tuned", ChosenFor.RECORDED)
    assert {k.chosen for k in again.kernels} == {"by default"}
    monkeypatch.setattr(search, "race_graphs", lambda *given: (Estimate(0.9, 0.88, 0.92, 36), 0.004))
    explained(tmp_path, tune=1, tune_budget=20)
    assert "the whole graph by its schedules: 1.11x" in capfd.readouterr().err
    assert not [d for d in explained(tmp_path, tune="replay").decisions if d.kind == "schedules"]


def test_the_database_keeps_the_last_search_of_a_graph(tmp_path: Path) -> None:
    target, other = cpu_target(), DecisionOverrides((("split", "k", "whole"),))
    with Database(tmp_path / DATABASE, "1") as database:
        assert database.decisions("g" * 64, target) is None and not database.tried_decisions("g", target)
        database.record_decisions("g", target, other, 1e-3, ratio=0.8, count=36, sigma=0.01, verdict=Verdict.ACCEPTED)
        database.record_decisions("g", target, DecisionOverrides(), error="it crashed", verdict=Verdict.CRASHED)
        found = database.decisions("g", target)
        assert found is not None and found.chosen == other and (found.ratio, found.count) == (0.8, 36)
        assert database.decisions("h", target) is None
        assert {d.verdict for d in database.tried_decisions("g", target).values()} == {
            Verdict.ACCEPTED,
            Verdict.CRASHED,
        }
        database.record_decisions("g", target, DecisionOverrides(), 1e-3, ratio=1.0, verdict=Verdict.ACCEPTED)
        last = database.decisions("g", target)
        assert last is not None and not last.chosen
    with Database(tmp_path / DATABASE, "2") as database:
        assert not database.tried_decisions("g", target), "of other versions"
        assert database.decisions("g", target) is not None
        assert database.clear() == 2 and database.decisions("g", target) is None
