"""Rows combined by segment: ``segment_reduce`` and bags of embeddings, as scatters of each row into its segment.

Segments are consecutive, so that of a row is the number of those that end before it.
"""

from __future__ import annotations

import math
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import MAX, MIN, PRODUCT, SUM, Monoid
from ....ir.expr.value import Expr, Load, Select, call, cast, const
from ....ir.graph.graph import TensorType
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..scan.scans import scan
from ..terms import axes, index_value
from .gather import bounded
from .scatter import Source, scatter, scattered, source_axes

_PLACE = DType.INT64
# What a segment of no rows is, and how rows are combined.
_KINDS: dict[str, tuple[float, Monoid]] = {
    "sum": (0.0, SUM), "mean": (0.0, SUM), "prod": (1.0, PRODUCT), "max": (-math.inf, MAX), "min": (math.inf, MIN),
}  # fmt: skip
_SUM, _MEAN, _MAX = 0, 1, 2
# Weights of so few elements are in a near cache, where rows need not be fetched ahead.
NEAR = 4096


def _counted(ctx: ImportContext, ends: Tensor, rows: TensorType) -> Tensor:
    """For each row how many ``ends`` are at or before it; ``ends`` and ``rows`` agree in all but the last dimension.

    Ends are counted where they are, one place farther than the rows go for those behind, and summed along the rows.
    """
    length, over, at = rows.shape[-1], source_axes(ends.rank), axes(len(rows.shape))
    place = call("minimum", ctx.at(ends, over, _PLACE), index_value(length))
    place = call("maximum", place, const(0, _PLACE))
    marked = ctx.contiguous((*rows.shape[:-1], length + 1), _PLACE, rows.device)
    source = Source(ends.shape, (*over[:-1], place), const(1, _PLACE))
    marks = scattered(ctx, SUM, const(0, _PLACE), source, marked, "marks")
    found = scan(ctx, SUM, (marks,), rows, len(at) - 1)[0]
    return ctx.temporary(found, rows, "segment")


@converter("aten.segment_reduce.default")
def segment_reduce(
    ctx: ImportContext, data: Tensor, reduce: str, *, lengths: Tensor | None = None, indices: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, unsafe: bool = False, initial: Scalar | None = None,
) -> Tensor:  # fmt: skip
    given = lengths if lengths is not None else offsets
    out = ctx.type()
    if given is None or indices is not None or given.rank != axis + 1 or out.shape[axis] == 0:
        raise NoConversion("segments that are not consecutive, or none")
    kind = out.dtype.compute
    at, lead = axes(data.rank), axes(data.rank)[:axis]
    if lengths is not None:
        length = ctx.at(lengths, (*lead, at[axis]), _PLACE)
        types = ctx.contiguous(lengths.shape, _PLACE, data.device)
        total = scan(ctx, SUM, (ctx.at(lengths, axes(axis + 1), _PLACE),), types, axis)[0]
        bounds = ctx.temporary(total, types, "ends")
    else:
        bounds = given
        length = call("sub", ctx.at(given, (*lead, at[axis] + 1), _PLACE), ctx.at(given, (*lead, at[axis]), _PLACE))
    segment = _counted(ctx, bounds, ctx.contiguous(data.shape[: axis + 1], _PLACE, data.device))
    start, monoid = _KINDS[reduce]
    first = const(start, kind) if initial is None else ctx.scalar(initial, kind)
    over = source_axes(data.rank)
    value = ctx.at(data, over, kind)
    place = ctx.at(segment, over[: axis + 1])
    if lengths is not None and not unsafe:
        # Lengths that are negative, or that rows are too few for, are an error; so are rows that are left.
        rows = data.shape[axis]
        last = ctx.at(bounds, (*lead, bounds.shape[-1] - 1))
        right = call("eq", bounded(last, axis, rows + 1, rows), index_value(rows))
        right = call("logical_and", right, call("ge", bounded(length, axis, rows + 1), const(0, _PLACE)))
        first = Select(right, first, const(math.nan, kind))
    else:  # rows before, between and behind the segments belong to none
        if offsets is not None:
            place = call("sub", place, const(1, _PLACE))
        inside = call("ge", place, const(0, _PLACE))
        inside = call("logical_and", inside, call("lt", place, index_value(out.shape[axis])))
        (neutral,) = monoid.identity((kind,))
        value, place = Select(inside, value, neutral), Select(inside, place, const(0, _PLACE))
    source = Source(data.shape, (*over[:axis], place, *over[axis + 1 :]), value)
    if reduce != "mean":
        return scatter(ctx, monoid, first, source)
    total = scattered(ctx, SUM, first, source, out, "sum")
    mean = call("div", total, cast(length, kind))
    empty = total if initial is not None else const(math.nan, kind)
    return ctx.compute(Select(call("gt", length, const(0, _PLACE)), mean, empty))


