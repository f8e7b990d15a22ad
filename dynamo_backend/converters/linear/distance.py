"""Distances between rows: a reduction over their elements, forward and backward."""

from __future__ import annotations

import math

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import MAX, SUM
from ....ir.expr.value import Expr, Select, call, cast, const, symbol
from ..context import ImportContext, ReductionSpace, Tensor
from ..index.gather import bounded
from ..index.scatter import Source, scatter, source_axes
from ..registry import NoConversion, converter
from ..sizes import integer
from ..terms import axes, convert, index_value, select

# From so many rows on torch takes Euclidean distances by a matrix product.
_FEW_ROWS = 25


def _term(difference: Expr, p: float) -> Expr:
    """What one element adds to a distance."""
    size = call("abs", difference)
    if p == 0:
        zero = const(0, size.dtype)
        return Select(call("eq", size, zero), zero, const(1, size.dtype))
    if p == 2:
        return call("mul", difference, difference)
    return size if p in (1, math.inf) else call("pow", size, const(p, size.dtype))


def _finished(total: Expr, p: float) -> Expr:
    if p in (0, 1, math.inf):
        return total
    return call("sqrt", total) if p == 2 else call("pow", total, const(1 / p, total.dtype))


def _slope(difference: Expr, grad: Expr, distance: Expr, p: float) -> Expr:
    """The gradient of a distance by one difference, times ``grad``; zero where there is no distance."""
    zero = const(0, difference.dtype)
    if p == 1:
        return call("mul", grad, call("sign", difference))
    if p == math.inf:
        furthest = call("eq", call("abs", difference), distance)
        return Select(furthest, call("mul", grad, call("sign", difference)), zero)
    if p == 2:
        slope = call("div", call("mul", grad, difference), distance)
        return Select(call("eq", distance, zero), zero, slope)
    size = call("pow", call("abs", difference), const(p - 1, difference.dtype))
    slope = call("mul", call("mul", call("sign", difference), size), grad)
    slope = call("div", slope, call("pow", distance, const(p - 1, difference.dtype)))
    none = call("eq", distance, zero)
    if p < 2:
        none = call("logical_or", none, call("eq", difference, zero))
    return Select(none, zero, slope)


def _over(kept: tuple[sympy.Expr, ...], extent: sympy.Expr) -> tuple[ReductionSpace, sympy.Expr]:
    """The space of a reduction of one further axis, and that axis (zero where its extent is one)."""
    shape = (*kept, extent)
    along = axes(len(shape))
    domain = ReductionSpace(along, kept, (symbol("r0"),), (extent,))
    if extent == 1:
        return ReductionSpace(along, kept, (), ()), sympy.S.Zero
    return domain, domain.axes[0]


