"""Iterations of a loop in which comparisons of positions are decided for all lanes: they run in a loop of their own.

A causal mask or a window crosses few of the tiles that limits leave, and a tail the last alone. In all others the mask
would be compared and chosen by for nothing, element by element. Source: Dao 2023 (FlashAttention-2), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from ....ir.expr.value import Call, Expr, Select, walk
from ....ir.nest.loops import Block, Loop, Update, walk_nodes
from ..program import BlockInfo
from ..values import Values
from .limits import Limits, least_of, limit_of


@dataclass(frozen=True, slots=True)
class FullTiles:
    """Between which iterations no comparison is left to make: ``facts`` are expressions above zero there."""

    limits: Limits
    facts: tuple[sympy.Expr, ...]


def full_tiles(values: Values, loop: Loop, known: Limits) -> FullTiles | None:
    """The full tiles of a loop whose own limits are ``known``; None where nothing would be gained."""
    program = values.program
    var = program.loops[loop.var]
    nodes = [n for n, _ in walk_nodes(loop.body)]
    inside = {program.loops[n.var] for n in nodes if isinstance(n, Loop)}
    varying = inside | program.tile.keys()
    infos = [program.infos[n.name] for n in nodes if isinstance(n, Block)]
    found: dict[sympy.Expr, Limits] = {}
    for room, wanted in dict.fromkeys(_comparisons(values, infos)):
        if var not in room.free_symbols or not room.free_symbols & program.tile.keys():
            continue
        holds, fails = least_of(program, room), least_of(program, 1 - room)
        ends = [limit_of((sympy.S.Zero, f), var, varying) if f is not None else None for f in (holds, fails)]
        yes, no = (end is not None and not _is_left_out(end, known) for end in ends)
        if wanted is None:  # of the two ways, the one that limits leave
            wanted = True if yes and not no else False if no and not yes else None
        fact, end = (holds, ends[0]) if wanted else (fails, ends[1])
        if wanted is not None and fact is not None and end is not None:
            found[fact] = end
    if not found:
        return None
    low = tuple(dict.fromkeys(e for end in found.values() for e in end.low))
    high = tuple(dict.fromkeys(e for end in found.values() for e in end.high))
    return FullTiles(Limits(low, high), tuple(found))


def _comparisons(values: Values, infos: list[BlockInfo]) -> Iterator[tuple[sympy.Expr, bool | None]]:
    """What is above zero where a comparison holds, and which way is wanted: bounds are to hold."""
    for info in infos:
        for part in (info, *info.operands):
            for lhs, rhs in part.bounds:
                yield sympy.expand(rhs - lhs), True
        for statement in info.block.body:
            for value in statement.values if isinstance(statement, Update) else (statement.value,):
                for e in walk(value):
                    if isinstance(e, Select):
                        for room in _compared(values, info, e.condition):
                            yield room, None


def _compared(values: Values, info: BlockInfo, condition: Expr) -> Iterator[sympy.Expr]:
    for e in walk(condition):
        if isinstance(e, Call) and (conjunct := values.conjunct(e, info)) is not None:
            yield sympy.expand(conjunct[1] - conjunct[0])


def _is_left_out(end: Limits, known: Limits) -> bool:
    """Whether a loop between its own limits has no iteration in a part of it."""
    return any(sympy.expand(low - high) == 0 for low in end.low for high in known.high) or any(
        sympy.expand(high - low) == 0 for high in end.high for low in known.low
    )
