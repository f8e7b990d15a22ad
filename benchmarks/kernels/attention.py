"""Attention in plain operations, with the scores edited in ways that no library call knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .case import KernelCase, Shape, normal, same

WINDOW = 128
# batch, heads, sequence, width of a head
SEQUENCES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 512, 64), "odd": (7, 7, 509, 62)},
    "cuda": {"aligned": (8, 16, 2048, 64), "odd": (7, 15, 2045, 62)},
}


def attend(q: Tensor, k: Tensor, v: Tensor, edit: Callable[[Tensor], Tensor]) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(edit(scores), -1) @ v


def positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, lambda s: torch.tanh(s / 30.0) * 30.0)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    m, n = positions(q, k)
    return attend(q, k, v, lambda s: s + slopes.abs()[:, None, None] * (n - m) / 64)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return attend(q, k, v, lambda s: torch.where((n <= m) & (m - n < WINDOW), s, float("-inf")))


def causal_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = positions(q, k)
    return attend(q, k, v, lambda s: torch.where(n <= m, s, float("-inf")))


def docmask(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return attend(q, k, v, lambda s: torch.where(documents[:, None] == documents, s, float("-inf")))


def heads(shape: Shape) -> Shape:
    return shape[1:2]


def make_docmask(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v, torch.randint(0, 4, (shape[2],), generator=generator).sort().values


CASES = (
    KernelCase("attention_softcap", softcap, normal(same, same, same), SEQUENCES),
    KernelCase("attention_alibi", alibi, normal(same, same, same, heads), SEQUENCES),
    KernelCase("attention_window", window, normal(same, same, same), SEQUENCES),
    KernelCase("attention_causal_where", causal_where, normal(same, same, same), SEQUENCES),
    KernelCase("attention_docmask", docmask, make_docmask, SEQUENCES),
)
