"""Linear layers with packed weights, as decoding runs them: bound by reading the weight, which ought to happen once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Maker, Shape

# Columns and terms; columns, groups and terms of a group.
CHANNELS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 4096), "odd": (4095, 4093)},
    "cuda": {"aligned": (14336, 4096), "odd": (14335, 4093)},
}
GROUPS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 32, 128), "odd": (4095, 31, 126)},
    "cuda": {"aligned": (14336, 32, 128), "odd": (14335, 31, 126)},
}


def int8_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A scale for each output channel."""
    return F.silu(F.linear(x, w.to(x.dtype) * scale, bias))


def int4_linear(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Two elements a byte, low one first; a scale and a zero point for each group."""
    n, k = w.shape[0], w.shape[1] * 2
    q = torch.stack((w & 0xF, w >> 4), dim=-1).reshape(n, scale.shape[1], -1)
    return F.linear(x, ((q.to(x.dtype) - zero[:, :, None]) * scale[:, :, None]).view(n, k))


def _int8(rows: int) -> Maker:
    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
        n, k = shape
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        x, bias = (torch.randn(s, generator=generator) for s in ((rows, k), (n,)))
        return x, w, torch.rand((n, 1), generator=generator) / 128, bias

    return make


def _int4(rows: int) -> Maker:
    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
        n, groups, size = shape
        w = torch.randint(0, 256, (n, groups * size // 2), dtype=torch.uint8, generator=generator)
        x = torch.randn((rows, groups * size), generator=generator)
        scale, zero = (torch.rand((n, groups), generator=generator) * by for by in (0.1, 15.0))
        return x, w, scale, zero

    return make


def _cases(
    function: Callable[..., Tensor], make: Callable[[int], Maker], shapes: Mapping[str, Mapping[str, Shape]]
) -> tuple[KernelCase, ...]:
    return tuple(KernelCase(f"{function.__name__}_m{rows}", function, make(rows), shapes) for rows in (1, 16))


CASES = (*_cases(int8_linear, _int8, CHANNELS), *_cases(int4_linear, _int4, GROUPS))
