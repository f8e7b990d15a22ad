"""The backward of padding by repeated or mirrored borders: each element gathers what it was copied to, dim by dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, call, const, symbol
from ....ir.graph.graph import TensorType
from ....ir.nest.loops import contiguous_strides
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import NoConversion, converter
from ..terms import all_of, axes, index_value, select, within


def _without_pad(ctx: ImportContext, grad: Tensor, dim: int, extent: sympy.Expr) -> TensorType:
    """The type of a gradient that is reduced to ``extent`` along one dim, in the type in which sums are computed."""
    shape = (*grad.shape[:dim], extent, *grad.shape[dim + 1 :])
    return TensorType(shape, contiguous_strides(shape), grad.dtype.compute, grad.device)


def _mirrored(ctx: ImportContext, grad: Tensor, dim: int, extent: sympy.Expr, before: int, after: int) -> Tensor:
    """An element, with its mirror images beyond either border."""
    kind = _without_pad(ctx, grad, dim, extent)
    at = axes(grad.rank)
    i = at[dim]

    def image(place: sympy.Expr, conditions: list[Expr]) -> Expr:
        value = ctx.at(grad, [*at[:dim], place, *at[dim + 1 :]])
        return select(all_of(conditions), value, const(0, value.dtype))

    value = image(i + before, [])
    if before > 0:
        value = call("add", value, image(before - i, within(i, 1, before + 1)))
    if after > 0:
        conditions = within(i, extent - 1 - after, extent - 1)
        value = call("add", value, image(before + 2 * (extent - 1) - i, conditions))
    return ctx.compute(value, kind, ctx.fresh("mirrored"))


def _repeated(ctx: ImportContext, grad: Tensor, dim: int, extent: sympy.Expr, before: int, after: int) -> Tensor:
    """An element; the first and the last with all that repeats them, and zero what a negative padding left out."""
    kind = _without_pad(ctx, grad, dim, extent)
    at = axes(grad.rank)
    i, r = at[dim], symbol("r0")
    copies = max(before, 0), max(after, 0)
    length = sympy.Integer(sum(copies) + 1)
    many = length > 1
    domain = ReductionSpace((*at, r), kind.shape, (r,), (length,)) if many else ReductionSpace(at, kind.shape, (), ())
    shift = r - copies[0] if many else sympy.S.Zero
    place = i + before + shift
    conditions = within(place, 0 if before < 0 else None, grad.shape[dim] if after < 0 else None)
    if many:
        distance, here, end = index_value(shift), index_value(i), index_value(extent - 1)
        zero = index_value(0)
        left = call("logical_and", call("eq", here, zero), call("lt", distance, zero))
        right = call("logical_and", call("eq", here, end), call("gt", distance, zero))
        conditions.append(call("logical_or", call("eq", distance, zero), call("logical_or", left, right)))
    value = ctx.at(grad, [*at[:dim], place, *at[dim + 1 :]])
    value = select(all_of(conditions), value, const(0, value.dtype))
    return ctx.reduce(SUM, domain, (value,), grad.device, "repeated", types=(kind,))[0]


def _register(name: str, gather: Any, least: float) -> None:
    @converter(*(f"aten.{name}{n}d_backward.default" for n in (1, 2, 3)))
    def backward(ctx: ImportContext, grad: Tensor, x: Tensor, pad: Sequence[Any]) -> Tensor:
        if any(not isinstance(p, int) or p < least for p in pad):
            raise NoConversion("backward of a mirrored border that is negative, or of a symbolic one")
        for k in range(len(pad) // 2):
            dim = x.rank - 1 - k
            if pad[2 * k] or pad[2 * k + 1]:
                grad = gather(ctx, grad, dim, x.shape[dim], pad[2 * k], pad[2 * k + 1])
        return ctx.compute(ctx.at(grad, axes(grad.rank)))


_register("reflection_pad", _mirrored, 0)
_register("replication_pad", _repeated, -math.inf)
