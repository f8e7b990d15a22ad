"""A Llama-like model that takes any number of tokens after those in its caches: prefill and decoding in one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.llama import Attention, Block, Llama, LlamaConfig, rotate


def attend(
    a: Attention, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor
) -> Tensor:
    """Attention of the tokens ``x`` ``[1, tokens, dim]``, whose keys and values join those of the caches."""
    batch, tokens, _ = x.shape
    q = rotate(a.q(x).view(batch, tokens, a.heads, a.head_dim).transpose(1, 2), cos, sin)
    k = rotate(a.k(x).view(batch, tokens, a.kv_heads, a.head_dim).transpose(1, 2), cos, sin)
    v = a.v(x).view(batch, tokens, a.kv_heads, a.head_dim).transpose(1, 2)
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    # A reshape would ask whether there is one token, and torch would make a graph of its own for that.
    return a.out(torch.cat(y.unbind(1), -1))


def advance(
    b: Block, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor
) -> Tensor:
    x = x + attend(b.attention, b.norm1(x), cos, sin, keys, values, position, seen)
    y = b.norm2(x)
    return x + b.down(F.silu(b.gate(y)) * b.up(y))


class LlamaTokens(Llama):
    """Token ids ``[1, tokens]`` and their positions ``[tokens]`` (int64) to the logits ``[1, 1, vocab]`` behind the
    last. ``caches``: keys and values of each layer in turn, ``[1, kv_heads, length, dim / heads]``, written at the
    positions."""

    def forward(self, ids: Tensor, position: Tensor, *caches: Tensor) -> Tensor:  # type: ignore[override]
        seen = torch.arange(caches[0].shape[2], device=ids.device)[None] <= position[:, None]
        cos, sin = self.cos[position], self.sin[position]
        x = self.tokens(ids)
        for block, keys, values in zip(self.blocks, caches[::2], caches[1::2], strict=True):
            x = advance(block, x, cos, sin, keys, values, position, seen)
        return self.head(self.norm(x[:, -1:]))


def inputs(c: LlamaConfig, tokens: int) -> tuple[Tensor, ...]:
    """So many tokens at the front of caches."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(c.vocab, (1, tokens), generator=generator)
    shape = (1, c.kv_heads, c.positions, c.dim // c.heads)
    caches = [torch.randn(shape, generator=generator) for _ in range(2 * c.layers)]
    return ids, torch.arange(tokens), *caches
