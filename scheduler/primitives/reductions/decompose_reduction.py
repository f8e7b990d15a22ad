"""decompose_reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, cast, symbol
from ....ir.nest.loops import AxisKind, Block, Bound, Loop, LoopNest, Node, Statement, Store, Update
from ...error import ScheduleError
from ..analysis.dependence import carried, mixed
from ..analysis.empty import Guards, inlined, occupied, zero
from ..analysis.left_out import LeftOut, is_told_alone, left_out
from ..analysis.tree import blocks_under, find_block, find_loop, fresh, replace_node


def decompose_reduction(nest: LoopNest, block: str, loop: str, skip: bool = False) -> tuple[LoopNest, list[str]]:
    """Begin a reduction by a block of its own, ahead of a loop; returns the name of that block.

    Rewrites::

        for i in range(n):                    for i in range(n):
            for k in range(m):          ->        C[i] = 0
                C[i] += A[i, k]                   for k in range(m):
                                                      C[i] += A[i, k]      # begins=False

    The block that begins stores the identity of the reduction, under copies of the loop's spatial loops, their kinds
    included. The update goes on from what it finds, and from then on cannot be computed in another place.

    With ``skip`` an iteration of the loop is left out where what it would add proves to be zero by comparisons of
    positions (a causal mask, a window), with those blocks in the loop whose results nothing else reads. A factor zero
    makes a product zero: what it multiplies is taken to be finite there. An exponential of minus infinity is zero too,
    unless what was subtracted is infinite or no number, as in a row that sees nothing. Where that is known before the
    loop, the sum begins with what left-out iterations would have added, zero or NaN, which a block ``C_left_out`` sums
    ahead of the one that begins. Choices that are the same in all iterations that are left are made.

    Requires: every loop that carries the reduction is the given one or inside it; no loop carries the reduction and
    another axis at once, nor do bounds; each loop from the given one on carries an axis of the block. With ``skip``:
    one update by a sum.
    Raises: ScheduleError.    Source: TVM ``Schedule.decompose_reduction``.
    """
    asked = f"decompose_reduction({block}, {loop})"
    node, around = find_block(nest, block, asked)
    target, _ = find_loop(nest, loop, asked)
    if not node.is_reduction:
        raise ScheduleError(asked, "it is no reduction", nest, block)
    if not any(lp is target for lp in around):
        raise ScheduleError(asked, f"{loop} is no loop around it", nest, loop)
    if not all(isinstance(s, Update) and s.begins for s in node.body):
        raise ScheduleError(asked, "it does not begin by itself any more", nest, block)
    at = next(k for k, lp in enumerate(around) if lp is target)
    over = carried(node)
    outside = [lp for lp in around[:at] if lp.var in over]
    if outside:
        name = outside[0].var.name
        raise ScheduleError(asked, f"the loop {name}, outside of {loop}, carries the reduction", nest, name)
    if mixed(node):
        name = min(v.name for v in mixed(node))
        raise ScheduleError(asked, f"{name} carries the reduction and another axis at once", nest, name)
    used = {s for b in node.bindings for s in b.free_symbols}
    idle = [lp for lp in around[at:] if lp.var not in used and lp.extent != 1]
    if idle:
        raise ScheduleError(asked, f"each iteration of {idle[0].var} begins it anew", nest, idle[0].var.name)
    guards, rest = _guards(nest, node, around[: at + 1], around[at + 1 :], asked) if skip else (Guards(()), None)
    begin = _begin(nest, node, [lp for lp in around[at:] if lp.var not in over], over, rest, asked)
    updates = tuple(replace(s, begins=False) for s in node.body if isinstance(s, Update))
    going_on = guards.assured(replace(node, body=updates, predicate=(*guards.bounds, *node.predicate)))
    changed = replace_node((target,), node, lambda _: (going_on,))
    first = (begin,) if rest is None else (rest.node, begin)
    made = () if rest is None else (rest.buffer,)
    body = replace_node(nest.body, target, lambda _: (*first, *changed))
    result = guards.applied(replace(nest, body=body, locals=(*nest.locals, *made)), loop, [block])
    return result, [b.name for n in reversed(first) for b in blocks_under(n)]


def _guards(
    nest: LoopNest, block: Block, outer: Sequence[Loop], inner: Sequence[Loop], asked: str
) -> tuple[Guards, LeftOut | None]:
    """What holds of the loops in iterations that may add something else than zero, and what the others would add."""
    (update,) = block.body if len(block.body) == 1 else (None,)
    if not isinstance(update, Update) or update.monoid is not SUM:
        raise ScheduleError(asked, "what is left out has to add nothing, but it is not one sum", nest, block.name)
    found: dict[Bound, frozenset[Expr]] = {}
    for fact, rest in zero(inlined(nest, update.values[0])).items():
        if not is_told_alone(nest, block, rest, outer, inner):
            continue
        for bound in occupied(nest, block, (fact,), {lp.var: lp.extent for lp in outer}).bounds:
            found[bound] = min(found.get(bound, rest), rest, key=len)
    return Guards(tuple(found)), left_out(nest, block, found, outer, inner)


def _begin(
    nest: LoopNest,
    block: Block,
    spatial: Sequence[Loop],
    over: set[sympy.Symbol],
    rest: LeftOut | None,
    asked: str,
) -> Node:
    """The block that stores the identities, or the ``rest`` in their place, in loops of its own."""
    names = {b.name for n in nest.body for b in blocks_under(n)}
    name = f"{block.name}_init"
    while name in names:
        name += "_init"
    taken: set[str] = set()
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    loops: list[Loop] = []
    for lp in spatial:
        var = symbol(fresh(nest, f"{lp.var.name}_init", taken))
        taken.add(var.name)
        renamed[lp.var] = var
        loops.append(replace(lp, var=var))
    predicate: list[Bound] = []
    for bound in block.predicate:
        speaks = bound.lhs.free_symbols | bound.rhs.free_symbols
        if not speaks & over:
            predicate.append(Bound(bound.lhs.xreplace(renamed), bound.rhs.xreplace(renamed)))
        elif speaks & renamed.keys():
            raise ScheduleError(asked, f"its bound {bound.lhs} < {bound.rhs} is over both", nest, block.name)
    stores: list[Statement] = []
    for s in block.body:
        assert isinstance(s, Update)
        identity: Sequence[Expr] = s.monoid.identity(tuple(v.dtype for v in s.values))
        if rest is not None:
            identity = [cast(rest.load, e.dtype) for e in identity]
        stores += [Store(t.buffer, t.indices, e) for t, e in zip(s.targets, identity, strict=True)]
    axes = [(a, b) for a, b in zip(block.axes, block.bindings, strict=True) if a.kind is AxisKind.SPATIAL]
    axes += [(a, b) for a, b in (rest.axes if rest is not None else ()) if all(a.var != own.var for own, _ in axes)]
    bindings = tuple(b.xreplace(renamed) for _, b in axes)
    node: Node = Block(name, tuple(a for a, _ in axes), bindings, tuple(stores), tuple(predicate))
    for lp in reversed(loops):
        node = replace(lp, body=(node,))
    return node
