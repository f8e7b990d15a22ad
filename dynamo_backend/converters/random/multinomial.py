"""Draws of categories by their weights, each with the numbers of its own place in a stream.

One draw is the category of the greatest weight over an exponential number, a race that each wins as often as its weight
is of the sum; several without replacement are the first that arrive (Efraimidis and Spirakis 2006). Draws with
replacement are looked for in the running sum. What eager asks of weights is asserted, by its own words.
"""

from __future__ import annotations

from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ALL, ARGMAX, SUM
from ....ir.expr.value import Expr, Select, call, const
from ....ir.graph.graph import Library, Ref
from ....ir.target import raises_errors
from ..context import ImportContext, ReductionSpace, Tensor
from ..index.search import count_before
from ..registry import NoConversion, converter
from ..scan.scans import scan, state_type
from ..terms import axes, index_value
from .rand import own_generator, uniform

_PLACE = DType.INT64
# So many draws without replacement are as many visits of a row.
MOST_PASSES = 16


@converter("aten.multinomial.default")
def multinomial(
    ctx: ImportContext, weights: Tensor, count: Any, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    own_generator(generator)
    if ctx.fallback_random:
        raise NoConversion("random numbers of eager (fallback_random)")
    if not raises_errors(weights.device):  # where eager waits for an answer and raises
        raise NoConversion("draws from weights that eager looks at before")
    count = sympy.sympify(count)
    if not count.is_Integer or count == 0 or ctx.least(weights.type.numel) < 1:
        raise NoConversion("draws of an unknown number, or from what may have no element")
    if not replacement and ctx.least(weights.shape[-1]) < count:
        raise NoConversion("more draws without replacement than there may be categories, which is an error")
    kind = weights.dtype.compute
    if count > MOST_PASSES and not replacement:
        raise NoConversion("many draws without replacement: those of a sort")
    _check(ctx, weights)
    if count != 1 and replacement:
        return ctx.compute(_sought(ctx, weights))
    race = ctx.contiguous(weights.shape, kind, weights.device)
    # In (0, 1]; an exponential number of zero would let a weight of zero arrive.
    drawn = call("sub", const(1.0, kind), uniform(ctx, race))
    wait = call("maximum", call("neg", call("log", drawn)), const(2.0**-25, kind))
    speeds = ctx.temporary(call("div", ctx.at(weights, axes(weights.rank), kind), wait), race, "speeds")
    return _fastest(ctx, speeds, int(count))


def _fastest(ctx: ImportContext, speeds: Tensor, count: int) -> Tensor:
    """The categories of so many greatest speeds, in order; of equals the first. Each is found by a visit of the row
    that leaves out those that were found before."""
    domain, out = ctx.domain(speeds.shape, (speeds.rank - 1,)), ctx.type()
    if not domain.axes:
        return ctx.compute(const(0, _PLACE))
    *row, turn = axes(len(out.shape))
    speed, place = ctx.at(speeds, domain.indices), index_value(domain.indices[-1])
    (lowest_speed, _) = ARGMAX.identity((speed.dtype, _PLACE))
    lifted: Expr = speed
    chosen: Expr | None = None
    for k in range(count):
        best, at = ctx.reduce(ARGMAX, domain, (lifted, place), speeds.device)
        found = ctx.at(at, row)
        chosen = found if chosen is None else Select(call("eq", index_value(turn), index_value(k)), found, chosen)
        last, there = ctx.at(best, domain.kept_axes), ctx.at(at, domain.kept_axes)
        equal = call("logical_and", call("eq", speed, last), call("gt", place, there))
        lifted = Select(call("logical_or", call("lt", speed, last), equal), speed, lowest_speed)
    assert chosen is not None
    return ctx.compute(chosen)


def _check(ctx: ImportContext, weights: Tensor) -> None:
    """Raise what eager raises of weights from which it does not draw."""
    domain = ctx.domain(weights.shape, (weights.rank - 1,))
    value = ctx.at(weights, domain.indices)
    (total,) = ctx.reduce(SUM, domain, (value,), weights.device, "total")
    whole = ctx.domain(weights.shape, range(weights.rank))
    value, none = ctx.at(weights, whole.indices), const(0, weights.dtype.compute)
    usual = call("logical_and", call("ge", value, none), call("lt", value, const(float("inf"), value.dtype)))
    _assert(ctx, whole, usual, "probability tensor contains either `inf`, `nan` or element < 0")
    rows = ctx.domain(total.shape, range(total.rank))
    some = call("gt", ctx.at(total, rows.indices), none)
    _assert(ctx, rows, some, "invalid multinomial distribution (sum of probabilities <= 0)")


def _assert(ctx: ImportContext, domain: ReductionSpace, holds: Expr, message: str) -> None:
    (all_hold,) = ctx.reduce(ALL, domain, (holds,), ctx.type().device, "holds")
    name = ctx.fresh("assert")
    ctx.nodes.append(
        Library(
            (name,), (None,), "aten::_assert_async.msg", (Ref(all_hold.name), message), (),
            "what eager asks of weights", ctx.origins,
        )
    )  # fmt: skip


def _sought(ctx: ImportContext, weights: Tensor) -> Expr:
    """Where the running sum of the weights passes a number below the whole, which a weight of zero never does."""
    at, out = axes(weights.rank), ctx.type()
    state = state_type(weights.dtype, weights.device)
    running = ctx.contiguous(weights.shape, state, weights.device)
    (summed,) = scan(ctx, SUM, (ctx.at(weights, at, state),), running, weights.rank - 1)
    sums = ctx.temporary(summed, running, "running")
    row, last = at[:-1], weights.shape[-1] - 1

    def element(place: Expr) -> Expr:
        return ctx.at(sums, (*row, place), state)

    whole = ctx.at(sums, (*row, last), state)
    spots = ctx.contiguous(out.shape, state, out.device)
    mark = ctx.temporary(call("mul", uniform(ctx, spots), whole), spots, "mark")
    found = count_before(ctx, weights.shape[-1], ctx.at(mark, at), element, right=True)
    # A mark that is rounded up to the whole is in the last category that has a weight.
    final = count_before(ctx, weights.shape[-1], whole, element, right=False)
    return call("minimum", found, final)
