"""GPT-2-like decoder: pre-norm blocks, learned positions, tanh GELU, tied embedding and head.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class GPTConfig(NamedTuple):
    layers: int
    dim: int
    heads: int
    vocab: int
    positions: int


class Attention(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.out = nn.Linear(c.dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(dim, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.dim)
        self.attention = Attention(c)
        self.norm2 = nn.LayerNorm(c.dim)
        self.up = nn.Linear(c.dim, 4 * c.dim)
        self.down = nn.Linear(4 * c.dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids ``[batch, seq]`` (int64) to logits ``[batch, seq, vocab]``."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.dim)
        self.positions = nn.Embedding(c.positions, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # GPT-2 shrinks the residual projections so that the stream keeps its variance over depth.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * c.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(c: GPTConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    ids = torch.randint(c.vocab, (dims["batch"], dims["seq"] + 1), generator=generator)
    return Inputs((ids[:, :-1].contiguous(),), ids[:, 1:].contiguous())


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.targets.flatten())


DYNAMIC = (DynamicDim("batch", 0, 0), DynamicDim("seq", 0, 1))
VARIANTS = ({"batch": 2, "seq": 16}, {"batch": 3, "seq": 24}, {"batch": 5, "seq": 9})

SPECS = (
    ModelSpec(
        name="gpt2_d128",
        module=GPT,
        configs={
            "tiny": GPTConfig(layers=2, dim=32, heads=2, vocab=61, positions=32),
            "small": GPTConfig(layers=12, dim=128, heads=4, vocab=1024, positions=256),
            "full": GPTConfig(layers=12, dim=128, heads=4, vocab=50257, positions=1024),
        },
        dims={
            "tiny": {"batch": 2, "seq": 16},
            "small": {"batch": 4, "seq": 128},
            "full": {"batch": 16, "seq": 1024},
        },
        batch=batch,
        loss_of=loss,
        dynamic=DYNAMIC,
        variants=VARIANTS,
    ),
    ModelSpec(
        name="gpt2_d768",
        module=GPT,
        configs={
            "tiny": GPTConfig(layers=2, dim=48, heads=3, vocab=61, positions=32),
            "small": GPTConfig(layers=12, dim=768, heads=12, vocab=4096, positions=256),
            "full": GPTConfig(layers=12, dim=768, heads=12, vocab=50257, positions=1024),
        },
        dims={"tiny": {"batch": 2, "seq": 16}, "small": {"batch": 1, "seq": 32}, "full": {"batch": 8, "seq": 1024}},
        batch=batch,
        loss_of=loss,
        dynamic=DYNAMIC,
        variants=VARIANTS,
    ),
)
