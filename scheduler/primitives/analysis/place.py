"""Putting a block under other loops: the axes that those fix are bound anew, the others keep loops of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from ....ir.expr.index import simplify
from ....ir.expr.value import symbol
from ....ir.nest.loops import AxisKind, Block, Bound, Loop, LoopNest, Node
from ...error import ScheduleError
from .region import Region, below
from .tree import find_block, find_loop, fresh, replace_node


def move_block(
    nest: LoopNest,
    block: Block,
    loop: str,
    at: int,
    wanted: Mapping[sympy.Symbol, Region],
    partners: list[Block],
    asked: str,
    keep_unit_loops: bool = False,
) -> LoopNest:
    """The nest with ``block`` before the statement ``at`` of a loop's body.

    ``wanted`` says which part of an axis one iteration of the loop needs; an axis that is not in it, or wanted whole,
    keeps the loops that it had. ``partners`` are the blocks whose instances decide which are needed: where they are
    guarded by outer loops alone, so is this one.
    """
    node, outer = find_loop(nest, loop, asked)
    scope = {lp.var: lp.extent for lp in (*outer, node)}
    mine = find_block(nest, block.name, asked)[1]
    own = [lp for lp in mine if lp.var not in scope]
    fixed = _bound_anew(nest, block, own, wanted, asked)
    bindings = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    kept = {s for a in block.axes if a.var not in fixed for s in bindings[a.var].free_symbols}
    gone = {lp.var for lp in mine} - kept
    # Loop names of the block become free as far as no other block runs in its loops.
    body = replace_node(nest.body, block, lambda _: ())
    before = replace(nest, body=body)
    loops: list[tuple[sympy.Symbol, Loop]] = []  # the variable here, and the loop that it stands for
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    taken: set[str] = set()
    new: dict[sympy.Symbol, sympy.Expr] = {}

    def own_loop(axis: sympy.Symbol) -> None:
        region = fixed[axis]
        if region.is_point and not keep_unit_loops:
            new[axis] = region.start
            return
        var = symbol(fresh(before, f"{block.name}_{axis.name}", taken))
        taken.add(var.name)
        loops.append((var, Loop(var, region.extent, ())))
        scope[var] = region.extent
        new[axis] = simplify(sympy.expand(region.start + var), scope, nest.symbols)

    for lp in own:
        if lp.var in kept:
            var = symbol(fresh(before, lp.var.name, taken))
            taken.add(var.name)
            if var != lp.var:
                renamed[lp.var] = var
            loops.append((var, lp))
            scope[var] = lp.extent
        for axis in fixed:
            if axis not in new and lp.var in bindings[axis].free_symbols:
                own_loop(axis)
    for axis in fixed:
        if axis not in new:
            own_loop(axis)
    predicate = [Bound(b.lhs.xreplace(renamed), b.rhs) for b in block.predicate if not b.lhs.free_symbols & gone]
    guards = _guards(new, {lp.var for lp in (*outer, node)}, partners)
    predicate += [g for g in guards if g not in predicate]
    for axis in block.axes:
        if axis.var in fixed and not _in_range(nest, axis.extent, new[axis.var], scope, guards, partners):
            predicate.append(Bound(new[axis.var], axis.extent))
    moved: Node = replace(
        block,
        bindings=tuple(new[a.var] if a.var in new else bindings[a.var].xreplace(renamed) for a in block.axes),
        predicate=tuple(predicate),
    )
    for var, lp in reversed(loops):
        moved = replace(lp, var=var, body=(moved,))
    changed = replace(node, body=(*node.body[:at], moved, *node.body[at:]))
    return replace(before, body=replace_node(before.body, node, lambda _: (changed,)))


def _bound_anew(
    nest: LoopNest, block: Block, own: list[Loop], wanted: Mapping[sympy.Symbol, Region], asked: str
) -> dict[sympy.Symbol, Region]:
    """The axes that get new bindings: those wanted in part, and those that share a loop with one of them."""
    whole = {a.var: Region(sympy.S.Zero, a.extent, is_whole=True) for a in block.axes}
    fixed = {a.var: wanted[a.var] for a in block.axes if a.var in wanted and not wanted[a.var].is_whole}
    mine = {lp.var for lp in own}
    bindings = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    while True:
        lost = {s for a in fixed for s in bindings[a].free_symbols}
        more = [
            a for a in block.axes
            if a.var not in fixed and any(s in lost or s not in mine for s in _loops_in(bindings[a.var], nest))
        ]  # fmt: skip
        if not more:
            return {a.var: fixed[a.var] for a in block.axes if a.var in fixed}
        for a in more:
            if a.kind is not AxisKind.SPATIAL:
                raise ScheduleError(
                    asked, f"a loop of {block.name} carries its reduction and another axis", nest, block.name
                )
            fixed[a.var] = whole[a.var]


def _loops_in(binding: sympy.Expr, nest: LoopNest) -> set[sympy.Symbol]:
    return set(binding.free_symbols) - set(nest.symbols.symbols)


def _guards(new: Mapping[sympy.Symbol, sympy.Expr], outer: set[sympy.Symbol], partners: list[Block]) -> list[Bound]:
    """The bounds that all partners have in outer loops alone, of those that the new bindings speak of."""
    used = {s for e in new.values() for s in e.free_symbols} & outer
    first, *others = partners
    return [
        b for b in first.predicate
        if b.lhs.free_symbols & outer and not b.lhs.free_symbols - used and all(b in o.predicate for o in others)
    ]  # fmt: skip


def _in_range(
    nest: LoopNest,
    extent: sympy.Expr,
    binding: sympy.Expr,
    scope: Mapping[sympy.Symbol, sympy.Expr],
    guards: list[Bound],
    partners: list[Block],
) -> bool:
    """Whether a binding is proved to stay within an axis: by the loops, by a guard, or since a partner's axis does."""
    if below(binding, extent, scope, nest.symbols) or Bound(binding, extent) in guards:
        return True
    speaks = binding.free_symbols
    for p in partners:
        if all(b in guards for b in p.predicate if b.lhs.free_symbols & speaks):
            if any(e == binding and a.extent == extent for a, e in zip(p.axes, p.bindings, strict=True)):
                return True
    return False
