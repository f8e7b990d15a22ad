"""Random numbers that a graph of ATen ops can make again: a seed that is drawn once, and numbers that follow from it.

What the forward draws, the backward draws again, and only the seed is kept. Both are ops in graphs alone: kernels
compute them (``converters/random/rand.py``), and what is here is their meaning for torch. Source: Salmon et al. 2011
(Philox).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.compile.fallback import random_words
from ...runtime.host.executable import draw_seeds

torch.library.define(
    "mlc::draw_seeds", "(int count, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
torch.library.define("mlc::uniform", "(Tensor seeds, int stream, SymInt[] size) -> Tensor")


@torch.library.impl("mlc::draw_seeds", "CompositeExplicitAutograd")
def _draw_seeds(count: int, device: torch.device) -> Tensor:
    return draw_seeds(count, device)


@torch.library.register_fake("mlc::draw_seeds")
def _fake_seeds(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


@torch.library.impl("mlc::uniform", "CompositeExplicitAutograd")
def _uniform(seeds: Tensor, stream: int, size: Sequence[int]) -> Tensor:
    """Float32 numbers in [0, 1): element k of row-major order is number k of ``seeds[stream]``."""
    count = torch.Size(size).numel()
    words = random_words(seeds[stream], torch.arange(count, device=seeds.device))
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(*size)


@torch.library.register_fake("mlc::uniform")
def _fake_uniform(seeds: Tensor, stream: int, size: Sequence[int]) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=seeds.device)


DRAW_SEEDS = torch.ops.mlc.draw_seeds.default
UNIFORM = torch.ops.mlc.uniform.default
