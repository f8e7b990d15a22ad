"""MLP-Mixer: MLPs over patches and over channels in turn. Source: Tolstikhin et al. (arXiv 2105.01601)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class MixerConfig(NamedTuple):
    layers: int
    dim: int
    token_hidden: int
    channel_hidden: int
    image: int
    patch: int
    classes: int


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c: MixerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.dim)
        self.tokens = MLP((c.image // c.patch) ** 2, c.token_hidden)
        self.norm2 = nn.LayerNorm(c.dim)
        self.channels = MLP(c.dim, c.channel_hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, c: MixerConfig) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, c.dim, c.patch, stride=c.patch)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def batch(c: MixerConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    image = torch.randn(dims["batch"], 3, c.image, c.image, generator=generator)
    return Inputs((image,), torch.randint(c.classes, (dims["batch"],), generator=generator))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits, inputs.targets)


SPECS = (
    ModelSpec(
        name="mixer",
        module=Mixer,
        configs={
            "tiny": MixerConfig(layers=2, dim=32, token_hidden=24, channel_hidden=64, image=32, patch=8, classes=10),
            "small": MixerConfig(
                layers=8, dim=256, token_hidden=128, channel_hidden=1024, image=128, patch=16, classes=1000
            ),
            "full": MixerConfig(
                layers=12, dim=768, token_hidden=384, channel_hidden=3072, image=224, patch=16, classes=1000
            ),
        },
        dims={"tiny": {"batch": 2}, "small": {"batch": 4}, "full": {"batch": 64}},
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0),),
        variants=({"batch": 2}, {"batch": 3}, {"batch": 7}),
    ),
)
