"""One step of GPT-2-like generation: the keys and values of earlier tokens are kept, those of the new one are written.

The caches have one size from the first token to the last, so that every step runs the same program, as is usual where a
model is compiled; what is not yet written is masked. Each layer has two, which the step writes in place.

Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpt import GPT, Attention, Block, GPTConfig, loss
from .spec import DynamicDim, Inputs, ModelSpec


def attend(a: Attention, x: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    """Attention of the new token ``x`` ``[batch, 1, dim]``, whose key and value join those of the caches."""
    batch, _, dim = x.shape
    q, k, v = (t.view(batch, 1, a.heads, -1).transpose(1, 2) for t in a.qkv(x).split(dim, dim=2))
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
    return a.out(y.transpose(1, 2).reshape(batch, 1, dim))


def advance(b: Block, x: Tensor, keys: Tensor, values: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    x = x + attend(b.attention, b.norm1(x), keys, values, position, seen)
    return x + b.down(F.gelu(b.up(b.norm2(x)), approximate="tanh"))


class GPTStep(GPT):
    """Token ids ``[batch, 1]`` and their position ``[1]`` (int64) to logits ``[batch, 1, vocab]``.

    ``caches``: keys and values of each layer in turn, ``[batch, heads, length, dim / heads]``, written at the position.
    """

    def forward(self, ids: Tensor, position: Tensor, *caches: Tensor) -> Tensor:  # type: ignore[override]
        seen = (torch.arange(caches[0].shape[2], device=ids.device) <= position)[None]
        x = self.tokens(ids) + self.positions(position)
        for block, keys, values in zip(self.blocks, caches[::2], caches[1::2], strict=True):
            x = advance(block, x, keys, values, position, seen)
        return self.head(self.norm(x))


def batch(c: GPTConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    """A step in the middle of the caches, which are full of earlier steps up to there."""
    shape = (dims["batch"], c.heads, dims["length"], c.dim // c.heads)
    ids = torch.randint(c.vocab, (dims["batch"], 2), generator=generator)
    caches = [torch.randn(shape, generator=generator) for _ in range(2 * c.layers)]
    return Inputs((ids[:, :1].contiguous(), torch.tensor([dims["length"] // 2]), *caches), ids[:, 1:].contiguous())


TINY = GPTConfig(layers=2, dim=32, heads=2, vocab=61, positions=32)
SPECS = (
    ModelSpec(
        name="gpt2_d128_decode",
        module=GPTStep,
        configs={
            "tiny": TINY,
            "small": GPTConfig(layers=12, dim=128, heads=4, vocab=1024, positions=256),
            "full": GPTConfig(layers=12, dim=128, heads=4, vocab=50257, positions=1024),
        },
        dims={
            "tiny": {"batch": 2, "length": 16},
            "small": {"batch": 1, "length": 256},
            "full": {"batch": 1, "length": 1024},
        },
        batch=batch,
        loss_of=loss,
        # Of the caches, those of the first layers: every size has at least so many.
        dynamic=(
            DynamicDim("batch", 0, 0),
            *(DynamicDim(name, 2 + k, d) for k in range(2 * TINY.layers) for name, d in (("batch", 0), ("length", 2))),
        ),
        # None of them as many as there are heads or as a head has channels, which would be taken for the same size.
        variants=({"batch": 3, "length": 24}, {"batch": 4, "length": 9}, {"batch": 5, "length": 30}),
        trains=False,
    ),
)
