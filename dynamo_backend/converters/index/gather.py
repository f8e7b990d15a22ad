"""Elements chosen by indices that are data: embedding, index, gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Index, Select, call, cast, const
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, index_value

_INDEX_TYPES = (DType.INT32, DType.INT64)


def bounded(index: Expr, dim: int, extent: sympy.Expr, low: sympy.Expr | int = 0) -> Expr:
    """An index into dimension ``dim`` that is an error where it is not in ``low <= index < extent``."""
    place = const(dim, DType.INT64)
    return call("check_bounds", cast(index, DType.INT64), index_value(low), index_value(extent), place)


def wrapped(index: Expr, extent: sympy.Expr) -> Expr:
    """An index that may count from the end."""
    index = cast(index, DType.INT64)
    moved = call("add", index, index_value(extent))
    return Select(call("lt", index, const(0, DType.INT64)), moved, index)


@converter("aten.embedding.default")
def embedding(
    ctx: ImportContext,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale: bool = False,
    sparse: bool = False,
) -> Tensor:
    at = axes(indices.rank + 1)
    row = bounded(ctx.at(indices, at[:-1]), 0, weight.shape[0])
    return ctx.compute(ctx.at(weight, (row, at[-1]), weight.dtype))


@converter("aten.index_select.default")
def index_select(ctx: ImportContext, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not x.rank:
        raise NoConversion("an element of a number")
    if index.dtype not in _INDEX_TYPES:
        raise NoConversion("an index of a type that eager refuses")
    dim %= x.rank
    at = axes(x.rank)
    place = bounded(ctx.at(index, (at[dim],) if index.rank else ()), dim, x.shape[dim])
    chosen: list[Index] = [*at[:dim], place, *at[dim + 1 :]]
    return ctx.compute(ctx.at(x, chosen, x.dtype))


@converter("aten.gather.default")
def gather(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if not x.rank or not index.rank:
        raise NoConversion("an element of a number, or a scalar index")
    dim %= x.rank
    at = axes(x.rank)
    place = bounded(ctx.at(index, at), dim, x.shape[dim])
    return ctx.compute(ctx.at(x, [*at[:dim], place, *at[dim + 1 :]], x.dtype))


def advanced_index(
    ctx: ImportContext,
    shape: Sequence[sympy.Expr],
    indices: Sequence[Tensor | None],
    out_rank: int,
    at: tuple[sympy.Symbol, ...] | None = None,
    safe: bool = False,
) -> list[Index]:
    """The place in a tensor of ``shape`` that element ``i0, …`` (or ``at``) of ``x[indices]`` comes from (NumPy's
    rules). ``safe``: indices are known to be in range, or whoever takes the places looks himself."""
    given = [d for d, t in enumerate(indices) if t is not None]
    tensors = [t for t in indices if t is not None]
    if any(t.dtype is DType.BOOL or t.dtype is DType.UINT8 for t in tensors):
        raise NoConversion("index by a mask: a size decided by data")
    if any(t.dtype not in _INDEX_TYPES for t in tensors):
        raise NoConversion("an index of a type that eager refuses")
    broadcast = max(t.rank for t in tensors)
    adjacent = given == list(range(given[0], given[-1] + 1))
    first = given[0] if adjacent else 0
    at = axes(out_rank) if at is None else at
    block = at[first : first + broadcast]
    rest = iter([*at[:first], *at[first + broadcast :]])
    result: list[Index] = []
    for d, extent in enumerate(shape):
        t = indices[d] if d < len(indices) else None
        if t is None:
            result.append(next(rest))
            continue
        index = ctx.load(t, block)
        result.append(wrapped(index if safe else bounded(index, d, extent, -extent), extent))
    return result


@converter("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_tensor(ctx: ImportContext, x: Tensor, indices: Sequence[Any]) -> Tensor:
    out = ctx.type()
    if all(t is None for t in indices):
        return ctx.compute(ctx.at(x, axes(x.rank), x.dtype))
    safe = str(ctx.node.target) == "aten._unsafe_index.Tensor"
    return ctx.compute(ctx.at(x, advanced_index(ctx, x.shape, indices, len(out.shape), safe=safe), x.dtype))
