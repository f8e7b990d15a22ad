"""Limits of loops: a bound that everything in a loop has leaves iterations out at one of its ends.

A bound in the loop's variable and in what is the same for a whole program is a limit of the loop, and holds in each of
its iterations; blocks inside need no mask for it. So are tiles left out that a causal mask or a window proves empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.nest.loops import Block, Loop, LoopKind, walk_nodes
from ..program import BlockInfo, Conjunct, TritonProgram


@dataclass(frozen=True, slots=True)
class Limits:
    """Iterations that do anything: from every one of ``low`` on, before every one of ``high``."""

    low: tuple[sympy.Expr, ...] = ()
    high: tuple[sympy.Expr, ...] = ()


def take_limits(program: TritonProgram) -> dict[sympy.Symbol, Limits]:
    """The limits of the loops that have any; the bounds that they are leave the blocks inside."""
    found: dict[sympy.Symbol, Limits] = {}
    for node, _ in walk_nodes(program.nest.body):
        if not isinstance(node, Loop) or node.kind is not LoopKind.SERIAL or not program.loops[node.var].is_Symbol:
            continue
        nodes = [n for n, _ in walk_nodes(node.body)]
        inside = [n.name for n in nodes if isinstance(n, Block)]
        varying = {program.loops[n.var] for n in nodes if isinstance(n, Loop)} | program.tile.keys()
        first, *others = (program.infos[name].bounds for name in inside)
        limits = Limits()
        taken: list[Conjunct] = []
        for bound in first:
            if all(bound in bounds for bounds in others) and not program.ranges.below(*bound):
                end = limit_of(bound, program.loops[node.var], varying)
                if end is not None:
                    limits = Limits((*limits.low, *end.low), (*limits.high, *end.high))
                    taken.append(bound)
        if taken:
            found[node.var] = limits
            program.infos |= {name: _without(program.infos[name], taken) for name in inside}
    return found


def limit_of(bound: Conjunct, var: sympy.Expr, varying: set[sympy.Expr]) -> Limits | None:
    """The end of the loop that a bound is; None where it says more than where the loop begins or ends."""
    room = sympy.expand(bound[1] - bound[0])
    step = room.coeff(var)
    rest = sympy.expand(room - step * var)
    if not step.is_Integer or step == 0 or rest.free_symbols & ({var} | varying):
        return None
    if step < 0:  # rest > -step * var
        return Limits(high=(FloorDiv(rest - step - 1, -step),))
    return Limits(low=(FloorDiv(step - rest, step),))  # step * var > -rest


def verdict(program: TritonProgram, facts: Sequence[sympy.Expr], room: sympy.Expr) -> bool | None:
    """Whether ``room`` is above zero for all lanes, or for none, where all ``facts`` are; None where they do not
    tell."""
    for way, told in ((room, True), (1 - room, False)):
        least = least_of(program, way)
        if least is not None and any(sympy.expand(least - f).is_nonnegative for f in facts):
            return told
    return None


def least_of(program: TritonProgram, room: sympy.Expr) -> sympy.Expr | None:
    """The least that an integer expression is for any lane of a tile; None where it is not linear in them."""
    least = sympy.expand(room)
    for lane in sorted(least.free_symbols & program.tile.keys(), key=str):
        step = least.coeff(lane)
        if not step.is_Integer or lane in sympy.expand(least - step * lane).free_symbols:
            return None
        least = sympy.expand(least.xreplace({lane: sympy.Integer(0 if step > 0 else program.tile[lane][1] - 1)}))
    return least


def _without(info: BlockInfo, taken: Sequence[Conjunct]) -> BlockInfo:
    kept = tuple(b for b in info.bounds if b not in taken)
    return replace(info, bounds=kept, operands=tuple(_without(o, taken) for o in info.operands))