@converter("aten._embedding_bag_forward_only.default")
def embedding_bag(
    ctx: ImportContext, weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False,
    mode: int = _SUM, sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> tuple[Any, ...]:  # fmt: skip
    """Of the four results only the first is made: the others are for a backward that there is not."""
    if ctx.used() - {0}:
        raise NoConversion("a bag's other results than its embeddings")
    fetched = not (weight.type.numel.is_Integer and weight.type.numel <= NEAR)
    fetched = fetched and ctx.calls_libraries(weight.device)
    if fetched and mode != _MAX and weight.device.startswith("cpu") and weight.dtype is not DType.FLOAT64:
        raise NoConversion("sums of embeddings: a library's kernel that fetches the rows ahead")
    with ctx.result_of(0):
        return _bags(ctx, weight, indices, offsets, mode, per_sample_weights, int(padding_idx)), None, None, None


def _checked_offsets(ctx: ImportContext, offsets: Tensor, indices: Tensor) -> Tensor:
    """The first bag begins with the first index, and none behind the last."""
    (at,) = axes(1)
    given = ctx.at(offsets, (at,))
    first = call("eq", index_value(at), const(0, _PLACE))
    value = Select(first, bounded(given, 0, sympy.S.One), bounded(given, 0, indices.shape[0] + 1))
    return ctx.temporary(value, ctx.contiguous(offsets.shape, _PLACE, offsets.device), "offsets")


def _bags(
    ctx: ImportContext, weight: Tensor, indices: Tensor, offsets: Tensor, mode: int, factors: Tensor | None,
    padding: int,
) -> Tensor:  # fmt: skip
    out = ctx.type()
    kind = out.dtype.compute
    if out.shape[0] == 0:
        return ctx.compute(const(0, kind))
    bag = _counted(ctx, _checked_offsets(ctx, offsets, indices), ctx.contiguous(indices.shape, _PLACE, weight.device))
    row, column = source_axes(2)
    index = cast(ctx.at(indices, (row,)), _PLACE)
    value = ctx.at(weight, (bounded(index, 0, weight.shape[0]), column), kind)
    if factors is not None:
        value = call("mul", value, ctx.at(factors, (row,), kind))
    place = call("sub", ctx.at(bag, (row,)), const(1, _PLACE))
    # What stands behind the last offset is in no bag, nor is what pads.
    inside = call("lt", place, index_value(out.shape[0]))
    if padding >= 0:
        inside = call("logical_and", inside, call("ne", index, const(padding, _PLACE)))
    places = (Select(inside, place, const(0, _PLACE)), column)
    per_bag = ctx.contiguous(out.shape[:1], _PLACE, weight.device)

    def combined(monoid: Monoid, value: Expr) -> Expr:
        (neutral,) = monoid.identity((kind,))
        source = Source((*indices.shape, weight.shape[1]), places, Select(inside, value, neutral))
        return scattered(ctx, monoid, neutral, source, out, "rows")

    if mode == _MAX:
        # A row is taken where it is the first of its bag, or greater than those before, which NaN is not.
        length = index_value(indices.shape[0])
        rows = Source(indices.shape, places[:1], Select(inside, index_value(row), length))
        first = scattered(ctx, MIN, length, rows, per_bag, "first")
        is_first = call("eq", index_value(row), Load(first.buffer, places[:1], _PLACE))
        taken = call("logical_or", is_first, call("eq", value, value))
        greatest = combined(MAX, Select(taken, value, const(-math.inf, kind)))
        return ctx.compute(Select(call("lt", first, length), greatest, const(0, kind)))
    if mode == _SUM:
        rows = Source((*indices.shape, weight.shape[1]), places, Select(inside, value, const(0, kind)))
        return scatter(ctx, SUM, const(0, kind), rows)
    ones = Source(indices.shape, places[:1], Select(inside, const(1, _PLACE), const(0, _PLACE)))
    count = scattered(ctx, SUM, const(0, _PLACE), ones, per_bag, "count")
    total = combined(SUM, value)
    mean = call("div", total, cast(count, kind))
    return ctx.compute(Select(call("gt", count, const(0, _PLACE)), mean, const(0, kind)))
