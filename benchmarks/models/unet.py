"""U-Net: group norm on the way down, batch norm on the way up, nearest up-sampling, skips by concatenation.

Source: Ronneberger et al. (arXiv 1505.04597), padded convolutions; both norms so that both are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class UNetConfig(NamedTuple):
    levels: int
    width: int
    groups: int
    classes: int


class Double(nn.Module):
    """Two 3x3 convolutions, each followed by a norm and SiLU."""

    def __init__(self, inputs: int, outputs: int, groups: int | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1: nn.Module = nn.BatchNorm2d(outputs) if groups is None else nn.GroupNorm(groups, outputs)
        self.norm2: nn.Module = nn.BatchNorm2d(outputs) if groups is None else nn.GroupNorm(groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Images ``[batch, 3, h, w]``, h and w multiples of ``2**levels``, to logits ``[batch, classes, h, w]``."""

    def __init__(self, c: UNetConfig) -> None:
        super().__init__()
        widths = [c.width << level for level in range(c.levels + 1)]
        self.stem = Double(3, widths[0], c.groups)
        self.down = nn.ModuleList(Double(widths[i], widths[i + 1], c.groups) for i in range(c.levels))
        self.up = nn.ModuleList(Double(widths[i + 1] + widths[i], widths[i], None) for i in reversed(range(c.levels)))
        self.head = nn.Conv2d(widths[0], c.classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up in self.up:
            x = up(torch.cat((skips.pop(), F.interpolate(x, scale_factor=2.0, mode="nearest")), dim=1))
        return self.head(x)


def batch(c: UNetConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    shape = (dims["batch"], dims["image"], dims["image"])
    image = torch.randn(shape[0], 3, *shape[1:], generator=generator)
    return Inputs((image,), torch.randint(c.classes, shape, generator=generator))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits, inputs.targets)


SPECS = (
    ModelSpec(
        name="unet",
        module=UNet,
        configs={
            "tiny": UNetConfig(levels=2, width=8, groups=4, classes=3),
            "small": UNetConfig(levels=3, width=16, groups=8, classes=4),
            "full": UNetConfig(levels=4, width=64, groups=32, classes=21),
        },
        dims={
            "tiny": {"batch": 2, "image": 16},
            "small": {"batch": 2, "image": 64},
            "full": {"batch": 8, "image": 256},
        },
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0), DynamicDim("image", 0, 2), DynamicDim("image", 0, 3)),
        variants=({"batch": 2, "image": 16}, {"batch": 3, "image": 24}, {"batch": 5, "image": 32}),
    ),
)
