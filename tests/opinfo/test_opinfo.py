"""A few operators of torch's database against eager in every run; the sweep itself, with workers that die and hang."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.opinfo import check, report
from tests.opinfo.cases import Job, Sample, jobs, moved, operators, samples
from tests.opinfo.check import difference
from tests.opinfo.layouts import LAYOUTS, laid_out
from tests.opinfo.refused_types import recorded, refused
from tests.opinfo.report import differences, kind_of, write_table
from tests.opinfo.sweep import Sweep, latest, read
from torch_mlc.dynamo_backend.converters.refused_types import refused_types

# Every so many operators in each run; the others are for ``python -m tests.opinfo``.
STEP = 41
GRADIENTS = [job for job in jobs(("float32",), ("gradient",))][::STEP]
INTEGERS = [job for job in jobs(("int64",), ("forward",))][5 :: 2 * STEP]
WRITTEN = [job for job in jobs(("float32",), ("inplace", "out"))][7 :: 3 * STEP]
LAID_OUT = [Job("nn.functional.avg_pool2d", "float32", layout) for layout in LAYOUTS]
LAID_OUT += [Job(f"nn.functional.{op}", "float32", "channels_last") for op in ("max_unpool2d", "channel_shuffle")]


@pytest.mark.parametrize("job", [*GRADIENTS, *INTEGERS, *WRITTEN, *LAID_OUT], ids=str)
def test_an_operator_equals_eager(job: Job) -> None:
    for sample in samples(job)[:2]:
        outcome = check.check(job, sample)
        assert outcome.status in ("equal", "invalid", "torch"), outcome.detail


def test_samples_in_one_function_have_outcomes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("add", "float32")
    found = samples(job, 3)
    found[1] = replace(found[1], args=(torch.ones(7, 1, 5, 3),))
    outcomes = check.check_all(job, found)
    assert [o.status for o in outcomes] == ["equal", "invalid", "equal"]
    assert all(o.graphs == 1 and o.kernels == 2 for o in outcomes[::2]), "one graph, and a kernel for each"
    real = check._compare

    def compare(job: Job, found: list[Any], expected: Any, backend: str, *rest: Any, **how: Any) -> list[check.Outcome]:
        outcomes = real(job, found, expected, backend, *rest, **how)
        if len(found) > 1 and backend == "mlc":
            outcomes[1] = check.Outcome("wrong", "first seen")
        return outcomes

    monkeypatch.setattr(check, "_compare", compare)
    first, _, last = check.check_all(job, found)
    assert first.status == "equal" and first.kernels == 2
    assert last.status == "wrong" and last.detail == "in one graph with others: first seen", "alone it is right"


def test_random_numbers_and_broken_graphs_are_checked_one_by_one() -> None:
    for op in ("rand_like", "equal"):
        job = Job(op, "float32")
        outcomes = check.check_all(job, samples(job, 2))
        assert [o.status for o in outcomes] == ["equal", "equal"]
        assert all(o.kernels == (op == "rand_like") for o in outcomes), op


REFUSED = [
    *(Job(op, "int64", "refused") for op in ("nn.functional.adaptive_avg_pool2d", "nn.functional.glu", "frac")),
    *(Job(op, "bool", "refused") for op in ("ceil", "softmax", "linalg.cross", "median")),
    Job("cdist", "bfloat16", "refused"),
]


@pytest.mark.parametrize("job", REFUSED, ids=str)
def test_an_element_type_that_eager_refuses(job: Job) -> None:
    assert job in set(jobs((job.dtype,), ("refused",)))
    assert [o.status for o in check.check_all(job, samples(job, 1))] == ["equal"]


def test_an_element_type_that_only_eager_refuses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("nn.functional.hardswish", "int64", "refused")
    real = check._compiled

    def computes(calls: Any, name: str, **options: object) -> Any:
        return (lambda calls: [torch.zeros(3)]) if name == "mlc" else real(calls, name, **options)

    monkeypatch.setattr(check, "_compiled", computes)
    (outcome,) = check.check_all(job, samples(job, 1))
    assert outcome.status == "wrong" and outcome.detail.endswith("not implemented for 'Long' | no error")


def test_the_table_of_refused_types_is_what_eager_s_kernels_say() -> None:
    """For a few operators of all; by ``python -m tests.opinfo.refused_types`` for every one."""
    chosen = [operators()[name] for name in ("ceil", "nn.functional.hardswish", "nn.functional.max_pool2d", "frac")]
    found = {f"aten.{op}": {getattr(torch, t) for t in types} for op, types in refused(recorded(chosen))}
    assert "aten.ceil.default" in found and "aten.frac.default" in found
    for op, types in found.items():  # a type that another version takes is one that its library computes
        same = torch.__version__.startswith("2.13")
        assert types == refused_types()[op] if same else types & refused_types()[op], op


def test_layouts_are_what_they_say() -> None:
    x = torch.arange(48.0).view(2, 3, 2, 4)
    strides = {
        "transposed": (1, 2, 6, 12), "sliced": (120, 24, 6, 1), "expanded": (0, 8, 4, 1), "overlapping": (1, 1, 1, 1),
        "channels_last": (24, 1, 12, 3), "empty": (24, 8, 4, 1),
    }  # fmt: skip
    for layout, expected in strides.items():
        made = laid_out(x, layout)
        assert made.stride() == expected, layout
        assert layout == "empty" or made.shape == x.shape
        assert torch.equal(made, x) == (layout in ("transposed", "sliced", "channels_last")), layout
    row = torch.arange(3.0)
    assert laid_out(row, "channels_last") is row and laid_out(row, "transposed").stride() == (2,)
    assert not samples(Job("nn.functional.avg_pool1d", "float32", "channels_last")), "nothing lies otherwise"


def test_what_differs_is_seen() -> None:
    x = torch.tensor([1.0, 2.0, float("nan")])
    same = dict(exact=lambda: None, values=True, layout=True)
    assert not difference([x], [x.clone()], **same)  # type: ignore[arg-type]
    assert "1 of 3 differ" in difference([x + torch.tensor([0, 1, 0])], [x], **same)  # type: ignore[arg-type]
    assert "float64" in difference([x.double()], [x], **same)  # type: ignore[arg-type]
    square = torch.ones(2, 3)
    assert "strides" in difference([square.t().contiguous().t()], [square], **same)  # type: ignore[arg-type]
    assert "2 results" in difference([x, x], [x], **same)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_operands_do_not_tell_is_not_asked_for(dtype: torch.dtype) -> None:
    """Eager may be lucky where a result is as far from certain as its operands are rounded; but no further."""
    coarser = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    big, small = torch.tensor([1e4, 3.0]), torch.tensor([1e4 - 1e-3, 2.0])
    exact = (big.double() - small.double()).to(dtype)

    def reference(seed: int | None = None) -> list[torch.Tensor]:
        sample = Sample(big.double(), (small.double(),), {}, lambda r: r)
        sample = sample if seed is None else moved(sample, seed, dtype)
        return [sample.input - sample.args[0]]

    how = {"values": True, "layout": True}
    assert not difference([exact + torch.tensor([5e-4 * coarser, 0.0]).to(dtype)], [exact], reference, **how)
    for wrong in ([1e-1 * coarser, 0.0], [0.0, 1e-2 * coarser]):
        assert "1 of 2 differ" in difference([exact + torch.tensor(wrong).to(dtype)], [exact], reference, **how)


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    job = Job("add", "float32", "forward")
    told: list[dict[str, Any]] = []
    sweep = Sweep([job], results, most=2, told=told.append)
    sweep.run()
    assert [r["status"] for r in told if r["sample"] is not None] == ["equal", "equal"]
    told.clear()
    sweep.run()
    assert not told, "what is written down is not done again"
    assert set(latest(read(results))) == {(job, 0), (job, 1)}
    Sweep([job], results, most=3, told=told.append).run()
    assert [r["sample"] for r in told] == [2, None], "asked for more, it goes on behind the last"


def test_the_page_of_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(op: str, status: str, kernels: int, library: list[str], graphs: int = 1) -> dict[str, Any]:
        return {
            "op": op, "dtype": "float32", "mode": "forward", "sample": 0, "status": status, "detail": "d",
            "graphs": graphs, "kernels": kernels, "library": library,
        }  # fmt: skip

    entries = [
        entry("add", "equal", 1, []),
        entry("mm", "equal", 0, ["aten::mm.default"]),
        entry("t", "equal", 0, []),
        entry("bad", "wrong", 1, []),
        entry("equal", "equal", 0, [], graphs=0),
    ]
    path = tmp_path / "results.jsonl"
    ends = [{"op": e["op"], "dtype": "float32", "mode": "forward", "sample": None, "samples": 3, "most": m}
            for e, m in zip(entries, (1, 0, 2, 5, 2))]  # fmt: skip
    path.write_text("\n".join(json.dumps(e) for e in (*entries, *ends)) + "\n")
    records = latest(read(path))
    assert [kind_of([e]) for e in entries] == ["generated", "library", "view", "generated", "eager"]
    assert "1 wrong (float32 forward [0]): d" in differences(records)
    page, whole = tmp_path / "operators.md", [Job(e["op"], "float32", "forward") for e in entries]
    monkeypatch.setattr(report, "jobs", lambda dtypes, modes: [*whole, Job("left", "float32", "forward")])
    write_table(read(path), page)
    assert "--dtypes" not in page.read_text(), "a sweep that was stopped is no command that was run"
    monkeypatch.setattr(report, "jobs", lambda dtypes, modes: whole)
    write_table(read(path), page)
    text = page.read_text()
    assert "| `mm` | library | `mm.default` | f32 |  |" in text
    assert "**80.000%** of 5 samples" in text and "| generated: kernels alone | 2 | 40.0% |" in text
    assert "| forward | float32 | 5 | 5 | 4 | 1 | 0 |" in text
    assert "| `bad` | forward | f32 | 1 | wrong: d |" in text
    assert "--dtypes float32 --modes forward --samples 1\n" in text
