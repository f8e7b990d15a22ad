"""Convolutions of tokens along time on CPUs: how they run, and values, layouts and gradients as eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc

CONVOLUTION = "aten::convolution.default"
LIFTED = "images of one row"
KINDS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 5, "groups": 4, "padding": 2, "bias": False},
    {"kernel_size": 4, "stride": 3}, {"kernel_size": 3, "dilation": 2, "padding": 1, "groups": 2},
    {"kernel_size": 1}, {"kernel_size": 4, "padding": 3, "groups": 24}, {"kernel_size": 7, "stride": 2, "groups": 24},
    {"kernel_size": 3, "groups": 24, "out": 48},
]  # fmt: skip


class Mixer(nn.Module):
    """Tokens mixed by a convolution along time; with ``cut`` only as many as there were are read."""

    def __init__(self, kernel_size: int, out: int = 24, cut: bool = False, **how: Any) -> None:
        super().__init__()
        self.layer, self.cut = nn.Conv1d(24, out, kernel_size, **how), cut

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(1, 2))
        return F.silu(y[..., : x.shape[1]] if self.cut else y).transpose(1, 2)


def told(model: Callable[..., Any], *inputs: Tensor) -> Any:
    (graph,) = torch_mlc.explain(model, *inputs).graphs
    torch._dynamo.reset()
    return graph


@pytest.mark.parametrize("how", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(2, 19, 24), (1, 33, 24), (3, 8, 24)], ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_values_layouts_and_gradients(how: dict[str, Any], shape: tuple[int, ...], cut: bool) -> None:
    torch.manual_seed(0)
    model, exact = Mixer(**how, cut=cut), Mixer(**how, cut=cut).double()
    exact.load_state_dict(model.state_dict())
    x = torch.randn(shape)
    compiled = torch.compile(model, backend="mlc")
    with torch.no_grad():
        have, plain, want = compiled(x), model(x), exact(x.double())
        assert (have.shape, have.stride()) == (plain.shape, plain.stride())
        assert (have.double() - want).abs().max() <= 4 * 120**0.5 * 2**-24 * want.abs().max()
    x.requires_grad_()
    seed = torch.randn(plain.shape)
    leaves = [x, *model.parameters()]
    for a, b in zip(torch.autograd.grad(compiled(x), leaves, seed), torch.autograd.grad(model(x), leaves, seed)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_tokens_are_read_as_they_lie() -> None:
    x = torch.randn(2, 64, 24)
    with torch.no_grad():
        graph = told(Mixer(5, groups=4, padding=2), x)
        assert [c.op for c in graph.libraries] == [CONVOLUTION] and LIFTED in graph.libraries[0].reason
        assert graph.launches == 1
        graph = told(Mixer(4, padding=3, groups=24, cut=True), x)
        assert not graph.libraries and graph.launches == 2
        (graph,) = torch_mlc.explain(nn.Conv1d(24, 24, 3), torch.randn(2, 24, 64)).graphs
        assert LIFTED not in graph.libraries[0].reason, "a sequence with time innermost"


@pytest.mark.parametrize("groups", [1, 4, 24])
def test_values_that_are_no_numbers(groups: int) -> None:
    model, x = Mixer(3, padding=1, groups=groups), torch.randn(2, 19, 24)
    x[0, 3, 5], x[1, 0, 7], x[1, 18, 23] = float("nan"), float("inf"), float("-inf")
    with torch.no_grad():
        have, want = torch.compile(model, backend="mlc")(x), model(x)
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(have), test(want))


def test_sizes_that_vary_and_sizes_of_none() -> None:
    model = Mixer(3, padding=1, groups=4)
    compiled = torch.compile(model, backend="mlc", dynamic=True)
    with torch.no_grad():
        for batch, time in ((2, 19), (3, 40), (2, 5)):
            x = torch.randn(batch, time, 24)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        x = torch.randn(0, 19, 24)
        assert torch.compile(model, backend="mlc")(x).shape == model(x).shape
