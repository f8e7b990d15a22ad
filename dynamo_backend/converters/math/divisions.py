"""Divisions whose result is whole, and what they leave. Integers divided by zero are an error on CPUs, as in eager."""

from __future__ import annotations

from ....ir.expr.value import Const, Expr, IndexValue, call
from ....ir.target import raises_errors
from ..context import ImportContext, Scalar, Tensor
from ..registry import converter
from ..terms import rounded

Operand = Tensor | Scalar

_RESTS = ("remainder", "fmod")
_WAYS = {"floor": "floordiv", "trunc": "truncdiv"}


def _divided(ctx: ImportContext, fn: str, a: Operand, b: Operand) -> Tensor:
    """The current node's result: a function of the table of two operands, the second of which divides."""
    raises, kind = raises_errors(ctx.type().device), ctx.type().dtype
    # What a division leaves jumps, so that the last bits of the divisor decide. Eager has them in the half type, what
    # was of another type or a number included.
    made = [fn in _RESTS and kind.is_half and not (isinstance(v, Tensor) and v.dtype is kind) for v in (a, b)]

    def value(x: Expr, y: Expr) -> Expr:
        x, y = (rounded(v, kind) if m else v for v, m in zip((x, y), made, strict=True))
        if x.dtype.is_float:
            return call("trunc", call("div", x, y)) if fn == "truncdiv" else call(fn, x, y)
        return call(fn, x, call("check_divisor", y) if raises and _may_be_zero(ctx, y) else y)

    return ctx.pointwise(value, a, b)


def _may_be_zero(ctx: ImportContext, divisor: Expr) -> bool:
    match divisor:
        case Const(value, _):
            return value == 0
        case IndexValue(size, _):
            return ctx.least(size) <= 0
    return True


@converter("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
    return _divided(ctx, "remainder", a, b)


@converter("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
    return _divided(ctx, "fmod", a, b)


@converter("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
    return _divided(ctx, "floordiv", a, b)


@converter("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(ctx: ImportContext, a: Operand, b: Operand, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return ctx.pointwise(lambda x, y: call("div", x, y), a, b)
    return _divided(ctx, _WAYS[rounding_mode], a, b)
