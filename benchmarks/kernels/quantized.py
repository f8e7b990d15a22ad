"""Linear layers with packed weights, as decoding runs them: bound by reading the weight, which ought to happen once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Maker, Shape

# Columns and terms; columns, groups and terms of a group.
CHANNELS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 4096), "odd": (4095, 4093)},
    "cuda": {"aligned": (14336, 4096), "odd": (14335, 4093)},
}
# cuBLAS multiplies bytes whose rows are multiples of eight, 17 of them at least.
BYTES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (2048, 2048), "odd": (2047, 2045)},
    "cuda": {"aligned": (14336, 4096), "odd": (14328, 4088)},
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


def dynamic_int8_linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Rows made bytes by their largest element, multiplied as bytes; a scale for each row and each output channel."""
    wide = x.float()
    step = wide.abs().amax(-1, keepdim=True) / 127
    q = (wide / step).round().to(torch.int8)
    return (torch._int_mm(q, w.t()).float() * step * scale).to(x.dtype)


def _int8(rows: int) -> Maker:
    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
        n, k = shape
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        x, bias = (torch.randn(s, generator=generator) for s in ((rows, k), (n,)))
        return x, w, torch.rand((n, 1), generator=generator) / 128, bias

    return make


def _dynamic(rows: int) -> Maker:
    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
        n, k = shape
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
        return torch.randn((rows, k), generator=generator), w, torch.rand((n,), generator=generator) / 128

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
    function: Callable[..., Tensor],
    make: Callable[[int], Maker],
    shapes: Mapping[str, Mapping[str, Shape]],
    rows: Sequence[int] = (1, 16),
) -> tuple[KernelCase, ...]:
    return tuple(KernelCase(f"{function.__name__}_m{m}", function, make(m), shapes) for m in rows)


CASES = (
    *_cases(int8_linear, _int8, CHANNELS, (1, 4, 16)),
    *_cases(int4_linear, _int4, GROUPS),
    *_cases(dynamic_int8_linear, _dynamic, BYTES, (32, 512)),
)
