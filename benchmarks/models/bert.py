"""BERT-like encoder: post-norm blocks, padding mask, three embeddings, masked-language-model head.

Source: Devlin et al. (arXiv 1810.04805).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec

IGNORED = -100


class BertConfig(NamedTuple):
    layers: int
    dim: int
    heads: int
    vocab: int
    positions: int


class Block(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.q = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.dim)
        self.v = nn.Linear(c.dim, c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.norm1 = nn.LayerNorm(c.dim, eps=1e-12)
        self.up = nn.Linear(c.dim, 4 * c.dim)
        self.down = nn.Linear(4 * c.dim, c.dim)
        self.norm2 = nn.LayerNorm(c.dim, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (f(x).view(batch, seq, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(y.transpose(1, 2).reshape(batch, seq, dim)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Ids ``[batch, seq]`` (int64), segments (int64) and keep mask (bool) to logits ``[batch, seq, vocab]``."""

    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.dim)
        self.positions = nn.Embedding(c.positions, c.dim)
        self.segments = nn.Embedding(2, c.dim)
        self.norm = nn.LayerNorm(c.dim, eps=1e-12)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.transform = nn.Linear(c.dim, c.dim)
        self.transform_norm = nn.LayerNorm(c.dim, eps=1e-12)
        self.head = nn.Linear(c.dim, c.vocab)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor, segments: Tensor, keep: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.segments(segments) + self.positions(position))
        mask = keep[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


def batch(c: BertConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    shape = (dims["batch"], dims["seq"])
    ids = torch.randint(c.vocab, shape, generator=generator)
    column = torch.arange(shape[1])
    length = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
    keep = column < length
    segments = (column >= length // 2).long()
    # Column 0 is always a target, so that the mean of the loss is over at least one position.
    chosen = ((torch.rand(shape, generator=generator) < 0.15) | (column == 0)) & keep
    return Inputs((ids, segments, keep), torch.where(chosen, ids, IGNORED))


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.targets.flatten(), ignore_index=IGNORED)


SPECS = (
    ModelSpec(
        name="bert",
        module=Bert,
        configs={
            "tiny": BertConfig(layers=2, dim=32, heads=2, vocab=61, positions=32),
            "small": BertConfig(layers=6, dim=256, heads=4, vocab=2048, positions=256),
            "full": BertConfig(layers=12, dim=768, heads=12, vocab=30522, positions=512),
        },
        dims={"tiny": {"batch": 2, "seq": 16}, "small": {"batch": 4, "seq": 64}, "full": {"batch": 16, "seq": 512}},
        batch=batch,
        loss_of=loss,
        dynamic=tuple(DynamicDim(name, arg, dim) for arg in range(3) for dim, name in enumerate(("batch", "seq"))),
        variants=({"batch": 2, "seq": 16}, {"batch": 3, "seq": 24}, {"batch": 5, "seq": 9}),
    ),
)
