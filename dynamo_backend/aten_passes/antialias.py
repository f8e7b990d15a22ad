"""Anti-aliased resizing, forward and backward, as sums over the few elements that a result is made of.

torch has kernels for it and no decomposition. The filter is as wide as the step from one result to the next where an
image becomes smaller. A dimension is resized by itself, by a table of places and one of weights, which fusion writes
into the kernel that sums. Rows are few when their elements are resized, which lie side by side: lanes gather there, and
read whole rows where columns are resized. Source: Pillow's ``ImagingResample``, after which torch's own
kernels are made (``aten/src/ATen/native/UpSample.h``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def _linear(x: torch.Tensor) -> torch.Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """Keys' kernel with a = -1/2."""
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


@dataclass(frozen=True, slots=True)
class _Resize:
    """Of one dimension: extents of input and output, elements of the input from one result to the next, and a filter
    that is zero from ``reach`` on."""

    extent: int
    out: int
    scale: float
    reach: int
    filter: Callable[[torch.Tensor], torch.Tensor]

    @property
    def shrinks(self) -> bool:
        return self.out <= self.extent

    @property
    def support(self) -> float:
        return self.reach * max(self.scale, 1.0)

    def windows(self, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Centres of results in the input, and the first place of their windows and the one behind the last."""
        center = (of + 0.5) * self.scale
        first = (center - self.support + 0.5).to(torch.int64).clamp_min(0)
        end = (center + self.support + 0.5).to(torch.int64).clamp_max(self.extent)
        return center, first, end

    def weights(self, of: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The weight of places in results, before weights of a result are made to sum to one."""
        center, first, end = self.windows(of)
        distance = (places - center + 0.5) / max(self.scale, 1.0)
        return torch.where((places >= first) & (places < end), self.filter(distance), 0.0)

    def table(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each result, a column of both tables, places of the input and their weights, and the sum of those."""
        of = torch.arange(self.out, device=like.device, dtype=like.dtype)
        most = 2 * math.ceil(self.support) + 1
        _, first, _ = self.windows(of)
        places = first + torch.arange(most, device=like.device).unsqueeze(1)
        weights = self.weights(of, places)
        return places.clamp_max(self.extent - 1), weights, weights.sum(0)

    def back(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each place of the input, a column of both tables, results that it may be part of, and its weights in
        them, which sum to one in a result."""
        total = self.table(like)[2]
        place = torch.arange(self.extent, device=like.device, dtype=like.dtype)
        most = math.ceil(2 * self.support / self.scale) + 2
        first = ((place + 0.5 - self.support) / self.scale - 0.5).floor().to(torch.int64)
        results = first + torch.arange(most, device=like.device).unsqueeze(1)
        inside = (results >= 0) & (results < self.out)
        results = results.clamp(0, self.out - 1)
        weights = self.weights(results.to(like.dtype), place) / aten._unsafe_index.Tensor(total, [results])
        return results, torch.where(inside, weights, 0.0)


def summed(x: torch.Tensor, dim: int, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Along ``dim``, for each column of the tables the weighted sum of the elements at its places."""
    rows = aten._unsafe_index.Tensor(x, [*[None] * dim, places])
    return (rows * weights.reshape(*weights.shape, *[1] * (x.dim() - dim - 1))).sum(dim)


def _dimensions(
    sizes: Sequence[Any], outs: Sequence[Any], align_corners: bool, scales: Sequence[float | None], cubic: bool
) -> list[_Resize] | None:
    """None where a size is a symbol, or nothing: a window is as long as sizes say."""
    found: list[_Resize] = []
    for extent, out, scale in zip(sizes, outs, scales, strict=True):
        if not (isinstance(extent, int) and isinstance(out, int) and extent and out):
            return None
        if align_corners:
            step = (extent - 1) / (out - 1) if out > 1 else 0.0
        else:
            step = 1 / scale if scale is not None and scale > 0 else extent / out
        if step <= 0:
            return None
        found.append(_Resize(extent, out, step, 2 if cubic else 1, _cubic if cubic else _linear))
    return found


def laid_out(made: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """An image in a layout."""
    # Images of one element are contiguous in either layout, and their strides are not those of either.
    return made.contiguous() if layout is torch.contiguous_format else made.clone(memory_format=layout)


def _forward(cubic: bool) -> Callable[..., Any]:
    def resized(
        x: torch.Tensor, size: Sequence[Any], align_corners: bool, high: float | None = None, wide: float | None = None
    ) -> Any:
        ways = _dimensions(x.shape[2:], size, align_corners, (high, wide), cubic)
        if ways is None or x.dtype not in (torch.float32, torch.float64):
            return NotImplemented
        made = x
        for dim in (2, 3) if ways[0].shrinks else (3, 2):
            places, weights, total = ways[dim - 2].table(x)
            made = summed(made, dim, places, weights / total)
        return laid_out(made, suggest_memory_format(x))

    return resized


def _backward(cubic: bool) -> Callable[..., Any]:
    def gradient(
        grad: torch.Tensor, size: Sequence[Any], shape: Sequence[Any], align_corners: bool,
        high: float | None = None, wide: float | None = None,
    ) -> Any:  # fmt: skip
        ways = _dimensions(shape[2:], size, align_corners, (high, wide), cubic)
        if ways is None or grad.dtype not in (torch.float32, torch.float64):
            return NotImplemented
        made = grad
        for dim in (3, 2) if ways[0].shrinks else (2, 3):
            made = summed(made, dim, *ways[dim - 2].back(grad))
        # As eager's kernels have it.
        return laid_out(made, torch.contiguous_format if cubic else suggest_memory_format(grad))

    return gradient


RESIZES: dict[OpOverload, Callable[..., Any]] = {
    aten._upsample_bilinear2d_aa.default: _forward(cubic=False),
    aten._upsample_bicubic2d_aa.default: _forward(cubic=True),
    aten._upsample_bilinear2d_aa_backward.default: _backward(cubic=False),
    aten._upsample_bicubic2d_aa_backward.default: _backward(cubic=True),
}
"""Decompositions, for AOTAutograd's table."""
