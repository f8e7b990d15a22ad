"""Batch norm in training: running statistics are written where they are, by the kernel that computes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.runtime.counters import counters


def test_running_statistics_are_written_in_place() -> None:
    torch.manual_seed(0)
    model, again = (torch.nn.Sequential(torch.nn.BatchNorm2d(6), torch.nn.ReLU()) for _ in range(2))
    torch._dynamo.reset()
    compiled, before = torch.compile(model, backend="mlc", options={"cache": False}), counters.snapshot()
    for k in range(3):
        x = torch.randn(5, 6, 7, 3) + k
        given = [x.clone().requires_grad_() for _ in range(2)]
        for f, t in zip((compiled, again), given, strict=True):
            (f(t) * t).sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
    for found, wanted in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    made = counters.since(before)
    assert made["graphs_compiled"] == 2 and "library_calls" not in made


@pytest.mark.parametrize("activation", [F.relu, F.silu, F.hardswish])
@pytest.mark.parametrize("affine", [True, False])
def test_activations_are_differentiated_from_what_the_norm_was_given(
    activation: Callable[[Tensor], Tensor], affine: bool
) -> None:
    torch.manual_seed(0)
    x, mean, var = torch.randn(8, 6, 5, 7), torch.zeros(6), torch.ones(6)
    scale = [torch.randn(6) for _ in range(2)] if affine else [None, None]

    def step(x: Tensor, mean: Tensor, var: Tensor, *scale: Tensor) -> Tensor:
        return activation(F.batch_norm(x, mean, var, *(scale or (None, None)), training=True))

    results = []
    for dtype in (torch.float32, torch.float64):
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, *scale) if t is not None]
        kept = [mean.to(dtype, copy=True), var.to(dtype, copy=True)]
        torch._dynamo.reset()
        f = torch.compile(step, backend="mlc") if dtype is torch.float32 else step
        y = f(given[0], *kept, *given[1:])
        (y * torch.linspace(-1, 1, 7, dtype=dtype)).sum().backward()
        results.append([y, *(t.grad for t in given)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_backward_reads_operand_and_gradient_alone() -> None:
    def step(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, var, weight, bias, training=True))

    x, rest = torch.randn(16, 8, 32, 32, requires_grad=True), [torch.ones(8) for _ in range(4)]
    for t in rest[2:]:
        t.requires_grad_()
    _, backward = torch_mlc.explain(step, x, *rest, training=True).graphs
    assert backward.traffic is not None and backward.traffic.moved < 5.01 * x.numel() * 4


def test_operands_of_other_strides() -> None:
    """Eager's results are contiguous, or have their channels together, where torch's fake tensors keep the strides."""

    def norm(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        return [F.batch_norm(x, mean, var, training=t) for t in (True, False)] + [F.instance_norm(x)]

    rows, images = torch.randn(5, 4, 3).permute(2, 1, 0), torch.randn(2, 4, 3, 5)
    for x in (rows, images.transpose(2, 3), images.to(memory_format=torch.channels_last)):
        given = [(x, torch.zeros(4), torch.ones(4)) for _ in range(2)]
        with torch.no_grad():
            mine, theirs = torch.compile(norm, backend="mlc")(*given[0]), norm(*given[1])
        for ours, wanted in zip(mine, theirs, strict=True):
            assert ours.stride() == wanted.stride()
            torch.testing.assert_close(ours, wanted)


def test_operands_with_dimensions_of_one() -> None:
    """Their strides may be anything, and eager takes channels that lie together for that all the same."""

    def norms(given: list[Tensor], mean: Tensor, var: Tensor) -> list[Tensor]:
        return [F.batch_norm(x, mean, var) for x in given]

    shapes = [(1, 3, 4, 1), (2, 3, 1, 1), (1, 3, 1, 5), (1, 3, 2, 2), (2, 3, 2, 1, 2)]
    given = [
        torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        for shape in shapes
        for order in list(permutations(range(len(shape))))[::3]
    ]
    mine, theirs = (fn(given, torch.zeros(3), torch.ones(3)) for fn in (torch.compile(norms, backend="mlc"), norms))
    for x, ours, wanted in zip(given, mine, theirs, strict=True):
        strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (ours, wanted)]
        assert strides[0] == strides[1], (x.shape, x.stride())
        torch.testing.assert_close(ours, wanted)
