"""A decoder of the Llama family in plain PyTorch: what a user of torch.compile would write.

Queries, keys and values are one product, and are turned together. How attention reads what came
before is given by the caller (``Attend``): from a cache, or from the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import DecoderConfig

# Of a layer's number and its queries [batch, heads, length, width], keys and values [batch, kv_heads, length, width]:
# the weighted values [batch, heads, length, width].
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GroupedAttention(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.kv_heads = number, config.heads, config.kv_heads
        self.head_width = config.head_width
        inside = (config.heads + 2 * config.kv_heads) * config.head_width
        self.qkv_proj = nn.Linear(config.width, inside, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_width, config.width, bias=False)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.head_norm:
            self.q_norm = RootMeanSquareNorm(config.head_width, config.norm_eps)
            self.k_norm = RootMeanSquareNorm(config.head_width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv_proj(x).view(batch, length, self.heads + 2 * self.kv_heads, self.head_width).transpose(1, 2)
        turned, v = parts.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turned.split((self.heads, self.kv_heads), dim=1)
            turned = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(turned, cos, sin).split((self.heads, self.kv_heads), dim=1)
        y = attend(self.number, q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.heads * self.head_width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of [batch, heads, length, width]; cos and sin are [batch, 1, length, width / 2] (Su et al.,
    RoFormer, 2021)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class GatedLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        self.self_attn = GroupedAttention(config, number)
        self.mlp = GatedLayer(config)
        self.input_layernorm = RootMeanSquareNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RootMeanSquareNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """``forward(tokens, positions, attend)``, both int64 [batch, length], gives states [batch, length, width];
    ``logits(states)`` float32 [..., vocabulary]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config, k) for k in range(config.layers))
        self.norm = RootMeanSquareNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.tensor(config.frequencies()), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        angles = positions[:, None, :, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states).float()


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the tokens themselves, as in training."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
