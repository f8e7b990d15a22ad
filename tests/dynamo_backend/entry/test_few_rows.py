"""Products of few rows in loops of ours: right for every number of rows, layout and value, and taken where they pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.scheduler.cost.products import contraction_cpu

ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16)


@pytest.fixture
def in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of two matrices are ours, however small they are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(contraction_cpu, "_few_rows", lambda p, machine: (0.0, 1.0))


def compiled(fn: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    return torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True, options={"cache": False})


def along(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def across(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def weight_of(fn: Callable[..., Any], columns: int, terms: int) -> Tensor:
    return torch.randn(columns, terms) if fn is along else torch.randn(terms, columns)


def agrees(got: Tensor, wanted: Tensor, terms: int) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-6 * terms**0.5)


@pytest.mark.parametrize("fn", [along, across])
@pytest.mark.parametrize(("columns", "terms"), [(67, 93), (160, 517), (1, 40), (48, 1)])
def test_any_number_of_rows(in_loops: None, fn: Callable[..., Tensor], columns: int, terms: int) -> None:
    w = weight_of(fn, columns, terms)
    for rows in ROWS:
        torch._dynamo.reset()
        x = torch.randn(rows, terms)
        agrees(compiled(fn)(x, w), fn(x.double(), w.double()), terms)


@pytest.mark.parametrize("fn", [along, across])
def test_rows_that_vary(fn: Callable[..., Tensor]) -> None:
    """What is chosen for the first number of rows serves all, few or many."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    w = weight_of(fn, 1024, 1100)
    run = compiled(fn, dynamic=True)
    for rows in (4, 2, 16, 17, 300, 3):
        x = torch.randn(rows, 1100)
        agrees(run(x, w), fn(x.double(), w.double()), 1100)


@pytest.mark.parametrize("fn", [along, across])
def test_rows_that_vary_in_loops(in_loops: None, fn: Callable[..., Tensor]) -> None:
    w, run = weight_of(fn, 70, 130), compiled(fn, dynamic=True)
    for rows in (4, 2, 16, 17, 33, 3):
        x = torch.randn(rows, 130)
        agrees(run(x, w), fn(x.double(), w.double()), 130)


def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, up, bias)), down)


def norm_first(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.silu(F.linear(F.layer_norm(x, x.shape[-1:]), up)) * (x @ down + bias)


def added(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return torch.addmm(bias, x, down, beta=0.5, alpha=2.0).relu()


FORMS: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    mlp: ((150, 90), (150,), (90, 150)),
    norm_first: ((150, 90), (150,), (90, 150)),
    added: ((150, 90), (150,), (90, 150)),
}


@pytest.mark.parametrize("fn", FORMS)
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_what_stands_around_them(in_loops: None, fn: Callable[..., Tensor], rows: int) -> None:
    inputs = [torch.randn(rows, 90), *(torch.randn(shape) / 9 for shape in FORMS[fn])]
    agrees(compiled(fn)(*inputs), fn(*(t.double() for t in inputs)), 150)


def test_activations_in_front_are_computed_once_and_those_behind_join(in_loops: None) -> None:
    inputs = [torch.randn(4, 90), *(torch.randn(shape) / 9 for shape in FORMS[mlp])]
    with torch.no_grad():
        report = torch_mlc.explain(mlp, *inputs, options={"cache": False})
    assert [k.rule for k in report.kernels] == ["cpu_contraction", "cpu_contraction"]
    assert not report.graphs[0].libraries


@pytest.mark.parametrize("fn", [along, across])
def test_numbers_that_are_none(in_loops: None, fn: Callable[..., Tensor]) -> None:
    """Only what a NaN or an infinity meets has one, and no lane of a tail brings another in."""
    w = weight_of(fn, 67, 93)
    for rows in (2, 5, 16):
        x = torch.randn(rows, 93)
        x[1, 92], x[0, 0] = float("nan"), float("inf")
        changed = w.clone()
        changed[-1, -1] = -float("inf")
        for weight in (w, changed):
            torch._dynamo.reset()
            wanted = fn(x.double(), weight.double())
            got = compiled(fn)(x, weight)
            assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
            agrees(got.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0), 93)


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    torch._dynamo.reset()
    rows, terms, columns = shape
    x, w = torch.randn(rows, terms), torch.randn(columns, terms)
    assert torch.equal(compiled(along)(x, w), along(x, w))


@pytest.mark.parametrize("rows", [3, 8])
def test_operands_of_any_strides(in_loops: None, rows: int) -> None:
    x = torch.randn(rows, 180)
    for left in (x[:, ::2], torch.randn(90, rows).t(), x[:, 5:95], torch.randn(1, 90).expand(rows, 90)):
        for right in (torch.randn(70, 190)[:, ::2][:, :90], torch.randn(70, 99)[:, 4:94], torch.randn(90, 70).t()):
            torch._dynamo.reset()
            agrees(compiled(along)(left, right), along(left.double(), right.double()), 90)


@pytest.mark.parametrize("fn", [along, across])
def test_gradients(in_loops: None, fn: Callable[..., Tensor]) -> None:
    x, w = torch.randn(5, 93), weight_of(fn, 67, 93)
    given = torch.randn(5, 67)
    narrow, wide = ([t.detach().to(kind).requires_grad_() for t in (x, w)] for kind in (torch.float32, torch.float64))
    compiled(fn)(*narrow).backward(given)
    fn(*wide).backward(given.double())
    for a, b in zip(narrow, wide, strict=True):
        assert a.grad is not None and b.grad is not None
        agrees(a.grad, b.grad, 93)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 7, 16])
def test_narrow_weights(in_loops: None, dtype: torch.dtype, rows: int) -> None:
    def converted(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.to(x.dtype).t()

    x, w = torch.randn(rows, 170), torch.randint(-9, 9, (70, 170)).to(dtype)
    agrees(compiled(converted)(x, w), converted(x.double(), w), 170)
