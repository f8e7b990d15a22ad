"""Gradients of maxima go to the elements that equal them, also where the backward makes the elements again.

Between what is saved and the elements there are steps that a forward kernel takes without rounding, and one of them is
a result, which is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.versions import torch_mends_it

INF = float("inf")


def amax(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return (z - z.amax(-2, keepdim=True)).exp()


def largest_of_all(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return (z - z.max()).exp()


def amin(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return (z.amin(0) - z).exp()


def norm(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return z / torch.linalg.vector_norm(z, INF, dim=1, keepdim=True)


def matrix_norm(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(z, INF)


def both_ends(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    low, high = torch.aminmax(z, dim=0)
    return high * 2 - low


def renormed(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return torch.renorm(z, INF, 0, 0.5)


def scattered(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return z.new_zeros(5, 9).scatter_reduce(0, places, z, "amax", include_self=False)


def scattered_into_itself(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return z.scatter_reduce(0, places[:4], y[:4] * 1.3, "amin")


def rows_by_index(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return z.new_zeros(5, 9).index_reduce(0, places[:, 0], z, "amax", include_self=False)


def segments(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    return torch.segment_reduce(z, "max", lengths=torch.tensor([5, z.shape[0] - 5]), axis=0, unsafe=True)


def distances(y: Tensor, z: Tensor, places: Tensor) -> Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    return torch.cdist(z.to(wide), y.to(wide), p=INF)


FUNCTIONS = [
    amax, largest_of_all, amin, norm, matrix_norm, renormed, scattered, scattered_into_itself, rows_by_index, segments,
    distances, pytest.param(both_ends, marks=torch_mends_it),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_gradients(fn: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    def program(x: Tensor, w: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        y = x + torch.sin(x * w.sum(0))
        return y, fn(y, y + torch.sin(y * w.sum(1)[:9]), places)

    torch._dynamo.reset()
    torch.manual_seed(1)
    x, w = torch.randn(12, 9).to(dtype), torch.randn(11, 9).to(dtype)
    places = torch.randint(0, 5, (12, 9))
    sides = []
    for call, kind in ((torch.compile(program, backend="mlc"), dtype), (program, dtype), (program, torch.float64)):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (x, w)]
        sides.append([g.double() for g in torch.autograd.grad(call(*leaves, places)[1].float().sum(), leaves)])
    for mine, eager, exact in zip(*sides, strict=True):
        assert mine.isfinite().all()
        # In half types another element may be the largest, or two of them.
        assert (mine - exact).norm() <= 3 * (eager - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.parametrize("fn", FUNCTIONS[:4], ids=lambda f: f.__name__)
def test_sizes_that_vary(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x + torch.sin(x * w.sum(0))
        return y, fn(y, y + torch.sin(y * w.sum(1)[:9]), w)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="mlc", dynamic=True)
    for rows in (12, 17):
        torch.manual_seed(rows)
        leaves = [torch.randn(n, 9).bfloat16().requires_grad_() for n in (rows, 11)]
        gradients = torch.autograd.grad(compiled(*leaves)[1].sum(), leaves)
        assert all(g.isfinite().all() and g.any() for g in gradients)
