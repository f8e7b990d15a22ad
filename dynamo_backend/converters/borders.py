"""The backward of padding by repeated or mirrored borders: each element gathers what it was copied to, dim by dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ...ir.expr import Expr, call, const, symbol
from ...ir.graph import TensorType
from ...ir.loops import contiguous_strides
from ...ir.monoid import SUM
from .context import Domain, ImportContext, Tensor, all_of, axes, index_value, select, within
from .registry import NoConversion, converter


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

    value = image(i + before, within(i, 0 if before < 0 else None, None))
    if before > 0:
        value = call("add", value, image(before - i, within(i, 1, before + 1)))
    if after > 0:
        conditions = within(i, extent - 1 - after, extent - 1)
        value = call("add", value, image(before + 2 * (extent - 1) - i, conditions))
    return ctx.compute(value, kind, ctx.fresh("mirrored"))


def _repeated(ctx: ImportContext, grad: Tensor, dim: int, extent: sympy.Expr, before: int, after: int) -> Tensor:
    """An element; the first and the last with all that repeats them."""
    kind = _without_pad(ctx, grad, dim, extent)
    at = axes(grad.rank)
    i, r = at[dim], symbol("r0")
    length = sympy.Integer(before + after + 1)
    domain = Domain((*at, r), kind.shape, (r,), (length,)) if length > 1 else Domain(at, kind.shape, (), ())
    shift = r - before if length > 1 else sympy.S.Zero
    here = call("eq", index_value(shift), index_value(0))
    value = ctx.at(grad, [*at[:dim], i + before + shift, *at[dim + 1 :]])
    first, last = call("eq", index_value(i), index_value(0)), call("eq", index_value(i), index_value(extent - 1))
    left = call("logical_and", first, call("lt", index_value(shift), index_value(0)))
    right = call("logical_and", last, call("gt", index_value(shift), index_value(0)))
    copied = call("logical_or", here, call("logical_or", left, right))
    value = select(copied, value, const(0, value.dtype)) if length > 1 else value
    return ctx.reduce(SUM, domain, (value,), grad.device, "repeated", types=(kind,))[0]


def _register(name: str, gather: Any) -> None:
    @converter(*(f"aten.{name}{n}d_backward.default" for n in (1, 2, 3)))
    def backward(ctx: ImportContext, grad: Tensor, x: Tensor, pad: Sequence[Any]) -> Tensor:
        if any(not isinstance(p, int) or p < 0 for p in pad):
            raise NoConversion("backward of a padding that is negative or symbolic")
        for k in range(len(pad) // 2):
            dim = x.rank - 1 - k
            if pad[2 * k] or pad[2 * k + 1]:
                grad = gather(ctx, grad, dim, x.shape[dim], pad[2 * k], pad[2 * k + 1])
        return ctx.compute(ctx.at(grad, axes(grad.rank)))


_register("reflection_pad", _mirrored)
_register("replication_pad", _repeated)
