"""In which iterations of a loop everything inside is known to hold: limits, tails and borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.index import expanded
from ....ir.nest.live import live_limits, place_of
from ....ir.nest.loops import Block, Bound, Loop, LoopKind, Node, walk_nodes
from ..text.builder import Val
from ..text.context import Context
from .access import load
from .guards import guards
from .index import in_loops, scalar_index, split_linear
from .joins import runs_within

I64 = DType.INT64
# Copies of a whole iteration whose last one is written out for each number of copies that may be left: with 4 these
# are as much code as one and a half.
MOST_CASES = 4


@dataclass(frozen=True, slots=True)
class Steady:
    """The iterations ``low <= var < high`` in which ``bounds`` hold, ``tail`` among them those that are predicates."""

    low: Val
    high: Val
    bounds: frozenset[Bound]
    tail: frozenset[Bound]


def blocks_inside(node: Node) -> tuple[Block, ...]:
    """The blocks of a tree, in order."""
    if isinstance(node, Block):
        return (node,)
    return tuple(n for n, _ in walk_nodes(node.body) if isinstance(n, Block))


def limited(ctx: Context, loop: Loop, low: Val, high: Val) -> tuple[Val, Val, frozenset[Bound]]:
    """The range in which a loop does anything, where bounds that everything inside has leave out one end of it.

    Outside that range a bound fails wherever the loops inside are. One in this loop and those around it alone is known
    to hold within it. Masks would do as well but for time, and but for what is read without one: memory of the kernel's
    own, which has room for the lanes of one iteration behind its elements and no more.
    """
    inside = blocks_inside(loop)
    common = [b for b in inside[0].predicate if b not in ctx.assumed and all(b in n.predicate for n in inside[1:])]
    loops = [n for n, _ in walk_nodes(loop.body) if isinstance(n, Loop)]
    used = []
    for bound in common:
        slack = expanded(bound.rhs - bound.lhs)
        best = _best(slack, loops)
        parts = split_linear(best, loop.var) if best is not None else None
        if parts is None or not parts[1].is_Integer or parts[1] == 0 or not parts[0].free_symbols <= ctx.indices.keys():
            continue
        step = int(parts[1])
        if step < 0:
            high = smin(ctx, high, iterations_above(ctx, parts[0], -step))
        else:  # from the first one with step * var > -rest
            low = smax(ctx, low, iterations_above(ctx, 1 - parts[0], step))
        if best == slack:
            used.append(bound)
    return *_live(ctx, loop, low, high), frozenset(used)


def _live(ctx: Context, loop: Loop, low: Val, high: Val) -> tuple[Val, Val]:
    """The range without the iterations that numbers in memory say are empty."""
    begins, ends = live_limits(ctx.nest, loop)
    for name in begins:
        low = smax(ctx, low, _number(ctx, name))
    for name in ends:
        high = smin(ctx, high, _number(ctx, name))
    return low, high


def _number(ctx: Context, name: str) -> Val:
    """The number in a local buffer of which the loops around say which element; at least 0."""
    at = place_of(ctx.nest, name)
    value = load(ctx, name, at, [None for _ in at])
    return ctx.b.intrinsic("smax", value, Val("0", I64))


def _best(slack: sympy.Expr, loops: Iterable[Loop]) -> sympy.Expr | None:
    """The greatest value of an expression over all iterations of some loops; None where it is not known."""
    for lp in loops:
        if lp.var in slack.free_symbols:
            rest = split_linear(slack, lp.var)
            if rest is None or not rest[1].is_Integer:
                return None
            slack = expanded(rest[0] + (rest[1] * (lp.extent - 1) if int(rest[1]) > 0 else 0))
    return slack


def steady(ctx: Context, loop: Loop, low: Val, high: Val, otherwise: bool = False) -> Steady:
    """The iterations that need no mask: not the last ones, which a tail cuts, nor those at a border of padding.

    With ``otherwise``, of iterations in which comparisons of the position no longer all hold, those in which they fail.
    """
    found: dict[Bound, tuple[sympy.Expr, int]] = {}
    tail = set()
    for node, outer in walk_nodes(loop.body):
        if not isinstance(node, Block):
            continue
        for bound in node.predicate:
            if bound in ctx.assumed or bound in found:
                continue
            slack = _slack(bound, loop, outer)
            if slack is not None and slack[1] < 0:
                found[bound] = slack
                tail.add(bound)
        for bound in guards(ctx, node, otherwise, partial(runs_within, ctx, node, outer)) if _is_long(loop) else ():
            if bound not in ctx.assumed and bound not in found and (slack := _slack(bound, loop, outer)) is not None:
                found[bound] = slack
    limit, start = high, low
    for worst, step in found.values():
        if step < 0:
            limit = smin(ctx, limit, iterations_above(ctx, worst, -step))
        else:
            start = smax(ctx, start, iterations_above(ctx, 1 - worst, step))
    if start != low:  # a chunk may lie wholly in a border
        start = smin(ctx, start, limit)
    return Steady(start, limit, frozenset(found), frozenset(tail))


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is ``left`` in the last iteration of a loop: a number below that of ``copies`` which the unrolled loops
    inside have in a whole one. The first so many of them do something."""

    left: sympy.Expr
    copies: int
    unrolled: frozenset[sympy.Symbol]


