"""Scans: imported by the oracle, compiled against eager and float64, alone and with what stands around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.ir.graph.graph import Graph

OPS = ("cumsum", "cumprod", "logcumsumexp")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Any:
    return torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)


def agree(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> None:
    torch.testing.assert_close(compiled(fn, *inputs, dynamic=dynamic), fn(*inputs), equal_nan=True)


def kernels(fn: Callable[..., Any], *inputs: Any) -> list[Any]:
    (graph,) = torch_mlc.explain(fn, *inputs).graphs
    assert not graph.libraries, graph.libraries
    return list(graph.kernels)


# --- import -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_rules_of_types(check: Callable[..., Graph], op: str, dtype: torch.dtype) -> None:
    if op == "logcumsumexp" and not dtype.is_floating_point:
        pytest.skip("of floating types alone")
    fn = getattr(torch, op)
    x = (torch.randn(3, 7) * 3).to(dtype)
    for dim in (0, 1, -2):
        check(partial(fn, dim=dim), x)
    check(lambda v: fn(v, 0), x[0, 0])
    check(lambda v: fn(v, 1), x[:, :0])
    check(lambda v: fn(v, 1), x[:0])
    check(lambda v: fn(v, -1), x.t(), fast=True)


@pytest.mark.parametrize("asked", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8])
def test_a_type_that_is_asked_for_is_that_of_the_elements_too(check: Callable[..., Graph], asked: torch.dtype) -> None:
    """In ATen the operand is converted first: fractions vanish before they are summed, small integers wrap."""
    x = torch.randn(5, 9) * 40
    check(lambda v: v.cumsum(1, dtype=asked), x)
    check(lambda v: v.cumprod(0, dtype=asked), x)
    check(lambda v: v.cumsum(1, dtype=asked), x.int())


@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(check: Callable[..., Graph], op: str) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, inf, 2.0, -inf, 3.0], [-inf, -inf, 1.0, nan, 2.0], [nan, 1.0, inf, inf, -inf],
                      [-inf, -inf, -inf, 0.0, -0.0], [-inf, inf, 1.0, 1.0, inf]])  # fmt: skip
    fn = getattr(torch, op)
    check(lambda v: fn(v, 1), x)
    check(lambda v: fn(v, 0), x)
    agree(lambda v: fn(v, 1), x.repeat(1, 9))
    agree(lambda v: fn(v, 0), x.repeat(7, 9))


BEST = ("cummax", "cummin")


@pytest.mark.parametrize("op", BEST)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_best_so_far_and_where_it_was(check: Callable[..., Graph], op: str, dtype: torch.dtype) -> None:
    """Of equals the last."""
    fn = getattr(torch, op)
    x = (torch.randn(3, 9) * 1.5).to(dtype)
    for dim in (0, 1, -2):
        check(partial(fn, dim=dim), x)
    check(lambda v: fn(v, 0), x[0, 0])
    check(lambda v: fn(v, 1), x[:, :0])
    check(lambda v: fn(v, 1), x[:, :1])
    agree(lambda v: (*fn(v, 0), *fn(v, 1)), x.repeat(5, 7))
    agree(lambda v: (*fn(v, 0), fn(v, 1)[1]), x.repeat(5, 7), dynamic=True)


@pytest.mark.parametrize("op", BEST)
def test_the_best_of_nothing_but_infinities_and_nan(op: str) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1.0, nan, 2.0, nan, 3.0], [-inf, -inf, -inf, -inf, -inf], [inf, inf, 1.0, inf, inf],
                      [0.0, -0.0, 0.0, -0.0, -1.0], [nan, 1.0, inf, -inf, nan]])  # fmt: skip
    fn = getattr(torch, op)
    for v in (x, x.t().contiguous(), x.repeat(1, 5), x.repeat(5, 1)):
        agree(lambda v: (*fn(v, 0), *fn(v, 1)), v)
    low = torch.full((2, 20), torch.iinfo(torch.int32).min, dtype=torch.int32)
    agree(lambda v: (*fn(v, 1), *fn(-1 - v, 0)), low)


@pytest.mark.parametrize("op", BEST)
def test_gradients_of_the_best_so_far(op: str) -> None:
    x = torch.randn(4, 33, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (getattr(torch, op)(x.sin(), 1).values * x).sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(compiled(loss, x), x)
    torch.testing.assert_close(got, expected)


# --- kernels ----------------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (1, 130), (3, 7), (5, 16), (4, 100), (33, 65), (2, 3, 37), (2, 33, 5), (3, 16, 24))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_every_dim(op: str, dtype: torch.dtype) -> None:
    if op == "logcumsumexp" and not dtype.is_floating_point:
        pytest.skip("of floating types alone")
    fn = getattr(torch, op)
    for shape in SHAPES[1::2] if dtype is torch.float64 else SHAPES:
        x = (torch.randn(shape) * 2).to(dtype)
        agree(lambda v: tuple(fn(v, d) for d in range(v.ndim)), x)


def test_strides() -> None:
    x = torch.randn(37, 50)
    for view in (x.t(), x[:, ::2], x[3:30, 5:], x[:1].expand(6, 50), x.flip(1)):
        agree(lambda v: (v.cumsum(0), v.cumprod(1)), view)


@pytest.mark.parametrize("op", OPS)
def test_sizes_that_are_symbols(op: str) -> None:
    fn = getattr(torch, op)
    run = torch.compile(lambda v: (fn(v * 0.5, 1), fn(v, 0) + v), backend="mlc", dynamic=True, fullgraph=True)
    for shape in ((3, 5), (7, 33), (64, 2), (33, 129), (2, 1000)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), (fn(x * 0.5, 1), fn(x, 0) + x))


@pytest.mark.parametrize("shape", [(1 << 18,), (3, 1 << 16), (1 << 16, 3)])
def test_long_scans_are_as_exact_as_those_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    dim = max(range(len(shape)), key=lambda d: shape[d])
    for op in ("cumsum", "logcumsumexp"):
        exact = getattr(torch, op)(x.double(), dim)
        got, eager = (f(lambda v, op=op: getattr(torch, op)(v, dim), x) for f in (compiled, lambda fn, v: fn(v)))
        assert (got - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + 1e-6


def test_producers_and_readers_share_the_kernel() -> None:
    x, y = torch.randn(40, 70), torch.randn(40, 70)
    for fn in (
        lambda x, y: x.exp().cumsum(-1) * y,
        lambda x, y: (x * y).cumsum(0).tanh(),
        lambda x, y: (x - y).cumprod(1),
    ):
        assert [k.rule for k in kernels(fn, x, y)] == ["cpu_scan"]
        agree(fn, x, y)


def test_reductions_over_the_same_elements_share_the_kernel() -> None:
    def top(x: Tensor) -> Tensor:
        return torch.where(F.softmax(x, -1).cumsum(-1) < 0.7, x, -1e9)

    def area(x: Tensor) -> Tensor:
        return (x * x).cumsum(1).sum(1)

    x = torch.randn(9, 300)
    for fn in (top, area):
        assert len(kernels(fn, x)) == 1
        agree(fn, x)


def back(x: Tensor, dim: int = -1) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def test_scans_from_the_end_share_the_kernel() -> None:
    """What is made for them and of them is made backward."""
    programs: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: back(x),
        lambda x: back(x.exp(), 0) * x,
        lambda x: back(F.softmax(x, -1)) * 2 + x,
        lambda x: (back(F.softmax(x, -1)), F.softmax(x, -1).amax(1), (back(F.softmax(x, -1)) * x).sum(1)),
        lambda x: back(back(x * 2)),
        lambda x: (x.flip(1).cummax(1).values.flip(1), x.flip(1).cumprod(1)),
    )
    for fn in programs:
        x = torch.randn(18, 101)
        assert [k.rule for k in kernels(fn, x)] == ["cpu_scan"]
        for v in (x, x.double(), x[:, :64].contiguous(), x.t(), x[:, :1], x[:0]):
            agree(fn, v)
        run = torch.compile(fn, backend="mlc", dynamic=True, fullgraph=True)
        for shape in ((18, 33), (4, 129), (64, 2)):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), fn(x))


def test_what_reads_scans_of_both_directions_has_a_kernel_of_its_own() -> None:
    def both(x: Tensor) -> Tensor:
        return x.cumsum(1) + back(x, 1)

    x = torch.randn(9, 130)
    assert [k.rule for k in kernels(both, x)] == ["cpu_scan", "cpu_pointwise"]
    agree(both, x)
    agree(lambda x: back(x.cumsum(1)), x)
    agree(lambda x: back(x.tanh(), 1) + back(x.tanh(), 0), x)
    agree(lambda x: back((x * 2).reshape(3, -1)).reshape(x.shape) - x, x)


def test_two_scans_of_one_dimension_share_the_kernel_and_others_do_not() -> None:
    x = torch.randn(24, 48)
    assert len(kernels(lambda x: (x.cumsum(1), x.cumprod(1)), x)) == 1
    assert len(kernels(lambda x: x.cumsum(1).cumsum(1), x)) == 1
    assert len(kernels(lambda x: x.cumsum(1).cumsum(0), x)) == 2
    agree(lambda x: (x.cumsum(1).cumsum(1), x.cumsum(1).cumsum(0), x.cumsum(1).sum(0), x.cumsum(0).sum(0)), x)


def test_a_scan_over_merged_dimensions_keeps_their_order() -> None:
    x = torch.randn(4, 6, 5)
    agree(lambda x: (x * 2).reshape(-1).cumsum(0).reshape(x.shape) + x, x)
    agree(lambda x: (x.permute(2, 0, 1) * 2).reshape(-1).cumsum(0), x)
    agree(lambda x: x.reshape(4, 30).cumsum(1).reshape(x.shape) + x.transpose(1, 2).reshape(4, 6, 5), x)


def test_what_reads_elements_elsewhere() -> None:
    x = torch.randn(6, 33)
    agree(lambda x: x.flip(1).cumsum(1).flip(1), x)
    agree(lambda x: F.pad(x.cumsum(1), (1, 0))[:, :-1], x)
    agree(lambda x: x.cumsum(1)[:, ::3] - x.cumsum(1)[:, -1:], x)


def test_few_long_rows_with_a_reduction() -> None:
    """A sum that would be split over a team stays whole beside a scan."""
    x = torch.randn(2, 20000)
    agree(lambda x: (x.cumsum(1), x.sum(1), x / x.abs().sum(1, keepdim=True)), x)


def test_backward() -> None:
    def loss(x: Tensor) -> Tensor:
        return (x.sigmoid().cumsum(-1) * x).sum() + x.logcumsumexp(0).square().mean()

    x = torch.randn(7, 45, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(compiled(loss, x), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("n", [3, 8])
def test_rows_of_a_scan_that_are_summed_beside_it(n: int) -> None:
    """What is read is the rows of one and the elements of the other, and no dimension can be both."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        powers = x[:, None].expand(x.shape[0], n).cumprod(1)
        return x.sum(0), powers, x.amax(0), powers.flip(1).sum(0), torch.vander(x, n)

    torch._dynamo.reset()
    for size in (n, n + 2):
        x = torch.randint(-3, 4, (size,))
        torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x), rtol=0, atol=0)
