"""Layers that read what all layers before them made, as those of a DenseNet do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
