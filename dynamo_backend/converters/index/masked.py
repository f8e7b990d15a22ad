"""Elements taken in turn by the places where a mask holds: a running count says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, Select, call, const
from ....ir.graph.graph import TensorType
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..scan.scans import scan
from ..terms import axes, convert, index_value, linear_offset
from .gather import bounded
from .search import count_before
from .views import reshape_indices


def _running_count(ctx: ImportContext, mask: Tensor, like: TensorType) -> Tensor:
    """How many places of the mask, broadcast to the shape of ``like``, hold up to and with each, in row-major order."""
    flat = ctx.contiguous((like.numel,), DType.INT64, like.device)
    place = reshape_indices(like.shape, flat.shape)
    holds = convert(convert(ctx.load(mask, place), DType.BOOL), DType.INT64)
    (count,) = scan(ctx, SUM, (holds,), flat, 0)
    return ctx.compute(count, flat, ctx.fresh("count"))


def _unravelled(place: Expr, shape: Sequence[Any]) -> list[Expr]:
    """The indices of a row-major place that is a value."""
    indices: list[Expr] = []
    for k, extent in enumerate(reversed(shape)):
        size = index_value(extent)
        indices.append(place if k == len(shape) - 1 else call("remainder", place, size))
        place = call("truncdiv", place, size)
    return indices[::-1]


@converter("aten.masked_scatter.default")
def masked_scatter(ctx: ImportContext, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    out = ctx.type()
    if 0 in (*out.shape, *source.shape):
        raise NoConversion("masked_scatter without elements")
    at = axes(len(out.shape))
    if mask.dtype is not DType.BOOL:
        raise NoConversion("a mask of numbers, which eager refuses")
    if mask.device != out.device:
        raise NoConversion("copy between devices")
    count = _running_count(ctx, mask, out)
    turn = call("sub", ctx.at(count, (linear_offset(out.shape, at),)), const(1, DType.INT64))
    kind = out.dtype.compute
    there = bounded(turn, 0, source.type.numel)
    taken = ctx.at(source, _unravelled(there, source.shape), kind)
    return ctx.compute(Select(convert(ctx.load(mask, at), DType.BOOL), taken, ctx.load(x, at, kind)))


def _holding(ctx: ImportContext, mask: Tensor, like: TensorType, turn: sympy.Expr) -> tuple[Expr, Expr]:
    """The row-major place where a mask holds for the ``turn``-th time, and whether there is one.

    The running count is sorted, so the place is found by a binary search.
    """
    count = _running_count(ctx, mask, like)
    sought = call("add", index_value(turn), const(1, DType.INT64))
    place = count_before(ctx, like.numel, sought, lambda p: ctx.at(count, (p,)), right=False)
    return place, call("lt", place, index_value(like.numel))


@converter("aten.masked_scatter_backward.default")
def masked_scatter_backward(ctx: ImportContext, grad: Tensor, mask: Tensor, sizes: Sequence[Any]) -> Tensor:
    """Each element of the source gets the gradient of the place that took it."""
    out = ctx.type()
    if 0 in (*out.shape, *grad.shape):
        raise NoConversion("masked_scatter without elements")
    at = axes(len(out.shape))
    place, exists = _holding(ctx, mask, grad.type, linear_offset(out.shape, at))
    value = ctx.at(grad, _unravelled(place, grad.shape))
    return ctx.compute(Select(exists, value, const(0, value.dtype)))


@converter("aten.nonzero_static.default")
def nonzero_static(ctx: ImportContext, x: Tensor, *, size: Any, fill_value: int = -1) -> Tensor:
    """The indices of the first ``size`` elements that are not zero, a row each."""
    filler = const(fill_value, DType.INT64)
    if 0 in (*x.shape, *ctx.type().shape):
        return ctx.compute(filler)
    row, column = axes(2)
    place, exists = _holding(ctx, x, x.type, row)
    index: Expr = filler
    for k, i in enumerate(_unravelled(place, x.shape)):
        index = Select(call("eq", index_value(column), index_value(k)), i, index)
    return ctx.compute(Select(exists, index, filler))
