"""Tensors made of numbers: fills, ranges, identity and triangles."""

from __future__ import annotations

from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, call, const
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, convert, index_value, select, unwritten
from .elementwise import ensure_held


def _fill(ctx: ImportContext, value: Scalar) -> Tensor:
    kind = ctx.type()
    return ctx.compute(ctx.scalar(value, kind.dtype.compute), kind)


@converter("aten.full.default")
def full(ctx: ImportContext, size: Any, value: Scalar, **_: Any) -> Tensor:
    if ctx.type().shape:  # numbers are made by decompositions too, of ops that do not mind
        ensure_held(value, ctx.type().dtype)
    return _fill(ctx, value)


@converter("aten.full_like.default", "aten.new_full.default")
def full_like(ctx: ImportContext, x: Tensor, *args: Any, **_: Any) -> Tensor:
    ensure_held(args[-1], ctx.type().dtype)
    return _fill(ctx, args[-1])


@converter(
    "aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default", "aten.zero.default",
    "aten._efficientzerotensor.default",
)  # fmt: skip
def zeros(ctx: ImportContext, *_: Any, **__: Any) -> Tensor:
    return _fill(ctx, 0)


@converter(
    "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default", "aten.empty_strided.default",
    "aten.new_empty_strided.default", "aten.empty_permuted.default",
)  # fmt: skip
def empty(ctx: ImportContext, *_: Any, **__: Any) -> Tensor:
    kind = ctx.type()
    return ctx.compute(unwritten(kind.dtype), kind)


@converter("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def ones(ctx: ImportContext, *_: Any, **__: Any) -> Tensor:
    return _fill(ctx, 1)


@converter("aten.scalar_tensor.default")
def scalar_tensor(ctx: ImportContext, value: Scalar, **_: Any) -> Tensor:
    return _fill(ctx, value)


@converter("prims.iota.default")
def iota(ctx: ImportContext, length: Any, *, start: Any, step: Any, **_: Any) -> Tensor:
    return ctx.compute(convert(index_value(start + axes(1)[0] * step), ctx.type().dtype.compute))


@converter("aten.arange.start_step", "aten.arange.default", "aten.arange.start")
def arange(ctx: ImportContext, *bounds: Any, **_: Any) -> Tensor:
    bounds = tuple(int(b) if isinstance(b, bool) else b for b in bounds)
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    out = ctx.type()
    if out.dtype is DType.BOOL:
        raise NoConversion("eager has no kernel for bool")
    at = axes(1)[0]
    if all(isinstance(b, (int, sympy.Expr)) for b in (start, step)) and out.dtype.is_int:
        return ctx.compute(convert(index_value(start + at * step), out.dtype))
    # As torch: start + step * i, in double for floats.
    kind = DType.FLOAT64 if out.dtype.is_float else DType.INT64
    position = convert(index_value(at), kind)
    value = call("add", ctx.scalar(start, kind), call("mul", ctx.scalar(step, kind), position))
    return ctx.compute(convert(value, out.dtype))


@converter("aten.eye.default", "aten.eye.m")
def eye(ctx: ImportContext, *_: Any, **__: Any) -> Tensor:
    row, column = axes(2)
    return ctx.compute(convert(call("eq", index_value(row), index_value(column)), ctx.type().dtype.compute))


def _triangle(ctx: ImportContext, x: Tensor, diagonal: Any, lower: bool) -> Tensor:
    at = axes(x.rank)
    row, column = at[-2:]
    kept: Expr = call("le" if lower else "ge", index_value(column), index_value(row + diagonal))
    value = ctx.load(x, at)
    return ctx.compute(select(kept, value, const(0, value.dtype)))


@converter("aten.tril.default")
def tril(ctx: ImportContext, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(ctx, x, diagonal, True)


@converter("aten.triu.default")
def triu(ctx: ImportContext, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(ctx, x, diagonal, False)
