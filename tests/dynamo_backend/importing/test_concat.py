"""Concatenations of parts of one tensor: even steps are read by one index, all others piece by piece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_mlc

Call = Callable[[Tensor], Tensor]
EVEN: dict[str, Call] = {
    "of unbind": lambda x: torch.cat(x.unbind(1), -1) * 2,
    "of unbind along the first": lambda x: torch.cat(x.unbind(0), 1) * 2,
    "of chunks": lambda x: torch.cat(x.chunk(4, 2), 0) * 2,
    "of what is split": lambda x: torch.cat(x.split(2, 1), 3) * 2,
    "of what is split, back together": lambda x: torch.cat(x.split(2, 1), 1) * 2,
    "of every third": lambda x: torch.cat([x[:, k::3] for k in range(3)], 2) * 2,
    "of parts that overlap": lambda x: torch.cat([x[:, k : k + 3] for k in range(4)], 2) * 2,
    "of a transposed tensor": lambda x: torch.cat(x.transpose(1, 3).unbind(1), 2) * 2,
    "of windows": lambda x: torch.cat(x.unfold(1, 3, 1).unbind(1), -1) * 2,
}
UNEVEN: dict[str, Call] = {
    "of pieces of two sizes": lambda x: torch.cat(x.split(4, 1), 1) * 2,
    "in the opposite order": lambda x: torch.cat(x.unbind(1)[::-1], -1) * 2,
    "of one part again": lambda x: torch.cat([x[:, 1:3]] * 3, 2) * 2,
    "of steps that differ": lambda x: torch.cat([x[:, 0], x[:, 1], x[:, 3]], 2) * 2,
    "of two tensors": lambda x: torch.cat([x[:, 0], x[:, 1], (x * 3)[:, 2]], 2) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [*EVEN, *UNEVEN])
def test_values_strides_and_gradients(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    call = {**EVEN, **UNEVEN}[name]
    x = torch.randn(3, 6, 8, 5, requires_grad=True)
    compiled = torch.compile(call, backend="mlc", dynamic=dynamic)
    ours, wanted = compiled(x), call(x)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    assert ours.stride() == wanted.stride()
    weight = torch.randn(wanted.shape)
    for a, b in zip(torch.autograd.grad(ours, x, weight), torch.autograd.grad(wanted, x, weight), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", EVEN)
def test_even_steps_ask_no_element_which_piece_it_is_of(name: str) -> None:
    report = torch_mlc.explain(EVEN[name], torch.randn(3, 6, 8, 5))
    (kernel,) = report.kernels
    assert "select(" not in str(kernel.loops)
