"""Attention whose queries, keys or values are the same along some of their dimensions, down to one number for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SHAPE = (2, 3, 34, 8)
KEPT = ("", "w", "r", "hr", "b")  # the dimensions an operand varies along: batch, heads, rows, width


def _shape(kept: str) -> list[int]:
    return [n if name in kept else 1 for name, n in zip("bhrw", SHAPE, strict=True)]


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.mT / 20) * 20, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


PLACES = [
    pytest.param(0, id="queries"),
    pytest.param(1, id="keys"),
    pytest.param(2, id="values", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fn", [softcap, causal], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_expanded_operands(fn: Callable[..., Tensor], place: int) -> None:
    torch.manual_seed(0)

    def expanded(*operands: Tensor) -> Tensor:
        return fn(*(x.expand(SHAPE) for x in operands))

    for dtype, kept in [(torch.float32, kept) for kept in KEPT] + [(torch.bfloat16, kept) for kept in KEPT[:2]]:
        torch._dynamo.reset()
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        operands = [torch.randn(SHAPE, dtype=dtype) for _ in range(3)]
        operands[place] = torch.randn(_shape(kept), dtype=dtype)
        compiled = torch.compile(expanded, backend="mlc", dynamic=False, options={"strict": True})
        expected = expanded(*(x.double() for x in operands))
        torch.testing.assert_close(compiled(*operands).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_expanded_operands(place: int) -> None:
    torch.manual_seed(0)

    def expanded(*operands: Tensor) -> Tensor:
        return softcap(*(x.expand(SHAPE) for x in operands))

    for kept in KEPT[:3]:
        torch._dynamo.reset()
        shapes = [_shape(kept) if i == place else SHAPE for i in range(3)]
        exact = [torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes]
        given = [x.detach().float().requires_grad_() for x in exact]
        flow = torch.randn(SHAPE)
        compiled = torch.compile(expanded, backend="mlc", dynamic=False, options={"strict": True})
        found = torch.autograd.grad(compiled(*given), given, flow)
        expected = torch.autograd.grad(expanded(*exact), exact, flow.double())
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-3)
