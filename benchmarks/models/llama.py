"""Llama-like decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Source: Touvron et al., "LLaMA" (arXiv 2302.13971); GQA: Ainslie et al. (arXiv 2305.13245).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class LlamaConfig(NamedTuple):
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    positions: int


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32 at least."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [batch, heads, seq, d]`` by ``cos, sin [seq, d/2]``, halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.dim // c.heads
        self.q = nn.Linear(c.dim, c.heads * self.head_dim, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q = rotate(self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(c.dim)
        self.attention = Attention(c)
        self.norm2 = RMSNorm(c.dim)
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Token ids ``[batch, seq]`` (int64) to logits ``[batch, seq, vocab]``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        head_dim = c.dim // c.heads
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(c.positions), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        seq = ids.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def batch(c: LlamaConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    ids = torch.randint(c.vocab, (dims["batch"], dims["seq"] + 1), generator=generator)
    return Inputs((ids[:, :-1].contiguous(),), ids[:, 1:].contiguous())


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.targets.flatten())


SPECS = (
    ModelSpec(
        name="llama",
        module=Llama,
        configs={
            "tiny": LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, hidden=88, vocab=61, positions=32),
            "small": LlamaConfig(layers=8, dim=256, heads=8, kv_heads=2, hidden=688, vocab=2048, positions=256),
            "full": LlamaConfig(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, vocab=32000, positions=2048),
        },
        dims={"tiny": {"batch": 2, "seq": 16}, "small": {"batch": 2, "seq": 64}, "full": {"batch": 4, "seq": 1024}},
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0), DynamicDim("seq", 0, 1)),
        variants=({"batch": 2, "seq": 16}, {"batch": 3, "seq": 24}, {"batch": 5, "seq": 9}),
    ),
)
