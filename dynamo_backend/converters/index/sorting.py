"""Rows in order without a library, of any length.

Short runs are ranked by comparing all with all (``ranks``), and neighbours are merged: how many elements of the other
run come before one is found by a binary search, so that every element of a pass has its place by itself. Of the
greatest few of a row, only those of each run go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, Index, Select, call, cast, const, symbol
from ..context import ImportContext, ReductionSpace, Tensor
from ..terms import axes, index_value
from .scatter import Source, scattered, source_axes

# Elements of a run that is ranked, and the most of each run that are worth a pass that leaves the others behind.
RUN, FEW = 512, 128
_COUNT, _PLACE = DType.INT32, DType.INT64


def before(a: Expr, b: Expr, descending: bool) -> Expr:
    """Whether ``a`` has to stand before ``b``, and not only may. NaN is greater than all numbers."""
    low, high = (b, a) if descending else (a, b)
    less = call("lt", low, high)
    if not a.dtype.is_float:
        return less
    unlike = call("logical_and", call("isnan", high), call("logical_not", call("isnan", low)))
    return call("logical_or", less, unlike)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows along the last dimension: their ``keys``, and the place in the row as it was given of each (None: there)."""

    keys: Tensor
    order: Tensor | None
    descending: bool

    @classmethod
    def of(cls, ctx: ImportContext, x: Tensor, dim: int, descending: bool) -> SortedRows:
        """The rows of ``x`` along a dimension, copied so that they lie one after the other."""
        kept = [n for d, n in enumerate(x.shape) if d != dim]
        kind = DType.INT32 if x.dtype is DType.BOOL else x.dtype.compute
        like = ctx.contiguous((*kept, x.shape[dim]), kind, x.device)
        *at, place = axes(x.rank)
        value = ctx.at(x, (*at[:dim], place, *at[dim:]), kind)
        return cls(ctx.temporary(value, like, "rows"), None, descending)

    @property
    def length(self) -> sympy.Expr:
        return self.keys.shape[-1]

    def key(self, ctx: ImportContext, at: tuple[Index, ...]) -> Expr:
        return ctx.at(self.keys, at)

    def moved(self, ctx: ImportContext, place: Tensor) -> SortedRows:
        """Each element at its ``place``."""
        over = source_axes(self.keys.rank)
        there = (*over[:-1], cast(ctx.at(place, over), _PLACE))
        places = index_value(over[-1]) if self.order is None else ctx.at(self.order, over)
        wanted = replace(self.keys.type, dtype=_PLACE)
        sources = ((ctx.at(self.keys, over, self.keys.dtype), self.keys.type, "keys"), (places, wanted, "order"))
        made = []
        for value, kind, suffix in sources:
            found = scattered(ctx, None, const(0, value.dtype), Source(self.keys.shape, there, value), kind, suffix)
            made.append(Tensor(found.buffer, kind))
        return SortedRows(made[0], made[1], self.descending)

    def chosen(self, ctx: ImportContext, length: sympy.Expr, place: Callable[[sympy.Symbol], sympy.Expr]) -> SortedRows:
        """As many elements of each row, those at ``place`` of theirs."""
        assert self.order is not None
        *lead, at = axes(self.keys.rank)
        made = []
        for x in (self.keys, self.order):
            kind = ctx.contiguous((*x.shape[:-1], length), x.dtype, x.device)
            value = ctx.at(x, (*lead, place(at)), x.dtype)
            made.append(ctx.temporary(value, kind, "chosen"))
        return SortedRows(made[0], made[1], self.descending)


def in_order(ctx: ImportContext, rows: SortedRows) -> SortedRows:
    """Each row in order; those that are equal stay as they stand."""
    length = rows.length
    if length.is_Integer and length <= 1:
        order = ctx.temporary(const(0, _PLACE), replace(rows.keys.type, dtype=_PLACE), "order")
        return replace(rows, order=order) if rows.order is None else rows
    run = length if not length.is_Integer or length <= RUN else sympy.Integer(RUN)
    rows = rows.moved(ctx, _ranked(ctx, rows, run))
    while run.is_Integer and length.is_Integer and run < length:
        rows = rows.moved(ctx, _merged(ctx, rows, int(run)))
        run *= 2
    return rows


