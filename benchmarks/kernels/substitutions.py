"""Products that another order, or fewer rows, makes cheaper."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Shape

# Sequences, tokens of each, and the width of a token.
TOKENS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 128, 512), "odd": (7, 127, 509)},
    "cuda": {"aligned": (16, 1024, 4096), "odd": (15, 1021, 4091)},
}
# Sequences, heads, tokens and the width of a head.
HEADS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 256, 32), "odd": (7, 7, 255, 31)},
    "cuda": {"aligned": (8, 16, 4096, 64), "odd": (7, 15, 4093, 63)},
}
RANK, CLASSES = 8, 2000


def last_logits(h: Tensor, gain: Tensor, head: Tensor) -> Tensor:
    """What follows each sequence: the logits of its last token, of all of them."""
    return (F.rms_norm(h, gain.shape, gain) @ head.t())[:, -1].log_softmax(-1)


def low_rank_linear(h: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A weight with an update of low rank that is trained in its place (LoRA)."""
    return h[:, 0] @ (w + 0.5 * (a @ b))


def pooled_linear(h: Tensor, w: Tensor) -> Tensor:
    """The mean of projected tokens."""
    return (h @ w).mean(1)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with features in the place of a softmax, as one writes it."""
    return (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2) @ v


def compressed_keys(q: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """Scores of one query over keys that are kept in a shorter form (MLA)."""
    heads, _, width = q.shape
    keys = (c @ w).view(-1, heads, width).transpose(0, 1)
    return (q @ keys.transpose(-1, -2)).softmax(-1)


def _last(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    h, gain, head = (torch.randn(s, generator=generator) for s in (shape, shape[-1:], (CLASSES, shape[-1])))
    return h, gain, head / shape[-1] ** 0.5


def _low_rank(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    d = shape[-1]
    h, w, a, b = (torch.randn(s, generator=generator) for s in (shape, (d, d), (d, RANK), (RANK, d)))
    return h, w / d**0.5, a / d**0.5, b


def _pooled(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    d = shape[-1]
    return torch.randn(shape, generator=generator), torch.randn((d, d), generator=generator) / d**0.5


def _attention(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for _ in range(3))


def _compressed(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    _, heads, tokens, width = shape
    rank = 4 * width
    q, c, w = (torch.randn(s, generator=generator) for s in ((heads, 1, width), (tokens, rank), (rank, heads * width)))
    return q / width**0.5, c, w / rank**0.5


CASES = (
    KernelCase("last_logits", last_logits, _last, TOKENS),
    KernelCase("low_rank_linear", low_rank_linear, _low_rank, TOKENS),
    KernelCase("pooled_linear", pooled_linear, _pooled, TOKENS),
    KernelCase("linear_attention", linear_attention, _attention, HEADS),
    KernelCase("compressed_keys", compressed_keys, _compressed, HEADS),
)
