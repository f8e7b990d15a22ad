"""Pooling to a given size: windows that may differ in length, by one bound for all of them and a condition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ARGMAX, MAX, SUM, lowest
from ....ir.expr.value import Expr, Select, call, cast, const
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import NoConversion, converter
from ..terms import all_of, convert, index_value, linear_offset, rounded, select, within
from .pooling import finish, spatial_dims, window

_FAR = const((1 << 63) - 1, DType.INT64)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The space (positions | candidates), the position, the candidates, and when each is one."""

    domain: ReductionSpace
    kept: tuple[sympy.Expr, ...]
    places: list[sympy.Expr]
    conditions: list[Expr]


Range = tuple[sympy.Expr, sympy.Expr]


def _pooled(place: sympy.Expr, extent: int, out: int) -> Range:
    """Where the window of an output position begins and ends."""
    common = math.gcd(extent, out)
    extent, out = extent // common, out // common
    return FloorDiv(place * extent, out), CeilDiv((place + 1) * extent, out)


def _pooling(place: sympy.Expr, extent: int, out: int) -> Range:
    """The output positions whose windows hold an input position: the same with input and output exchanged."""
    return _pooled(place, out, extent)


def _windows(
    shape: Sequence[sympy.Expr], pairs: Sequence[tuple[int, int]], bounds: Callable[[sympy.Expr, int, int], Range]
) -> _Windows:
    """Of ``shape``, whose last dims are positions; ``pairs`` has the extents of input and output for each."""
    n = len(pairs)
    lead = len(shape) - n
    lengths: list[int] = []
    differ: list[bool] = []
    for (extent, out), positions in zip(pairs, shape[lead:], strict=True):
        ranges = [bounds(sympy.Integer(i), extent, out) for i in range(int(positions))]
        counts = [int(end - begin) for begin, end in ranges]
        lengths.append(max(counts))
        differ.append(min(counts) < max(counts))
    domain, kept, offsets = window(shape, lengths, n)
    places: list[sympy.Expr] = []
    conditions: list[Expr] = []
    for k, (extent, out) in enumerate(pairs):
        begin, end = bounds(kept[lead + k], extent, out)
        places.append(begin + offsets[k])
        if differ[k]:
            conditions += within(places[k], None, end)
    return _Windows(domain, kept, places, conditions)


def _pairs(extents: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr]) -> list[tuple[int, int]]:
    if any(not e.is_Integer or e == 0 for e in (*extents, *sizes)):
        raise NoConversion("adaptive pooling of symbolic sizes, or of none")
    return [(int(e), int(o)) for e, o in zip(extents, sizes, strict=True)]


