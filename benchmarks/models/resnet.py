"""ResNet-18 and -50 with batch norm. Source: He et al. (arXiv 1512.03385), stride in the 3x3 as torchvision has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class ResNetConfig(NamedTuple):
    depths: tuple[int, int, int, int]
    width: int
    bottleneck: bool
    classes: int


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Shortcut(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = convolution(inputs, outputs, 1, stride)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3)
        self.norm2 = nn.BatchNorm2d(width)
        same = stride == 1 and inputs == width
        self.shortcut: nn.Module = nn.Identity() if same else Shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, width, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, 4 * width, 1)
        self.norm3 = nn.BatchNorm2d(4 * width)
        same = stride == 1 and inputs == 4 * width
        self.shortcut: nn.Module = nn.Identity() if same else Shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images ``[batch, 3, h, w]`` to logits ``[batch, classes]``."""

    def __init__(self, c: ResNetConfig) -> None:
        super().__init__()
        block, expansion = (Bottleneck, 4) if c.bottleneck else (BasicBlock, 1)
        self.stem = nn.Conv2d(3, c.width, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(c.width)
        channels = c.width
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(c.depths):
            width = c.width << stage
            for index in range(depth):
                blocks.append(block(channels, width, 2 if stage > 0 and index == 0 else 1))
                channels = expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, c.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, stride=2, padding=1)
        return self.head(self.blocks(x).mean((2, 3)))


def batch(c: ResNetConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    image = torch.randn(dims["batch"], 3, dims["image"], dims["image"], generator=generator)
    return Inputs((image,), torch.randint(c.classes, (dims["batch"],), generator=generator))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits, inputs.targets)


DYNAMIC = (DynamicDim("batch", 0, 0), DynamicDim("image", 0, 2), DynamicDim("image", 0, 3))
VARIANTS = ({"batch": 4, "image": 64}, {"batch": 3, "image": 96}, {"batch": 6, "image": 72})

SPECS = (
    ModelSpec(
        name="resnet18",
        module=ResNet,
        configs={
            "tiny": ResNetConfig(depths=(1, 1, 1, 1), width=8, bottleneck=False, classes=10),
            "small": ResNetConfig(depths=(2, 2, 2, 2), width=64, bottleneck=False, classes=1000),
            "full": ResNetConfig(depths=(2, 2, 2, 2), width=64, bottleneck=False, classes=1000),
        },
        dims={
            "tiny": {"batch": 4, "image": 64},
            "small": {"batch": 4, "image": 96},
            "full": {"batch": 128, "image": 224},
        },
        batch=batch,
        loss_of=loss,
        dynamic=DYNAMIC,
        variants=VARIANTS,
    ),
    ModelSpec(
        name="resnet50",
        module=ResNet,
        configs={
            "tiny": ResNetConfig(depths=(1, 2, 1, 1), width=4, bottleneck=True, classes=10),
            "small": ResNetConfig(depths=(3, 4, 6, 3), width=64, bottleneck=True, classes=1000),
            "full": ResNetConfig(depths=(3, 4, 6, 3), width=64, bottleneck=True, classes=1000),
        },
        dims={
            "tiny": {"batch": 4, "image": 64},
            "small": {"batch": 4, "image": 64},
            "full": {"batch": 64, "image": 224},
        },
        batch=batch,
        loss_of=loss,
        dynamic=DYNAMIC,
        variants=VARIANTS,
    ),
)
