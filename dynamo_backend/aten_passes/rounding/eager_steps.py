"""Ops that eager's kernels for CPUs compute in several steps of a half type, each rounded.

Ours, and torch's decompositions of them, compute in float32 and round once. Where eager's rounding is asked for, these
functions take their place: ops of the half type, of which each rounds as any other one does then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import traceback

from ....ir.expr.dtypes import DType
from ....scheduler.numerics import EAGER, ROUNDING, NumericsByPlace
from .numerics import place_of

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


def with_eager_steps(table: dict[OpOverload, Callable[..., Any]], numerics: object) -> dict[OpOverload, Any]:
    """A table of decompositions that rounds where eager does, if ``numerics`` ask for it."""
    if numerics != EAGER and not isinstance(numerics, NumericsByPlace):
        return table
    return table | {op: _in_steps(op, steps, table.get(op), numerics) for op, steps in _STEPS.items()}


def _in_steps(
    op: OpOverload, steps: Callable[..., Any], otherwise: Callable[..., Any] | None, numerics: object
) -> Callable[..., Any]:
    @wraps(otherwise or steps)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if _is_half_on_cpu(*args) and _is_kept(op, numerics):
            return steps(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return decomposed


def _is_half_on_cpu(*operands: Any) -> bool:
    """Whether eager computes these in a half type: all operands of dimensions are of one, and so is the result."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    kinds = {x.dtype for x in tensors if x.dim()} or {x.dtype for x in tensors}
    return len(kinds) == 1 and kinds <= set(_HALVES) and all(x.device.type == "cpu" for x in tensors)


def _is_kept(op: OpOverload, numerics: object) -> bool:
    if not isinstance(numerics, NumericsByPlace):
        return True
    meta = traceback.get_current_meta()
    return str(meta.get("original_aten", op)) == str(op) and ROUNDING in numerics.kept(place_of(op, meta))


def _entr(x: Tensor) -> Tensor:
    inside = torch.where(x > 0, -x * x.log(), torch.where(x == 0, 0.0, -torch.inf).to(x.dtype))
    return torch.where(x.isnan(), x, inside)


def _x_log(log: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """``x * log(y)``: NaN where ``y`` is, and elsewhere zero where ``x`` is."""

    def x_log(x: Any, y: Any) -> Tensor:
        dtype = next(v.dtype for v in (x, y) if isinstance(v, Tensor) and (v.dim() or not isinstance(x, Tensor)))
        x, y = (v.to(dtype) if isinstance(v, Tensor) else torch.full((), v, dtype=dtype) for v in (x, y))
        return torch.where(y.isnan(), y, torch.where(x == 0, 0.0, x * log(y)).to(dtype))

    return x_log


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    if eps is not None:
        half = DType.from_torch(x.dtype)
        least = half.rounded(eps)
        x = x.clamp(least, half.rounded(1 - least))
    return (x / (1 - x)).log()


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    """One rounding, but the factor comes first."""
    wide = x.float() + (a.float() if value == 1 else value * a.float()) / b.float()
    return wide.to(x.dtype)


_STEPS: dict[OpOverload, Callable[..., Any]] = {
    aten.special_entr.default: _entr,
    aten.xlogy.Tensor: _x_log(torch.log),
    aten.xlogy.Scalar_Self: _x_log(torch.log),
    aten.xlogy.Scalar_Other: _x_log(torch.log),
    aten.special_xlog1py.default: _x_log(torch.log1p),
    aten.special_xlog1py.self_scalar: _x_log(torch.log1p),
    aten.special_xlog1py.other_scalar: _x_log(torch.log1p),
    aten.logit.default: _logit,
    aten.addcdiv.default: _addcdiv,
}
