"""What a line may be: how many elements it may have inside, how exact it is, whose memory it may write to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Lines that have a number for each pair of rows, and how many of them: they are run in double precision many times.
_PAIRS = re.compile(r"transpose\(-1, -2\)|\.mT|attention|cdist|pdist|outer")
SCORES = 5_000_000


def scores_fit(text: str, shapes: Iterable[Sequence[tuple[int, ...]]]) -> bool:
    """Whether a line has few enough pairs of rows; ``shapes`` are those of its operands, at all sizes of each."""
    if not _PAIRS.search(text):
        return True
    sizes = [s for of_one in shapes for s in of_one if len(s) >= 2]
    return max((math.prod(s[:-1]) * max(s[-2:]) for s in sizes), default=0) <= SCORES


def share_memory(t: Tensor) -> bool:
    offsets = torch.zeros((), dtype=torch.int64)
    for n, stride in zip(t.shape, t.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(n) * stride
    return offsets.unique().numel() < t.numel()


# What a line says of the types in which it computes on the way; ``drawn`` draws in single precision.
_ROUNDED = (("drawn(", torch.float32), (".float()", torch.float32), ("torch.float32", torch.float32),
            ("torch.float16", torch.float16), ("torch.bfloat16", torch.bfloat16))  # fmt: skip


def eps_of(text: str) -> float:
    """The relative rounding of the coarsest type that a line names."""
    return max((float(torch.finfo(kind).eps) for word, kind in _ROUNDED if word in text), default=0.0)
