"""Kernels of layers that read more and more channels: how many are compiled, and that they are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Layer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 1, bias=False)

    def forward(self, *parts: Tensor) -> Tensor:
        made: Tensor = self.conv(F.relu(self.norm(torch.cat(parts, 1))))
        return made


class Dense(nn.Module):
    """A block of a DenseNet: each layer reads what all before it made."""

    def __init__(self, layers: int, first: int = 32, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first + k * growth, growth) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(*parts))
        return torch.cat(parts, 1).mean((2, 3))


def settled(model: nn.Module) -> nn.Module:
    """With running statistics that are no longer what they began as."""
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                assert m.running_mean is not None and m.running_var is not None
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("shape", [(2, 32, 5, 7), (3, 32, 2, 1)])
@pytest.mark.parametrize("training", [False, True])
def test_values_and_how_many_kernels_are_compiled(shape: tuple[int, ...], training: bool) -> None:
    torch.manual_seed(0)
    model, x = settled(Dense(8)).train(training), torch.randn(shape)
    expected = Dense(8).double()
    expected.load_state_dict(model.state_dict())
    expected.train(training)
    before = counters.snapshot().get("kernels_generated", 0)
    with torch.set_grad_enabled(training):
        found, wanted = torch.compile(model, backend="mlc", fullgraph=True)(x), expected(x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    if training:
        found.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-3)
    else:
        assert counters.snapshot()["kernels_generated"] - before <= 4