@converter("aten._cdist_forward.default")
def cdist(ctx: ImportContext, a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:
    out = ctx.type()
    rows = [ctx.sizes.hint(t.shape[-2]) for t in (a, b)]
    if p == 2 and compute_mode != 2 and max(rows) > _FEW_ROWS and ctx.calls_libraries(a.device):
        raise NoConversion("Euclidean distances by a matrix product")
    if a.shape[-1] == 0:
        return ctx.compute(const(0, out.dtype.compute))
    domain, r = _over(out.shape, a.shape[-1])
    at = axes(len(out.shape))
    left, right = ctx.load(a, (*at[:-1], r)), ctx.load(b, (*at[:-2], at[-1], r))
    (total,) = ctx.reduce(MAX if p == math.inf else SUM, domain, (_term(call("sub", left, right), p),), a.device)
    return ctx.compute(_finished(ctx.at(total, at), p))


@converter("aten._cdist_backward.default")
def cdist_backward(ctx: ImportContext, grad: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Tensor:
    out = ctx.type()
    if p == 0 or 0 in (*a.shape, *b.shape):
        return ctx.compute(const(0, out.dtype.compute))
    domain, r = _over(out.shape, b.shape[-2])
    at = axes(len(out.shape))
    pair = (*at[:-1], r)
    difference = call("sub", ctx.load(a, at), ctx.load(b, (*at[:-2], r, at[-1])))
    slope = _slope(difference, ctx.load(grad, pair), ctx.load(distance, pair), p)
    (total,) = ctx.reduce(SUM, domain, (slope,), a.device)
    return ctx.compute(ctx.at(total, at))


def _rows_of_pair(k: sympy.Symbol, n: sympy.Expr) -> tuple[Expr, Expr]:
    """The two rows, of ``n``, whose pair is the ``k``-th in row-major order above the diagonal."""
    double = DType.FLOAT64
    count, place = convert(index_value(n), double), convert(index_value(k), double)
    # Row i begins at i n - i (i + 1) / 2 - i: the quadratic solved, and a little beyond the rounding of its root.
    half = call("sub", count, const(0.5, double))
    root = call(
        "sqrt",
        call("sub", call("mul", half, half), call("add", call("mul", const(2, double), place), const(1, double))),
    )
    first = cast(call("floor", call("sub", half, root)), DType.INT64)
    return first, _second_of_pair(first, index_value(k), index_value(n))


def _begin_of_row(row: Expr, n: Expr) -> Expr:
    """How many pairs there are whose first row is before ``row``."""
    one, two = const(1, DType.INT64), const(2, DType.INT64)
    twice = call("sub", call("sub", call("mul", two, n), row), one)
    return call("truncdiv", call("mul", row, twice), two)


def _second_of_pair(row: Expr, k: Expr, n: Expr) -> Expr:
    rest = call("sub", k, _begin_of_row(row, n))
    return call("add", call("add", row, const(1, DType.INT64)), rest)


@converter("aten._pdist_forward.default")
def pdist(ctx: ImportContext, x: Tensor, p: float = 2) -> Tensor:
    out = ctx.type()
    if x.shape[1] == 0:
        return ctx.compute(const(0, out.dtype.compute))
    first, second = _rows_of_pair(axes(1)[0], x.shape[0])
    rows = ctx.temporary(first, out, "first", DType.INT64), ctx.temporary(second, out, "second", DType.INT64)
    domain, r = _over(out.shape, x.shape[1])
    left, right = (ctx.at(x, (ctx.at(row, axes(1)), r)) for row in rows)
    (total,) = ctx.reduce(MAX if p == math.inf else SUM, domain, (_term(call("sub", left, right), p),), x.device)
    return ctx.compute(_finished(ctx.at(total, axes(1)), p))


@converter("aten._pdist_backward.default")
def pdist_backward(ctx: ImportContext, grad: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    out = ctx.type()
    if p == 0 or 0 in x.shape:
        return ctx.compute(const(0, out.dtype.compute))
    n = x.shape[0]
    domain, other = _over(out.shape, n)
    row, column = axes(2)
    low = call("minimum", index_value(row), index_value(other))
    high = call("maximum", index_value(row), index_value(other))
    # The row with itself is no pair; it is left out, wherever its place may point.
    apart = call("ne", index_value(row), index_value(other))
    place = call("sub", call("add", _begin_of_row(low, index_value(n)), call("sub", high, low)), const(1, DType.INT64))
    difference = call("sub", ctx.at(x, (row, column)), ctx.at(x, (other, column)))
    slope = _slope(difference, ctx.at(grad, (place,)), ctx.at(distance, (place,)), p)
    value = select(apart, slope, const(0, slope.dtype)) if n != integer(1) else const(0, slope.dtype)
    (total,) = ctx.reduce(SUM, domain, (value,), x.device)
    return ctx.compute(ctx.at(total, (row, column)))


@converter("aten.embedding_renorm.default")
def embedding_renorm(ctx: ImportContext, weight: Tensor, indices: Tensor, max_norm: float, p: float) -> Tensor:
    """The rows that ``indices`` name, made shorter where their norm is greater than ``max_norm``.

    A row that is named twice is written twice, each time what has been made of it as it was: a table is not read but
    for those rows.
    """
    kind, (rows, width), over = weight.dtype.compute, weight.shape, axes(indices.rank)
    row = bounded(ctx.at(indices, over), 0, rows)
    domain, r = _over(indices.shape, width)
    (total,) = ctx.reduce(MAX if p == math.inf else SUM, domain, (_term(ctx.at(weight, (row, r)), p),), weight.device)
    norm = convert(convert(_finished(ctx.at(total, over), p), weight.dtype), kind)
    # The term is eager's, which divides by no zero.
    factor = call("div", const(max_norm, kind), call("add", norm, const(1e-7, kind)))
    longer = Select(call("gt", norm, const(max_norm, kind)), factor, const(1, kind))
    scale = ctx.temporary(longer, total.type, "factor", kind)
    value = call("mul", ctx.at(weight, (row, axes(indices.rank + 1)[-1])), ctx.at(scale, over))
    shorter = ctx.temporary(value, ctx.contiguous((*indices.shape, width), weight.dtype, weight.device), "shorter")
    *at, column = source_axes(indices.rank + 1)
    places = (cast(ctx.at(indices, at), DType.INT64), column)
    source = Source(shorter.shape, places, ctx.at(shorter, (*at, column), weight.dtype))
    return scatter(ctx, None, ctx.at(weight, axes(2), weight.dtype), source)
