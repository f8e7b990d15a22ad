"""Scatters that can be written as a choice at each place of the result; the others are library calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ...ir.dtypes import DType
from ...ir.expr import Expr, Select, call, cast
from .context import ImportContext, Scalar, Tensor, axes, index_value
from .registry import NoConversion, converter


def _hits(ctx: ImportContext, x: Tensor, dim: int, index: Tensor) -> tuple[Expr, list[sympy.Expr]]:
    """Where the one index of each row points, and the place of that index. Raises NoConversion for several a row."""
    if x.rank == 0 or index.rank != x.rank or index.shape[dim] != 1:
        raise NoConversion("scatter of several elements a row")
    if any(index.shape[d] != x.shape[d] for d in range(x.rank) if d != dim):
        raise NoConversion("scatter into a part of the rows")
    at = axes(x.rank)
    place = [sympy.S.Zero if d == dim else i for d, i in enumerate(at)]
    label = cast(ctx.at(index, place), DType.INT64)
    return call("eq", label, index_value(at[dim])), place


@converter("aten.scatter.value")
def scatter_value(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Scalar) -> Tensor:
    dim = dim % x.rank if x.rank else 0
    hit, _ = _hits(ctx, x, dim, index)
    kind = x.dtype.compute
    return ctx.compute(Select(hit, ctx.scalar(value, kind), ctx.at(x, axes(x.rank))))


@converter("aten.scatter.src", "aten.scatter_add.default")
def scatter_source(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    dim = dim % x.rank if x.rank else 0
    hit, place = _hits(ctx, x, dim, index)
    old = ctx.at(x, axes(x.rank))
    new = ctx.at(source, place)
    if "add" in ctx.node.target._opname:  # type: ignore[union-attr]
        new = call("add", old, new)
    return ctx.compute(Select(hit, new, old))


@converter("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    ctx: ImportContext, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    mask = indices[0] if len(indices) == 1 else None
    if not (isinstance(mask, Tensor) and mask.dtype is DType.BOOL and values.rank == 0):
        raise NoConversion("scatter with duplicates" if accumulate else "scatter by several indices")
    at = axes(x.rank)
    old, new = ctx.at(x, at), ctx.at(ctx.local(values, x.device), (), x.dtype.compute)
    if accumulate:
        new = call("add", old, new)
    return ctx.compute(Select(ctx.at(mask, at[: mask.rank]), new, old))
