"""What only counts is made in forward and backward, and saved by neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def counted(table: Tensor, x: Tensor) -> Tensor:
    return F.embedding(torch.arange(x.shape[1]), table) * x


def with_a_batch(table: Tensor, x: Tensor) -> Tensor:
    return F.embedding(torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1), table) * x


def looked_up(table: Tensor, x: Tensor) -> Tensor:
    return table[torch.arange(x.shape[1]) + 1] * x


INPUTS = (torch.randn(12, 4), torch.randn(3, 7, 4))


def saved(function: Callable[..., Tensor]) -> list[Tensor]:
    """What the backward gets from the forward."""
    given = [t.clone().requires_grad_() for t in INPUTS]
    _, backward = capture(function, given, training=True)
    held = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
    return [t for t in held if isinstance(t, Tensor) and not t.is_floating_point()]


@pytest.mark.parametrize("function", [counted, with_a_batch])
def test_no_positions_are_saved(function: Callable[..., Tensor]) -> None:
    assert saved(function) == []


def test_what_data_decide_is_saved() -> None:
    assert len(saved(lambda table, x: F.embedding((x[0, :, 0] > 0).long(), table) * x)) == 1


@pytest.mark.parametrize("function", [counted, with_a_batch, looked_up])
def test_gradients(function: Callable[..., Tensor]) -> None:
    compiled = torch.compile(function, backend="mlc")
    results = []
    for f in (compiled, function):
        given = [t.clone().requires_grad_() for t in INPUTS]
        results.append(torch.autograd.grad(f(*given).square().sum(), given))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


def test_the_gradient_of_positions_is_one_kernel_on_a_gpu() -> None:
    """A sum over the batch and its place in the table; before, the sum, zeros, a scatter by atomic operations and a
    rounding were four kernels, and the indices a fifth of the forward."""
    given = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((128, 64), (8, 128, 64))]

    def added(table: Tensor, x: Tensor) -> Tensor:
        return F.embedding(torch.arange(x.shape[1]), table) + x

    report = torch_mlc.explain(added, *given, training=True, target="cuda:sm_90")
    forward, backward = report.graphs
    assert (forward.launches, backward.launches) == (1, 1)
    assert not forward.libraries and not backward.libraries
    assert backward.traffic.moved == backward.traffic.compulsory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_positions(dtype: torch.dtype, numerics: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    tokens, places = (torch.nn.Embedding(n, 6, dtype=dtype) for n in (11, 16))

    def embedded(ids: Tensor) -> Tensor:
        return tokens(ids) * places(torch.arange(ids.shape[1]))

    compiled = torch.compile(embedded, backend="mlc", dynamic=dynamic, options={"numerics": numerics})
    for length in (9, 16, 4) if dynamic else (9,):
        ids = torch.randint(11, (3, length))
        grads = []
        for f in (compiled, embedded):
            out = f(ids)
            grads.append(torch.autograd.grad(out.float().square().sum(), [tokens.weight, places.weight]))
        for ours, eager in zip(*grads, strict=True):
            torch.testing.assert_close(ours, eager, rtol=3e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)
