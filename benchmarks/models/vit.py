"""Vision Transformer with a class token. Source: Dosovitskiy et al. (arXiv 2010.11929)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class ViTConfig(NamedTuple):
    layers: int
    dim: int
    heads: int
    image: int
    patch: int
    classes: int


class Block(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1 = nn.LayerNorm(c.dim, eps=1e-6)
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.norm2 = nn.LayerNorm(c.dim, eps=1e-6)
        self.up = nn.Linear(c.dim, 4 * c.dim)
        self.down = nn.Linear(4 * c.dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, c.dim, c.patch, stride=c.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, c.dim))
        self.positions = nn.Parameter(torch.zeros(1, (c.image // c.patch) ** 2 + 1, c.dim))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim, eps=1e-6)
        self.head = nn.Linear(c.dim, c.classes)
        for p in (self.token, self.positions):
            nn.init.normal_(p, std=0.02)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def batch(c: ViTConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    image = torch.randn(dims["batch"], 3, c.image, c.image, generator=generator)
    return Inputs((image,), torch.randint(c.classes, (dims["batch"],), generator=generator))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits, inputs.targets)


SPECS = (
    ModelSpec(
        name="vit",
        module=ViT,
        configs={
            "tiny": ViTConfig(layers=2, dim=32, heads=2, image=32, patch=8, classes=10),
            "small": ViTConfig(layers=6, dim=192, heads=3, image=128, patch=16, classes=1000),
            "full": ViTConfig(layers=12, dim=768, heads=12, image=224, patch=16, classes=1000),
        },
        dims={"tiny": {"batch": 2}, "small": {"batch": 4}, "full": {"batch": 64}},
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0),),
        variants=({"batch": 2}, {"batch": 3}, {"batch": 7}),
    ),
)