def first_in_order(ctx: ImportContext, rows: SortedRows, count: int) -> SortedRows:
    """The first ``count`` of each row in order, in order."""
    length = rows.length
    while length.is_Integer and length > RUN and count <= FEW:
        rows = rows.moved(ctx, _ranked(ctx, rows, sympy.Integer(RUN)))
        whole, rest = divmod(int(length), RUN)
        length = sympy.Integer(whole * count + min(rest, count))
        rows = rows.chosen(ctx, length, partial(_first_of_run, count=count))
    found = in_order(ctx, rows)
    return found.chosen(ctx, sympy.Integer(count), lambda at: at)


def _first_of_run(at: sympy.Symbol, count: int) -> sympy.Expr:
    """Where the elements stand of which each run has the first ``count``."""
    if count == 1:
        return at * RUN
    by = sympy.Integer(count)
    return FloorDiv(at, by) * RUN + ModularIndexing(at, sympy.S.One, by)


def _ranked(ctx: ImportContext, rows: SortedRows, run: sympy.Expr) -> Tensor:
    """The place of each element where those of each run are brought in order."""
    shape, at = rows.keys.shape, axes(rows.keys.rank)
    r, place, length = symbol("r0"), at[-1], rows.length
    whole = run == length
    first = sympy.S.Zero if whole else FloorDiv(place, run) * run
    other = first + r
    mine, there = rows.key(ctx, at), rows.key(ctx, (*at[:-1], other))
    sooner = call("lt", index_value(other, _COUNT), index_value(place, _COUNT))
    not_after = call("logical_not", before(mine, there, rows.descending))
    counts = Select(sooner, not_after, before(there, mine, rows.descending))
    if not whole and length % run != 0:
        inside = call("lt", index_value(other), index_value(length))
        counts = Select(inside, counts, const(False, DType.BOOL))
    domain = ReductionSpace((*at, r), shape, (r,), (run,))
    (rank,) = ctx.reduce(SUM, domain, (cast(counts, _COUNT),), rows.keys.device, "rank")
    value = ctx.at(rank, at)
    if not whole:
        value = call("add", value, index_value(first, _COUNT))
    return ctx.temporary(value, rank.type, "place")


def _merged(ctx: ImportContext, rows: SortedRows, run: int) -> Tensor:
    """The place of each element where each run of so many, in order, is merged with its neighbour."""
    at, length = axes(rows.keys.rank), int(rows.length)
    *lead, place = at
    which = FloorDiv(place, sympy.Integer(run))
    is_left = call("eq", index_value(ModularIndexing(place, sympy.Integer(run), sympy.Integer(2))), const(0, _PLACE))
    pair = FloorDiv(place, sympy.Integer(2 * run)) * 2 * run
    other = Select(is_left, index_value(pair + run), index_value(pair))
    # Of a run without a neighbour none are before.
    rest = call("sub", const(length, _PLACE), other)
    size = call("maximum", call("minimum", rest, const(run, _PLACE)), const(0, _PLACE))
    mine = rows.key(ctx, at)
    kind = replace(rows.keys.type, dtype=_PLACE)
    found: Expr = const(0, _PLACE)
    for k in range(run.bit_length() - 1, -1, -1):
        further = call("add", found, const(1 << k, _PLACE))
        seen_at = call("sub", call("add", other, further), const(1, _PLACE))
        # Clamped and not guarded: a guard would have each step computed once more for the elements that pass it.
        seen = rows.key(ctx, (*lead, call("minimum", seen_at, const(length - 1, _PLACE))))
        sooner = Select(is_left, before(seen, mine, rows.descending),
                        call("logical_not", before(mine, seen, rows.descending)))  # fmt: skip
        counts = call("logical_and", call("le", further, size), sooner)
        step = call("add", found, call("mul", cast(counts, _PLACE), const(1 << k, _PLACE)))
        found = ctx.at(ctx.temporary(step, kind, f"before{k}"), at)
    own = index_value(pair + place - which * run)
    return ctx.temporary(call("add", own, found), kind, "place")
