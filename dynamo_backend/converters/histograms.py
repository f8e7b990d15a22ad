"""Histograms: how many elements, or what weight, lies in each of a few bins of equal width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from ...ir.dtypes import DType
from ...ir.expr import Expr, Select, call, cast, const, substitute_index
from ...ir.monoid import MAX, MIN, SUM
from .context import ImportContext, Scalar, Tensor, all_of, axes, index_value
from .registry import NoConversion, converter
from .scatter import Source, scatter, scattered, source_axes

_PLACE = DType.INT64


@converter("aten.histc.default")
def histc(ctx: ImportContext, x: Tensor, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Tensor:
    if isinstance(min, sympy.Expr) or isinstance(max, sympy.Expr) or not min < max:
        raise NoConversion("a range that the data decide")
    if x.dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise NoConversion("a histogram of other types than float32 and float64")
    value = ctx.at(x, source_axes(x.rank))
    low, high = ctx.scalar(min, x.dtype), ctx.scalar(max, x.dtype)
    counted = call("logical_and", call("ge", value, low), call("le", value, high))
    place = call("mul", call("sub", value, low), const(bins, x.dtype))
    place = cast(call("div", place, call("sub", high, low)), _PLACE)
    # The last bin holds its right edge too.
    place = call("minimum", place, const(int(bins) - 1, _PLACE))
    place = Select(counted, place, const(0, _PLACE))
    one = Select(counted, const(1, x.dtype), const(0, x.dtype))
    return scatter(ctx, SUM, const(0, x.dtype), Source(x.shape, (place,), one))


@dataclass(frozen=True, slots=True)
class Bins:
    """``count`` bins of equal width from ``low`` to ``high``, values that do not vary."""

    count: int
    low: Expr
    high: Expr

    def edge(self, k: Expr) -> Expr:
        """The edge at a position, as ``linspace`` has it: counted from the nearer end."""
        kind = self.low.dtype
        step = call("div", call("sub", self.high, self.low), const(self.count, kind))
        left = call("add", self.low, call("mul", step, cast(k, kind)))
        back = cast(call("sub", const(self.count, _PLACE), k), kind)
        right = call("sub", self.high, call("mul", step, back))
        return Select(call("lt", k, const((self.count + 1) // 2, _PLACE)), left, right)

    def place(self, value: Expr) -> tuple[Expr, Expr]:
        """The bin of a value, and whether it has one. The last bin holds its right edge too."""
        kind, last = value.dtype, const(self.count - 1, _PLACE)
        inside = call("logical_and", call("ge", value, self.low), call("le", value, self.high))
        share = call("div", call("sub", value, self.low), call("sub", self.high, self.low))
        guess = cast(call("mul", Select(inside, share, const(0, kind)), const(self.count, kind)), _PLACE)
        guess = call("minimum", guess, last)
        # The guess is rounded: an edge beside it may say otherwise.
        below = call("logical_and", call("lt", value, self.edge(guess)), call("gt", guess, const(0, _PLACE)))
        above = call("ge", value, self.edge(call("add", guess, const(1, _PLACE))))
        above = call("logical_and", above, call("lt", guess, last))
        place = call("add", call("sub", guess, cast(below, _PLACE)), cast(above, _PLACE))
        return Select(inside, place, const(0, _PLACE)), inside


def _outer(ctx: ImportContext, x: Tensor, column: int | None, given: Sequence[float] | None) -> tuple[Expr, Expr]:
    """The outer edges: those given, or the least and greatest element (of a column), a half farther where those are
    one. Infinities and NaN have no range, which is an error."""
    kind = x.dtype
    if given:
        left, right = (float(v) for v in given)
        apart = 0.5 if left == right else 0.0
        return const(left - apart, kind), const(right + apart, kind)
    if x.type.numel == 0:
        return const(0, kind), const(1, kind)
    rows = x.shape if column is None else x.shape[:-1]
    domain = ctx.domain(rows, range(len(rows)))
    value = ctx.at(x, domain.indices if column is None else (*domain.indices, sympy.Integer(column)))
    low, high = (ctx.at(ctx.reduce(m, domain, (value,), x.device)[0], ()) for m in (MIN, MAX))
    finite = call("lt", call("maximum", call("abs", low), call("abs", high)), const(math.inf, kind))
    zero, one = const(0, _PLACE), const(1, _PLACE)
    # A place out of bounds is how a kernel tells its caller of data that are none.
    known = call("eq", call("check_bounds", Select(finite, zero, one), zero, one, zero), zero)
    half = Select(call("logical_and", known, call("eq", low, high)), const(0.5, kind), const(0, kind))
    return call("sub", low, half), call("add", high, half)


def _bins(
    ctx: ImportContext, x: Tensor, counts: Sequence[int], given: Sequence[float] | None, columns: bool
) -> list[Bins]:
    """The bins of each column of ``x``, or those of all its elements."""
    if x.dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise NoConversion("a histogram of other types than float32 and float64")
    single = ctx.contiguous((), x.dtype, x.device)
    found = []
    for k, count in enumerate(counts):
        edges = _outer(ctx, x, k if columns else None, given[2 * k : 2 * k + 2] if given else None)
        low, high = (ctx.at(ctx.temporary(e, single, n), ()) for e, n in zip(edges, ("low", "high"), strict=True))
        found.append(Bins(int(count), low, high))
    return found


def _edges(ctx: ImportContext, bins: Bins, k: int) -> Tensor:
    return ctx.compute(bins.edge(index_value(axes(1)[0])), ctx.type(k), ctx.name(k))


def _counted(
    ctx: ImportContext, x: Tensor, bins: Sequence[Bins], columns: bool, weight: Tensor | None, density: bool
) -> Tensor:
    """The current node's result: what lies in each bin, of each combination of those of the columns."""
    kind = x.dtype
    rows = x.shape[:-1] if columns else x.shape
    over = source_axes(len(rows))
    found = [b.place(ctx.at(x, (*over, sympy.Integer(k)) if columns else over)) for k, b in enumerate(bins)]
    one = const(1, kind) if weight is None else ctx.at(weight, over, kind)
    value = Select(all_of([inside for _, inside in found]), one, const(0, kind))
    source = Source(rows, tuple(place for place, _ in found), value)
    if not density:
        return scatter(ctx, SUM, const(0, kind), source)
    out = ctx.type()
    made = scattered(ctx, SUM, const(0, kind), source, out, "counts")
    domain = ctx.domain(out.shape, range(len(out.shape)))
    along = substitute_index(made, dict(zip(axes(len(bins)), domain.indices, strict=True)))
    (total,) = ctx.reduce(SUM, domain, (along,), x.device)
    share = call("div", made, ctx.at(total, ()))
    for at, b in zip(axes(len(bins)), bins, strict=True):
        width = call("sub", b.edge(index_value(at + 1)), b.edge(index_value(at)))
        share = call("div", share, width)
    return ctx.compute(share)


