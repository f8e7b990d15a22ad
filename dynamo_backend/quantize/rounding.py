"""Numbers of few bits for weights and for activations, and the scales that they have."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import QuantizeError

# The greatest code of eight bits; four bits use all of -8 to 7.
MOST = 127
# What one code of four bits more than the others has: -8.
LEAST4 = -8


def quantize_weight(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales of a weight ``[outputs, inputs]``, rounded to nearest, a scale for each ``group`` inputs.

    ``group`` divides the inputs. Scales are float16 ``[outputs, inputs / group]``, or float32 where one would be no
    normal number of float16. Eight bits: the number of largest magnitude is 127 or -127. Four bits: it is -8, so a
    scale may be negative (as GGUF's Q4_0 has it). A group of zeros has the scale 0.
    Raises: QuantizeError for NaN and infinities.
    """
    groups = weight.detach().to(torch.float32).unflatten(1, (-1, group))
    if not bool(torch.isfinite(groups).all()):
        raise QuantizeError("a weight has NaN or infinite elements; find the module with torch.isfinite, or filter it")
    if bits == 8:
        scales = groups.abs().amax(-1) / MOST
    else:
        largest = groups.abs().argmax(-1, keepdim=True)
        scales = groups.gather(-1, largest).squeeze(-1) / LEAST4
    scales = narrowed(scales)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float()).unsqueeze(-1)
    least, most = (-MOST, MOST) if bits == 8 else (LEAST4, -LEAST4 - 1)
    return torch.round(groups * inverse).clamp(least, most).to(torch.int8).flatten(1), scales


def narrowed(scales: Tensor) -> Tensor:
    """Scales as float16 where all of them are zero or normal numbers of it, else as float32."""
    known = torch.finfo(torch.float16)
    size = scales.abs()
    fits = ((size == 0) | ((size >= known.tiny) & (size <= known.max))).all()
    return scales.to(torch.float16) if bool(fits) else scales.to(torch.float32)


def quantize_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[rows, groups, group]`` and scales float32 ``[rows, groups, 1]`` of activations ``[rows, inputs]``.

    The number of largest magnitude of a group is 127 or -127. A group with NaN or an infinity has the scale NaN and
    codes of zero, so what is made of its row is NaN. A group of zeros has the scale 0.
    """
    groups = rows.to(torch.float32).unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    finite = largest < torch.inf
    inverse = torch.where(finite & (largest > 0), MOST / largest, 0.0)
    codes = torch.round(torch.where(finite, groups, 0.0) * inverse).clamp(-MOST, MOST).to(torch.int8)
    return codes, torch.where(finite, largest / MOST, torch.nan)
