"""One step of Llama-like generation: rotated keys and values of earlier tokens are kept, those of the new one written.

The caches have one size from the first token to the last, so that every step runs the same program; what is not yet
written is masked. Heads of queries share those of keys and values, which are kept once for each group.

Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 2; Touvron et al., "LLaMA" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .llama import Attention, Block, Llama, LlamaConfig, loss, rotate
from .spec import DynamicDim, Inputs, ModelSpec


def attend(
    a: Attention, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor
) -> Tensor:
    """Attention of the new token ``x`` ``[batch, 1, dim]``, whose key and value join those of the caches."""
    batch, _, dim = x.shape
    q = rotate(a.q(x).view(batch, 1, a.heads, a.head_dim).transpose(1, 2), cos, sin)
    k = rotate(a.k(x).view(batch, 1, a.kv_heads, a.head_dim).transpose(1, 2), cos, sin)
    v = a.v(x).view(batch, 1, a.kv_heads, a.head_dim).transpose(1, 2)
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return a.out(y.transpose(1, 2).reshape(batch, 1, dim))


def advance(
    b: Block, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor
) -> Tensor:
    x = x + attend(b.attention, b.norm1(x), cos, sin, keys, values, position, seen)
    y = b.norm2(x)
    return x + b.down(F.silu(b.gate(y)) * b.up(y))


class LlamaStep(Llama):
    """Token ids ``[batch, 1]`` and their position ``[1]`` (int64) to logits ``[batch, 1, vocab]``.

    ``caches``: keys and values of each layer in turn, ``[batch, kv_heads, length, dim / heads]``, written at the
    position.
    """

    def forward(self, ids: Tensor, position: Tensor, *caches: Tensor) -> Tensor:  # type: ignore[override]
        seen = (torch.arange(caches[0].shape[2], device=ids.device) <= position)[None]
        cos, sin = self.cos[position], self.sin[position]
        x = self.tokens(ids)
        for block, keys, values in zip(self.blocks, caches[::2], caches[1::2], strict=True):
            x = advance(block, x, cos, sin, keys, values, position, seen)
        return self.head(self.norm(x))


def batch(c: LlamaConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    """A step in the middle of the caches, which are full of earlier steps up to there."""
    shape = (dims["batch"], c.kv_heads, dims["length"], c.dim // c.heads)
    ids = torch.randint(c.vocab, (dims["batch"], 2), generator=generator)
    caches = [torch.randn(shape, generator=generator) for _ in range(2 * c.layers)]
    return Inputs((ids[:, :1].contiguous(), torch.tensor([dims["length"] // 2]), *caches), ids[:, 1:].contiguous())


TINY = LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, hidden=88, vocab=61, positions=32)
SPECS = (
    ModelSpec(
        name="llama_decode",
        module=LlamaStep,
        configs={
            "tiny": TINY,
            "small": LlamaConfig(layers=8, dim=256, heads=8, kv_heads=2, hidden=688, vocab=2048, positions=256),
            "full": LlamaConfig(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, vocab=32000, positions=2048),
        },
        dims={
            "tiny": {"batch": 2, "length": 16},
            "small": {"batch": 1, "length": 256},
            "full": {"batch": 1, "length": 2048},
        },
        batch=batch,
        loss_of=loss,
        # Of the caches, those of the first layers: every size has at least so many.
        dynamic=(
            DynamicDim("batch", 0, 0),
            *(DynamicDim(name, 2 + k, d) for k in range(2 * TINY.layers) for name, d in (("batch", 0), ("length", 2))),
        ),
        # None of them as many as there are heads or as a head has channels, which would be taken for the same size.
        variants=({"batch": 3, "length": 24}, {"batch": 5, "length": 9}, {"batch": 6, "length": 30}),
        trains=False,
    ),
)