@converter("aten.histogram.bin_ct")
def histogram(
    ctx: ImportContext, x: Tensor, bins: int = 100, *, range: Sequence[float] | None = None,
    weight: Tensor | None = None, density: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found = _bins(ctx, x, [bins], range, columns=False)
    with ctx.result_of(0):
        counts = _counted(ctx, x, found, False, weight, density)
    return counts, _edges(ctx, found[0], 1)


@converter("aten._histogramdd_bin_edges.default")
def histogramdd_bin_edges(
    ctx: ImportContext, x: Tensor, bins: Sequence[int], *, range: Sequence[float] | None = None,
    weight: Tensor | None = None, density: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    _needs_rows(x)
    return tuple(_edges(ctx, b, k) for k, b in enumerate(_bins(ctx, x, bins, range, columns=True)))


@converter("aten._histogramdd_from_bin_cts.default")
def histogramdd(
    ctx: ImportContext, x: Tensor, bins: Sequence[int], *, range: Sequence[float] | None = None,
    weight: Tensor | None = None, density: bool = False,
) -> Tensor:  # fmt: skip
    _needs_rows(x)
    return _counted(ctx, x, _bins(ctx, x, bins, range, columns=True), True, weight, density)


def _needs_rows(x: Tensor) -> None:
    if x.rank < 2:
        raise NoConversion("points of no rows")
