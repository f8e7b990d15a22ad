"""Gradients of smooth resizing as sums over the few results that an element of the image is part of.

Autograd of torch's decompositions scatters each result to the elements that it was made of. Which results an element is
part of is known by counting, and linear and cubic interpolation take each dimension by itself: a gradient gathers along
one dimension after the other, by a table of places and one of weights, as anti-aliased resizing does (``antialias``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .antialias import laid_out, summed

aten = torch.ops.aten

# Keys' parameter of cubic interpolation.
_CUBIC = -0.75


def _linear(t: torch.Tensor) -> list[torch.Tensor]:
    """Weights of the two elements around a place that is ``t`` beyond the first."""
    return [1 - t, t]


def _cubic(t: torch.Tensor) -> list[torch.Tensor]:
    """Weights of the four elements around a place that is ``t`` beyond the second."""

    def near(v: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC + 2) * v - (_CUBIC + 3)) * v * v + 1

    def far(v: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC * v - 5 * _CUBIC) * v + 8 * _CUBIC) * v - 4 * _CUBIC

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


@dataclass(frozen=True, slots=True)
class _Interpolation:
    """Of one dimension: extents of the image and of the result, elements of the image from one result to the next, as
    torch rounds them, and whether the first and the last element are results."""

    extent: Any
    out: Any
    step: float
    align_corners: bool
    cubic: bool

    @property
    def reach(self) -> int:
        """Elements on either side of a place that a result there is made of."""
        return 2 if self.cubic else 1

    @property
    def keeps(self) -> bool:
        """Whether each result is the element at its place."""
        return self.step == 1 and isinstance(self.extent, int) and isinstance(self.out, int) and self.out == self.extent

    @property
    def most(self) -> Any:
        """Results that an element is part of, at most: as many whole numbers lie inside an interval."""
        return max(math.ceil(2 * self.reach / self.step - 1e-9), 1) if self.step else self.out

    def first(self, place: torch.Tensor) -> torch.Tensor:
        """The first result that lies less than the reach before elements of the image, in whole numbers."""
        if not self.step:
            return place * 0
        step = Fraction(self.step).limit_denominator(1 << 20)
        up, down = step.denominator, step.numerator
        if self.align_corners:
            return torch.div((place - self.reach) * up, down, rounding_mode="floor") + 1
        return torch.div((2 * (place - self.reach) + 1) * up + down, 2 * down, rounding_mode="floor")

    def table(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each element of the image, a column of both tables, results that it may be part of, and its weights in
        them."""
        place = torch.arange(self.extent, device=device)
        results = self.first(place) + torch.arange(self.most, device=device).unsqueeze(1)
        inside = (results >= 0) & (results < self.out)
        # Rounded as the forward rounds it.
        at = results.to(dtype) * self.step if self.align_corners else (results.to(dtype) + 0.5) * self.step - 0.5
        at = at if self.cubic else at.clamp_min(0)
        low = at.floor()
        total: Any = 0
        for k, weight in enumerate(_cubic(at - low) if self.cubic else _linear(at - low)):
            element = (low.to(torch.int64) + (k + 1 - self.reach)).clamp(0, self.extent - 1)
            total = total + torch.where(inside & (element == place), weight, 0.0)
        return results.clamp(0, self.out - 1), total


def _dimensions(
    shape: Sequence[Any], size: Sequence[Any], align_corners: bool, scales: Sequence[float | None], cubic: bool
) -> list[_Interpolation] | None:
    """None where how far results lie apart is no number, or an extent is nothing, or results lie outside of it."""
    found: list[_Interpolation] = []
    for extent, out, scale in zip(shape, size, (*scales, *[None] * (len(shape) - len(scales))), strict=True):
        factor = scale if scale is not None and scale > 0 and not align_corners else None
        if isinstance(extent, int) and isinstance(out, int):
            if not (extent and out):
                return None
            step = (extent - 1) / (out - 1) if out > 1 else 0.0
            if not align_corners:
                step = 1 / factor if factor else extent / out
                if (out - 0.5) * step - 0.5 >= extent:
                    return None
        elif factor and factor == int(factor) and statically_known_true(out == extent * int(factor)):
            step = 1 / factor
        else:
            return None
        found.append(_Interpolation(extent, out, step, align_corners, cubic))
    return found


def is_gathered(x: torch.Tensor, size: Sequence[Any], align_corners: bool, *scales: float | None) -> bool:
    """Whether the gradient of a smooth resizing, given what the forward is given, has a form here."""
    return x.is_floating_point() and _dimensions(x.shape[2:], size, align_corners, scales, cubic=False) is not None


def _backward(cubic: bool = False) -> Callable[..., Any]:
    def gradient(
        grad: torch.Tensor, size: Sequence[Any], shape: Sequence[Any], align_corners: bool, *scales: float | None
    ) -> Any:
        ways = _dimensions(shape[2:], size, align_corners, scales, cubic)
        if ways is None or not grad.is_floating_point():
            return NotImplemented
        wide = torch.promote_types(grad.dtype, torch.float32)
        made = grad.to(wide)
        # Rows first, which lanes read as they lie: what is gathered is less then.
        for dim, way in enumerate(ways, 2):
            if not way.keeps:
                made = summed(made, dim, *way.table(wide, grad.device))
        # As eager's kernels have it.
        return laid_out(made.to(grad.dtype), torch.contiguous_format if cubic else suggest_memory_format(grad))

    return gradient


RESIZE_GRADIENTS: dict[OpOverload, Callable[..., Any]] = {
    aten.upsample_linear1d_backward.default: _backward(),
    aten.upsample_bilinear2d_backward.default: _backward(),
    aten.upsample_trilinear3d_backward.default: _backward(),
    aten.upsample_bicubic2d_backward.default: _backward(cubic=True),
}
"""Decompositions, for AOTAutograd's table."""
