"""Divisions whose result is whole, and what they leave. Integers divided by zero are an error on CPUs, as in eager."""

from __future__ import annotations

from ...ir.expr import Const, Expr, IndexValue, call
from .context import ImportContext, Scalar, Tensor
from .registry import converter

Operand = Tensor | Scalar

_WAYS = {"floor": "floordiv", "trunc": "truncdiv"}


def _divided(ctx: ImportContext, fn: str, a: Operand, b: Operand) -> Tensor:
    """The current node's result: a function of the table of two operands, the second of which divides."""
    on_cpu = ctx.type().device.startswith("cpu")

    def value(x: Expr, y: Expr) -> Expr:
        if x.dtype.is_float:
            return call("trunc", call("div", x, y)) if fn == "truncdiv" else call(fn, x, y)
        return call(fn, x, call("check_divisor", y) if on_cpu and _may_be_zero(ctx, y) else y)

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
