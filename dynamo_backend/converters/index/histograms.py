"""Histograms: how many elements, or what weight, lies in each of a few bins, of equal width or between given edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import MAX, MIN, SUM
from ....ir.expr.value import Expr, Select, call, cast, const, substitute_index
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..terms import all_of, axes, index_value, rounded
from .scatter import Source, scatter, scattered, source_axes
from .search import count_before

_PLACE = DType.INT64


@converter("aten.histc.default")
def histc(ctx: ImportContext, x: Tensor, bins: int = 100, min: Scalar = 0, max: Scalar = 0) -> Tensor:
    if isinstance(min, sympy.Expr) or isinstance(max, sympy.Expr) or min > max:
        raise NoConversion("a range that is symbolic, or none")
    if not (math.isfinite(min) and math.isfinite(max)):
        raise NoConversion("a range that is not finite, which is an error")
    if not x.dtype.is_float:
        raise NoConversion("a histogram of integers")
    kind = x.dtype.compute

    def held(value: Expr) -> Expr:
        """As eager has it, which computes half types in themselves."""
        return rounded(value, x.dtype)

    if min == max:
        low, high = (_held(ctx, x, held(e), n) for e, n in zip(_outer(ctx, x, None, None, 1.0), ("low", "high")))
    else:
        low, high = held(ctx.scalar(min, kind)), held(ctx.scalar(max, kind))
    value = ctx.at(x, source_axes(x.rank), kind)
    counted = call("logical_and", call("ge", value, low), call("le", value, high))
    place = held(call("mul", held(call("sub", value, low)), held(const(bins, kind))))
    place = held(call("div", place, held(call("sub", high, low))))
    place = cast(Select(counted, place, const(0, kind)), _PLACE)
    # The last bin holds its right edge too.
    place = call("minimum", place, const(int(bins) - 1, _PLACE))
    one = Select(counted, const(1, kind), const(0, kind))
    return scatter(ctx, SUM, const(0, kind), Source(x.shape, (place,), one))


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


@dataclass(frozen=True, slots=True)
class GivenBins:
    """The bins between edges that a row holds in ascending order; ``found`` has the place of each element."""

    ctx: ImportContext
    edges: Tensor
    found: Tensor

    @property
    def count(self) -> int:
        return int(self.edges.shape[0]) - 1

    def edge(self, k: Expr) -> Expr:
        """The edge at a position."""
        return self.ctx.at(self.edges, (k,))

    def place(self, value: Expr) -> tuple[Expr, Expr]:
        """As for bins of equal width."""
        first, last = self.edge(const(0, _PLACE)), self.edge(const(self.count, _PLACE))
        inside = call("logical_and", call("ge", value, first), call("le", value, last))
        place = self.ctx.at(self.found, source_axes(self.found.rank))
        return Select(inside, place, const(0, _PLACE)), inside

    @classmethod
    def between(cls, ctx: ImportContext, x: Tensor, edges: Tensor, column: int | None) -> GivenBins:
        """The bins of all elements of ``x``, or of those in a column."""
        if edges.rank != 1 or not edges.shape[0].is_Integer or edges.shape[0] < 2 or edges.dtype is not x.dtype:
            raise NoConversion("edges of no bin, or of a symbolic number")
        rows = x.shape if column is None else x.shape[:-1]
        kind = ctx.contiguous(rows, _PLACE, x.device)
        at = axes(len(rows))
        value = ctx.at(x, at if column is None else (*at, sympy.Integer(column)))
        passed = count_before(ctx, edges.shape[0], value, lambda k: ctx.at(edges, (k,)), right=True, out=kind)
        # Between the bins: what stands before the first edge has no bin, what is on the last one is in the last.
        place = call("maximum", call("sub", passed, const(1, _PLACE)), const(0, _PLACE))
        place = call("minimum", place, const(int(edges.shape[0]) - 2, _PLACE))
        return cls(ctx, edges, ctx.temporary(place, kind, "bin"))


def _held(ctx: ImportContext, x: Tensor, value: Expr, name: str) -> Expr:
    """A number as a tensor of its own, to be read for each element."""
    return ctx.at(ctx.temporary(value, ctx.contiguous((), x.dtype.compute, x.device), name), ())


def _outer(
    ctx: ImportContext, x: Tensor, column: int | None, given: Sequence[float] | None, beyond: float = 0.5
) -> tuple[Expr, Expr]:
    """The outer edges: those given, or the least and greatest element (of a column); farther by ``beyond`` where those
    are one. Infinities and NaN have no range, which is an error."""
    kind = x.dtype.compute
    if given:
        left, right = (float(v) for v in given)
        farther = beyond if left == right else 0.0
        return const(left - farther, kind), const(right + farther, kind)
    if x.type.numel == 0:
        return const(0 if beyond < 1 else -1, kind), const(1, kind)
    rows = x.shape if column is None else x.shape[:-1]
    domain = ctx.domain(rows, range(len(rows)))
    value = ctx.at(x, domain.indices if column is None else (*domain.indices, sympy.Integer(column)))
    low, high = (ctx.at(ctx.reduce(m, domain, (value,), x.device)[0], ()) for m in (MIN, MAX))
    finite = call("lt", call("maximum", call("abs", low), call("abs", high)), const(math.inf, kind))
    zero, one = const(0, _PLACE), const(1, _PLACE)
    # A place out of bounds is how a kernel tells its caller of data that are none.
    known = call("eq", call("check_bounds", Select(finite, zero, one), zero, one, zero), zero)
    apart = Select(call("logical_and", known, call("eq", low, high)), const(beyond, kind), const(0, kind))
    return call("sub", low, apart), call("add", high, apart)


def _bins(
    ctx: ImportContext, x: Tensor, counts: Sequence[int], given: Sequence[float] | None, columns: bool
) -> list[Bins]:
    """The bins of each column of ``x``, or those of all its elements."""
    if x.dtype not in (DType.FLOAT32, DType.FLOAT64):
        raise NoConversion("a histogram of other types than float32 and float64")
    found = []
    for k, count in enumerate(counts):
        edges = _outer(ctx, x, k if columns else None, given[2 * k : 2 * k + 2] if given else None)
        low, high = (_held(ctx, x, e, n) for e, n in zip(edges, ("low", "high"), strict=True))
        found.append(Bins(int(count), low, high))
    return found


def _edges(ctx: ImportContext, bins: Bins, k: int) -> Tensor:
    return ctx.compute(bins.edge(index_value(axes(1)[0])), ctx.type(k), ctx.name(k))


def _counted(
    ctx: ImportContext, x: Tensor, bins: Sequence[Bins | GivenBins], columns: bool, weight: Tensor | None, density: bool
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


@converter("aten.histogram.bins_tensor")
def histogram_between(
    ctx: ImportContext, x: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    with ctx.result_of(0):
        found = GivenBins.between(ctx, x, bins, None)
        counts = _counted(ctx, x, [found], False, weight, density)
    return counts, ctx.compute(ctx.at(bins, axes(1), bins.dtype), ctx.type(1), ctx.name(1))


@converter("aten._histogramdd_from_bin_tensors.default")
def histogramdd_between(
    ctx: ImportContext, x: Tensor, bins: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    _needs_rows(x)
    found = [GivenBins.between(ctx, x, b, k) for k, b in enumerate(bins)]
    return _counted(ctx, x, found, True, weight, density)


def _needs_rows(x: Tensor) -> None:
    if x.rank < 2:
        raise NoConversion("points of no rows")