def _count(places: Sequence[sympy.Expr], pairs: Sequence[tuple[int, int]], dtype: DType) -> Expr:
    """How many elements there are in the window of an output position."""
    count: sympy.Expr = sympy.S.One
    for place, (extent, out) in zip(places, pairs, strict=True):
        begin, end = _pooled(place, extent, out)
        count = count * (end - begin if extent % out else sympy.Integer(extent // out))
    return convert(index_value(count), dtype)


@converter("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(ctx: ImportContext, x: Tensor, output_size: Any) -> Tensor:
    n = spatial_dims(ctx)
    out = ctx.type()
    lead = x.rank - n
    pairs = _pairs(x.shape[lead:], out.shape[lead:])
    w = _windows(out.shape, pairs, _pooled)
    value = ctx.at(x, [*w.kept[:lead], *w.places])
    if w.conditions:
        value = select(all_of(w.conditions), value, const(0, value.dtype))
    (total,) = ctx.reduce(SUM, w.domain, (value,), x.device)
    return ctx.compute(call("div", ctx.at(total, w.kept), _count(w.kept[lead:], pairs, value.dtype)))


@converter("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool_backward(ctx: ImportContext, grad: Tensor, x: Tensor) -> Tensor:
    n = spatial_dims(ctx)
    lead = x.rank - n
    pairs = _pairs(x.shape[lead:], grad.shape[lead:])
    w = _windows(x.shape, pairs, _pooling)
    g = ctx.at(grad, [*w.kept[:lead], *w.places])
    value = call("div", g, _count(w.places, pairs, g.dtype))
    if w.conditions:
        value = select(all_of(w.conditions), value, const(0, g.dtype))
    return finish(ctx, ctx.reduce(SUM, w.domain, (value,), x.device)[0], None)


@converter("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(ctx: ImportContext, x: Tensor, output_size: Any) -> tuple[Any, Any]:
    n = spatial_dims(ctx)
    out = ctx.type(0)
    lead = x.rank - n
    extents = x.shape[lead:]
    w = _windows(out.shape, _pairs(extents, out.shape[lead:]), _pooled)
    loaded = ctx.at(x, [*w.kept[:lead], *w.places])
    inside = all_of(w.conditions)
    value = select(inside, loaded, lowest(loaded.dtype))
    if 1 not in ctx.used():
        (best,) = ctx.reduce(MAX, w.domain, (value,), x.device)
        return finish(ctx, best, 0), None
    position = select(inside, index_value(linear_offset(extents, w.places)), _FAR)
    best, where = ctx.reduce(ARGMAX, w.domain, (value, position), x.device)
    return finish(ctx, best, 0), finish(ctx, where, 1)


@converter("aten.adaptive_max_pool2d_backward.default", "aten.adaptive_max_pool3d_backward.default")
def adaptive_max_pool_backward(ctx: ImportContext, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    n = spatial_dims(ctx)
    lead = x.rank - n
    extents = x.shape[lead:]
    w = _windows(x.shape, _pairs(extents, grad.shape[lead:]), _pooling)
    at = [*w.kept[:lead], *w.places]
    here = index_value(linear_offset(extents, w.kept[lead:]))
    g = ctx.at(grad, at)
    zero = const(0, g.dtype)
    value = Select(call("eq", ctx.at(indices, at), here), g, zero)
    return finish(ctx, ctx.reduce(SUM, w.domain, (select(all_of(w.conditions), value, zero),), x.device)[0], None)


# --- windows that random numbers place --------------------------------------------------------------------------------


def _fractional_start(sample: Expr, place: sympy.Expr, extent: int, out: int, size: int, held: DType) -> Expr:
    """Where the window of an output position begins: the last one at the end, the others at even steps from a random
    one, each value rounded to a type.
    """
    last = const(extent - size, DType.INT64)
    if out == 1:
        return last
    kind = sample.dtype
    length, steps = (rounded(const(n, kind), held) for n in (extent - size, out - 1))
    ratio = rounded(call("div", length, steps), held)
    moved = rounded(call("add", rounded(convert(index_value(place), kind), held), sample), held)
    begin = cast(rounded(call("mul", moved, ratio), held), DType.INT64)
    start = call("sub", begin, cast(rounded(call("mul", sample, ratio), held), DType.INT64))
    return Select(call("eq", index_value(place), index_value(out - 1)), last, start)


@converter("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default")
def fractional_max_pool(
    ctx: ImportContext, x: Tensor, kernel_size: Any, output_size: Any, samples: Tensor
) -> tuple[Any, Any]:
    n = spatial_dims(ctx)
    out = ctx.type(0)
    lead = x.rank - n
    pairs = _pairs(x.shape[lead:], out.shape[lead:])
    kernel = [int(k) for k in (kernel_size if isinstance(kernel_size, (list, tuple)) else [kernel_size] * n)]
    domain, kept, offsets = window(out.shape, kernel, n)
    batch = kept[0] if lead == 2 else sympy.S.Zero
    # Eager's kernels for CPUs compute half types in themselves, those for GPUs in float32.
    held = samples.dtype if x.device == "cpu" else samples.dtype.compute
    places: list[Expr] = []
    for k, (extent, o) in enumerate(pairs):
        # Of two dims, torch takes the first sample for the last.
        column = n - 1 - k if n == 2 else k
        sample = ctx.at(samples, (batch, kept[lead - 1], sympy.Integer(column)))
        start = _fractional_start(sample, kept[lead + k], extent, o, kernel[k], held)
        places.append(call("add", start, index_value(offsets[k])))
    value = ctx.at(x, [*kept[:lead], *places])
    position = places[0]
    for k in range(1, n):
        position = call("add", call("mul", position, const(pairs[k][0], DType.INT64)), places[k])
    best, where = ctx.reduce(ARGMAX, domain, (value, position), x.device)
    return finish(ctx, best, 0), finish(ctx, where, 1)
