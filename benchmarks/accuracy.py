"""Errors against a float64 run, and when a peer's error is worse than eager's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# A peer may be this many times worse than eager in the same dtype: reduction order alone makes such a difference.
WORSE = 2.0

# Eager's error can be zero by luck (a copy, one correctly rounded operation), and twice zero forbids what any other
# correct rounding gives. Four ulp of the largest value is what a chain of correctly rounded operations may differ by;
# a wrong formula is off by many orders more.
FLOOR_ULPS = 4.0

# A tensor's scale is never taken below this fraction of the largest scale in its group: a gradient this small relative
# to the others moves nothing, and is mostly what rounding left of larger terms.
GROUP_SCALE = 1e-4

# A gradient that is zero in exact arithmetic (the key bias under softmax, a bias before batch norm) holds nothing but
# rounding noise, also in float64, where it is below this fraction of the largest. Such noise is measured by the largest
# scale: by any smaller one it would be the worst error of the model and hide the errors of all other tensors.
ZERO = 1e-11


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest normalised error, the tensor that has it, eager's own, and the limit that follows from that."""

    error: float
    worst: str
    eager_error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


def normalised_errors(values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """``max|value - reference| / scale`` of each tensor, ``scale`` its largest reference magnitude.

    The exceptions for tensors much smaller than the others are those of GROUP_SCALE and ZERO.

    Integer and bool tensors must be equal: error 0, or infinity. A NaN or infinity where the reference has the same
    counts as equal. Different names, shapes or a missing tensor are an infinite error.
    """
    if values.keys() != reference.keys():
        return {name: float("inf") for name in values.keys() ^ reference.keys()}
    scales = {name: _scale(t) for name, t in reference.items() if t.is_floating_point()}
    largest = max(scales.values(), default=0.0)
    scales = {n: largest if s < ZERO * largest else max(s, GROUP_SCALE * largest) for n, s in scales.items()}
    errors = {}
    for name, expected in reference.items():
        value = values[name]
        if value.shape != expected.shape:
            errors[name] = float("inf")
        elif not expected.is_floating_point():
            errors[name] = 0.0 if torch.equal(value, expected) else float("inf")
        else:
            errors[name] = _error(value.double(), expected.double(), scales[name])
    return errors


def _scale(reference: Tensor) -> float:
    finite = reference[torch.isfinite(reference)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(value: Tensor, expected: Tensor, scale: float) -> float:
    same = (value == expected) | (value.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, value - expected).abs()
    largest = float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0
    return largest if largest == 0.0 else largest / scale if scale > 0 else float("inf")


def judge(
    values: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Accuracy:
    """Compare a peer's tensors with a float64 run, allowing ``WORSE`` times eager's error in ``dtype`` and a floor."""
    errors = normalised_errors(values, reference)
    eager_error = max(normalised_errors(eager, reference).values(), default=0.0)
    worst = max(errors, key=lambda name: errors[name], default="")
    limit = WORSE * eager_error + FLOOR_ULPS * torch.finfo(dtype).eps
    return Accuracy(errors.get(worst, 0.0), worst, eager_error, limit)
