"""Errors against a float64 run, and when a peer's error is worse than eager's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class ProductsByOnednn(TorchDispatchMode):
    """Eager whose products of float32 matrices on a CPU are oneDNN's, which is torch's too, and not BLAS's.

    A library sums the terms of a product in an order of its own. One that sums 2,051 of them in a run errs three times
    as much as one that sums them in pieces: neither is wrong, and a peer may call either.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *bias, x, weight = args
            plain = x.dtype is torch.float32 and x.device.type == "cpu" and x.numel() and weight.numel()
            if plain and all(b.dim() == 1 for b in bias):
                return torch.ops.mkldnn._linear_pointwise.default(x, weight.t(), *(bias or [None]), "none", [], "")
        return func(*args, **(kwargs or {}))


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
    others: Sequence[Mapping[str, Tensor]] = (),
) -> Accuracy:
    """Compare a peer's tensors with a float64 run, allowing ``WORSE`` times eager's error in ``dtype`` and a floor.
    ``others``: what eager gives by other libraries; its error is the largest of all."""
    errors = normalised_errors(values, reference)
    eager_error = max((e for run in (eager, *others) for e in normalised_errors(run, reference).values()), default=0.0)
    worst = max(errors, key=lambda name: errors[name], default="")
    limit = WORSE * eager_error + FLOOR_ULPS * torch.finfo(dtype).eps
    return Accuracy(errors.get(worst, 0.0), worst, eager_error, limit)
