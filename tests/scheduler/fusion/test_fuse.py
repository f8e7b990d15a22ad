"""Fusion: programs keep eager's answer, and become as few kernels as their index expressions allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.ir.graph.graph import CallTensor


def chain(x: Tensor, y: Tensor) -> Tensor:
    return (torch.relu(x + y) * y).sigmoid()


def norm(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + 1e-5)


def siblings(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sum(-1), x.amax(-1), (x * x).sum(-1)


def reshaped(x: Tensor) -> Tensor:
    return (x.view(2, 3, 4, 5).permute(0, 2, 1, 3).reshape(8, 15) + 1).relu()


def merged_dims(x: Tensor) -> Tensor:
    h = x.exp()
    return h.view(6, 20) + h.reshape(6, 20).sum(-1, keepdim=True)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = (x * 2).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def columns(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.tanh()
    return h.sum(0), h.amax(0)


def two_directions(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), x.sum(1)


def transposed_use(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, h.t().contiguous() + 1


def full(x: Tensor) -> Tensor:
    return ((x - 1) ** 2).mean()


def softmax_like(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def broadcast_rows(s: Tensor, x: Tensor) -> Tensor:
    return x * torch.exp(s).unsqueeze(-1)


def slices(x: Tensor) -> Tensor:
    return x[:, 1:] - x[:, :-1]


def through_matmul(x: Tensor, w: Tensor) -> Tensor:
    h = F.silu(x @ w)
    return h + h.mean(-1, keepdim=True)


def expand_copy(x: Tensor) -> Tensor:
    return x[:, :, None, :].expand(2, 3, 2, 20).reshape(2, 6, 20) * 3


CASES: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = [
    (chain, ((3, 5), (3, 5)), 1),
    (norm, ((4, 7, 16),), 1),
    (siblings, ((5, 9),), 1),
    (reshaped, ((6, 20),), 1),
    (merged_dims, ((2, 3, 20),), 1),
    (rotate_half, ((2, 3, 8), (3, 4), (3, 4)), 1),
    (columns, ((7, 5),), 1),
    (two_directions, ((7, 5),), 2),
    (transposed_use, ((4, 6),), 1),
    (full, ((6, 5),), 1),
    (softmax_like, ((3, 11),), 1),
    (broadcast_rows, ((4,), (4, 9)), 1),
    (slices, ((3, 8),), 1),
    (through_matmul, ((30, 40), (40, 20)), 1),
    (expand_copy, ((2, 3, 20),), 1),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn,shapes,kernels", CASES, ids=[c[0].__name__ for c in CASES])
def test_answer_and_kernel_count(
    reference: Callable[..., Any],
    fn: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    kernels: int,
    dynamic: bool,
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    if dynamic and fn in (reshaped, merged_dims, expand_copy):
        pytest.skip("sizes are written into the program")
    compiled = reference(fn, inputs, dynamic=dynamic)
    assert sum(isinstance(n, CallTensor) for n in compiled.fusion.graph.nodes) == kernels
    got = compiled.run(arguments(compiled, inputs))
    expected = fn(*inputs)
    for a, b in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def arguments(compiled: Any, inputs: list[Tensor]) -> list[Any]:
    """Tensors and sizes in the order in which the graph takes them."""
    tensors = iter(inputs)  # programs above use their arguments in order, as Dynamo passes them
    given: list[Any] = []
    pending: list[tuple[int, Any]] = []
    known: dict[Any, int] = {}
    for node in compiled.fusion.graph.inputs:
        if hasattr(node, "type"):
            t = next(tensors)
            known.update({s: n for s, n in zip(node.type.shape, t.shape, strict=True) if s.is_Symbol})
            given.append(t)
        else:
            pending.append((len(given), node.value))
            given.append(None)
    for at, symbol in pending:
        given[at] = known[symbol]
    return given
