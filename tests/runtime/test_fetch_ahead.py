"""Memory that is asked for ahead, what the machine code asks for, and the maxima that wait for it most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.nest.loops import Loop, LoopKind, walk_nodes
from torch_mlc.scheduler.rules.cpu import prefetch as cpu_prefetch


@pytest.fixture(autouse=True)
def a_processor_that_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this one is."""
    monkeypatch.setattr(cpu_prefetch, "gains", lambda target: True)


def kernel(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> KernelReport:
    (found,) = torch_mlc.explain(fn, *inputs, dynamic=dynamic).kernels
    return found


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def distances(report: KernelReport, key: str = "prefetch") -> list[int]:
    """The distances that a schedule asks for, in bytes."""
    return [int(dict(lp.annotations)[key]) for lp in loops(report) if key in dict(lp.annotations)]


def loops(report: KernelReport) -> list[Loop]:
    assert report.scheduled is not None
    return [n for n, _ in walk_nodes(report.scheduled.body) if isinstance(n, Loop)]


def test_the_first_visit_of_a_large_row_fetches_the_next_page() -> None:
    x, weight = rand(600, 1021), rand(1021)
    report = kernel(lambda x, w: torch.logsumexp(x * w, -1), x, weight)
    assert distances(report) == [4096]
    asked = [line for line in report.source.splitlines() if "@llvm.prefetch" in line and "call" in line]
    # Each line of a vector of the rows is asked for; the weight stays where it is.
    lanes = next(int(lp.extent) for lp in loops(report) if lp.kind is LoopKind.VECTORIZED)
    assert len(asked) == lanes * 4 // 64


def test_what_is_written_is_asked_for_with_what_is_read() -> None:
    """Either alone was seen to gain nothing, or to cost more than it gives."""
    weight = rand(1021)
    for fn in (
        lambda x: torch.nn.functional.layer_norm(x, (1021,), weight),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.log_softmax(x, -1),
        lambda x: torch.sigmoid(x) * x,
    ):
        report = kernel(fn, rand(600, 1021))
        assert distances(report) == [4096]
        assert distances(report, "prefetch_stores") == [4096]
        # As loads want them, and as stores do.
        assert "i32 0, i32 3, i32 1)" in report.source
        assert "i32 1, i32 3, i32 1)" in report.source


def test_rows_of_reductions_write_nothing_large() -> None:
    report = kernel(lambda x: x.sum(-1), rand(600, 1021))
    assert distances(report) == [4096]
    assert distances(report, "prefetch_stores") == []


@pytest.mark.parametrize("rows", [0, 1, 600])
@pytest.mark.parametrize("columns", [1, 1021])
def test_asking_past_the_ends_of_arrays_changes_nothing(rows: int, columns: int) -> None:
    """Sizes are symbols whose hints are large, so that a call with few rows asks for what is not there."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (torch.softmax(x, -1), torch.relu(x) + 1), backend="mlc", dynamic=True)
    compiled(rand(700, 1500))
    x = rand(rows, columns)
    if rows > 1:
        x[1], x[rows - 1, 0] = torch.inf, torch.nan
    for got, wanted in zip(compiled(x), (torch.softmax(x.double(), -1), torch.relu(x.double()) + 1), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_small_arrays_and_arrays_with_gaps_fetch_nothing() -> None:
    for key in ("prefetch", "prefetch_stores"):
        assert distances(kernel(lambda x: torch.softmax(x, -1), rand(16, 1021)), key) == []
        assert distances(kernel(lambda x: x.amax(-1), rand(16, 1021)), key) == []
        assert distances(kernel(lambda x: x.amax(-1), rand(600, 2042)[:, :1021]), key) == []


def test_rows_that_lie_apart_are_fetched_several_jumps_ahead() -> None:
    # Pieces of one vector, and of several, where vectors are of 32 elements and where they are of 64.
    for width in (20, 62, 126):
        report = kernel(lambda x: x.permute(0, 2, 1, 3).contiguous(), rand(3, 201, 17 * 126 // width, width))
        assert distances(report) == [8 * (17 * 126 // width) * width * 4], width


@pytest.mark.parametrize("dynamic", [False, True])
def test_maxima_of_rows_are_those_of_eager(dynamic: bool) -> None:
    x = rand(520, 1021)
    x[3, 1020], x[7, 0], x[11] = torch.nan, torch.inf, -torch.inf
    x[13, 500:] = torch.nan
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.amax(-1), x.amin(-1)), backend="mlc", dynamic=dynamic)
    for got, wanted in zip(compiled(x), (x.amax(-1), x.amin(-1)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_columns_that_leave_a_tail_are_one_block() -> None:
    """A block of its own for the last vector of each row would read four lines of a page."""
    report = kernel(lambda x: (torch.sigmoid(x), torch.sigmoid(x).sum(0)), rand(300, 1021))
    assert report.rule == "cpu_column_reduction"
    lanes = next(int(lp.extent) for lp in loops(report) if lp.kind is LoopKind.VECTORIZED)
    turns = next(lp.extent for lp in loops(report) if any(isinstance(n, Loop) and n.extent == lanes for n in lp.body))
    assert turns * lanes >= 1021 > (turns - 1) * lanes