def remainder(loop: Loop, part: Steady) -> Remainder | None:
    """The remainder of a loop where everything inside stops at the same number of an unrolled loop's copies.

    None where the last iteration is not like that, or where its cases would be too much code.
    """
    if part.bounds != part.tail:
        return None
    found: set[tuple[sympy.Expr, int]] = set()
    unrolled: set[sympy.Symbol] = set()
    for node, inner in walk_nodes(loop.body):
        if isinstance(node, Loop):
            if node.kind is LoopKind.PARALLEL:
                return None
            continue
        tail = part.tail.intersection(node.predicate)
        if len(tail) != 1:
            return None
        (bound,) = tail
        slack = expanded(bound.rhs - bound.lhs)
        used = [lp for lp in inner if lp.var in slack.free_symbols]
        if len(used) != 1 or used[0].kind is not LoopKind.UNROLLED or not used[0].extent.is_Integer:
            return None
        rest = split_linear(slack, used[0].var)
        if rest is None or rest[1] != -1:
            return None
        found.add((rest[0], int(used[0].extent)))
        unrolled.add(used[0].var)
    if len(found) != 1:
        return None
    ((left, copies),) = found
    step = split_linear(left, loop.var)
    if step is None or step[1] != -copies or not 1 < copies <= MOST_CASES:
        return None
    return Remainder(left, copies, frozenset(unrolled))


def _is_long(loop: Loop) -> bool:
    # A few iterations are not worth three copies of what they do.
    return not loop.extent.is_Integer or int(loop.extent) > 3


def _slack(bound: Bound, loop: Loop, inner: tuple[Loop, ...]) -> tuple[sympy.Expr, int] | None:
    """``(worst, step)``: the bound holds where ``worst + step * var > 0``, whatever the loops inside are at."""
    parts = split_linear(expanded(bound.rhs - bound.lhs), loop.var)
    if parts is None or not parts[1].is_Integer or parts[1] == 0:
        return None
    worst = parts[0]
    for lp in inner:
        if lp.var not in worst.free_symbols:
            continue
        rest = split_linear(worst, lp.var)
        # A counting loop inside peels for itself, and leaves less to the masked part.
        if rest is None or lp.kind not in (LoopKind.VECTORIZED, LoopKind.UNROLLED) or not rest[1].is_Integer:
            return None
        worst = rest[0] + (rest[1] * (lp.extent - 1) if int(rest[1]) < 0 else 0)
    return expanded(worst), int(parts[1])


def iterations_above(ctx: Context, worst: sympy.Expr, step: int) -> Val:
    """How many iterations have ``worst - step * var > 0``: the quotient rounded up, at least 0."""
    if worst.is_Integer:
        return Val(str(max(-(-int(worst) // step), 0)), I64)
    value = ctx.b.intrinsic("smax", scalar_index(ctx, in_loops(ctx, worst)), Val("0", I64))
    if step == 1:
        return value
    return ctx.b.binary("udiv", ctx.b.binary("add nsw", value, Val(str(step - 1), I64)), Val(str(step), I64))


def smin(ctx: Context, x: Val, y: Val) -> Val:
    """The smaller of two int64."""
    if x.is_literal and y.is_literal:
        return x if int(x.name) <= int(y.name) else y
    return ctx.b.intrinsic("smin", x, y)


def smax(ctx: Context, x: Val, y: Val) -> Val:
    """The larger of two int64; the second is at least 0."""
    if x.is_literal and y.is_literal:
        return x if int(x.name) >= int(y.name) else y
    return y if x.name == "0" else ctx.b.intrinsic("smax", x, y)
