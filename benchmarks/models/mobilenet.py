"""MobileNetV2: inverted residual blocks of convolutions by single elements around depthwise ones, with batch norm and
ReLU6. Source: Sandler et al. 2018 (arXiv 1801.04381)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class Stage(NamedTuple):
    """``blocks`` blocks that make ``channels`` of images, ``grow`` times as many inside, the first by ``stride``."""

    grow: int
    channels: int
    blocks: int
    stride: int


class MobileNetConfig(NamedTuple):
    stem: int
    stages: tuple[Stage, ...]
    head: int
    classes: int


class NormedConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, grow: int, stride: int) -> None:
        super().__init__()
        wide = grow * inputs
        self.expand: nn.Module = nn.Identity() if grow == 1 else nn.Sequential(NormedConv(inputs, wide), nn.ReLU6())
        self.depthwise = nn.Sequential(NormedConv(wide, wide, 3, stride, wide), nn.ReLU6())
        self.project = NormedConv(wide, outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.adds else y


class MobileNet(nn.Module):
    """Images ``[batch, 3, h, w]`` to logits ``[batch, classes]``."""

    def __init__(self, c: MobileNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(NormedConv(3, c.stem, 3, 2), nn.ReLU6())
        channels, blocks = c.stem, []
        for stage in c.stages:
            for k in range(stage.blocks):
                blocks.append(InvertedResidual(channels, stage.channels, stage.grow, stage.stride if k == 0 else 1))
                channels = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(NormedConv(channels, c.head), nn.ReLU6())
        self.head = nn.Linear(c.head, c.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))


def batch(c: MobileNetConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    image = torch.randn(dims["batch"], 3, dims["image"], dims["image"], generator=generator)
    return Inputs((image,), torch.randint(c.classes, (dims["batch"],), generator=generator))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits, inputs.targets)


_STAGES = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 32, 3, 2), Stage(6, 64, 4, 2), Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2), Stage(6, 320, 1, 1),
)  # fmt: skip
_WHOLE = MobileNetConfig(stem=32, stages=_STAGES, head=1280, classes=1000)

SPECS = (
    ModelSpec(
        name="mobilenet_v2",
        module=MobileNet,
        configs={
            "tiny": MobileNetConfig(4, (Stage(1, 4, 1, 1), Stage(3, 6, 2, 2)), 16, 10),
            "small": _WHOLE,
            "full": _WHOLE,
        },
        dims={
            "tiny": {"batch": 4, "image": 32},
            "small": {"batch": 8, "image": 96},
            "full": {"batch": 128, "image": 224},
        },
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0), DynamicDim("image", 0, 2), DynamicDim("image", 0, 3)),
        variants=({"batch": 4, "image": 32}, {"batch": 3, "image": 48}, {"batch": 6, "image": 40}),
        # One element on the other side of a kink of ReLU6 moves gradients of its last blocks by 7 %: eager does so from
        # inputs that differ in their last bit. Nothing can be said of a peer's gradients then.
        trains=False,
    ),
)
