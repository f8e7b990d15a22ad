"""Kernels that write results over dead intermediates: only where nobody can tell, and then the peak is lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_mlc

X, W = torch.randn(33, 65), torch.randn(65, 65)
Program = Callable[[Tensor, Tensor], Any]

WRITTEN: dict[str, Program] = {
    "an epilogue": lambda x, w: (x @ w).relu(),
    "a chain": lambda x, w: ((x @ w).relu() @ w).tanh() @ w,
    "two results, one dying argument": lambda x, w: (lambda y: (y + 1, y * 2))(x @ w),
    "a residual": lambda x, w: x + (x @ w).sigmoid(),
    "behind a library's fresh result": lambda x, w: torch.sort(x @ w).values.exp(),
}

KEPT: dict[str, Program] = {
    "read again later": lambda x, w: (lambda y: (y.relu() @ w) + y)(x @ w),
    "returned itself": lambda x, w: (lambda y: (y, y.relu() @ w))(x @ w),
    "a view of it is returned": lambda x, w: (lambda y: (y.t(), y.relu() @ w))(x @ w),
    "a view of it is read later": lambda x, w: (lambda y: (y.relu() @ w) @ y.t())(x @ w),
    "read at another position too": lambda x, w: (lambda y: y + y.flip(0))(x @ w),
    "read transposed": lambda x, w: (lambda y: y + y.t())(w @ w),
    "read by rows": lambda x, w: torch.softmax(x @ w, -1),
    "another layout": lambda x, w: (x @ w).t().contiguous() * 2,
    "another type": lambda x, w: (x @ w).half(),
    "an input": lambda x, w: x.relu(),
    "a view of an input": lambda x, w: x.view(65, 33).relu(),
}


def compiled(program: Program, dynamic: bool) -> tuple[Any, str]:
    torch._dynamo.reset()
    before = X.clone(), W.clone()
    report = torch_mlc.explain(program, X, W, dynamic=dynamic)
    got = torch.compile(program, backend="mlc", dynamic=dynamic)(X, W)
    assert torch.equal(X, before[0]) and torch.equal(W, before[1])
    return got, report.graphs[0].program


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WRITTEN)
def test_dead_intermediates_are_written_over(name: str, dynamic: bool) -> None:
    got, text = compiled(WRITTEN[name], dynamic)
    assert "written over" in text
    torch.testing.assert_close(got, WRITTEN[name](X, W), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_needed_again_is_kept(name: str, dynamic: bool) -> None:
    got, text = compiled(KEPT[name], dynamic)
    written = [line.split()[2] for line in text.splitlines() if "written over" in line]
    first = next((line.split()[0] for line in text.splitlines() if "aten_mm" in line), "")
    assert first not in written
    want = KEPT[name](X, W)
    # Products in a row may be multiplied in another order.
    scale = max(t.abs().max().item() for t in (want if isinstance(want, tuple) else (want,)))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4 + 1e-5 * scale)


def test_constants_of_the_module_survive() -> None:
    """A tensor that the graph closes over is read by every call."""
    table = torch.randn(33, 65)

    def program(x: Tensor) -> Tensor:
        return (x * table).relu() + table

    run = torch.compile(program, backend="mlc")
    want = program(X)
    for _ in range(3):
        torch.testing.assert_close(run(X), want)


def test_the_peak_is_lower() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ w).relu()
        return x

    report = torch_mlc.explain(program, torch.randn(256, 256), torch.randn(256, 256))
    assert report.graphs[0].peak_bytes <= 2 * 256 * 256 * 4
