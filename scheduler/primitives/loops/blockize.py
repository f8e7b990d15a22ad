"""blockize."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....ir.nest.hints import UNIT
from ....ir.nest.loops import Block, Loop, LoopNest, Node, walk_nodes
from ...error import ScheduleError
from ..analysis.region import axis_regions
from ..analysis.tree import blocks_under, find_block, find_loop, with_annotation


def blockize(nest: LoopNest, loop: str) -> LoopNest:
    """Make a loop with all that is in it one unit, which later primitives move as a whole and do not enter.

    Rewrites::

        for i in range(16):                       for i in range(16):  # unit=True
            for j in range(16):             ->        for j in range(16):
                C[io * 16 + i, j] = A[j, i]               C[io * 16 + i, j] = A[j, i]

    The loops around a unit may still be split, fused, reordered and bound. A primitive that would change a loop inside,
    a block's statements, or which blocks are there is refused. Hints may be attached, and ``tensorize`` gives the
    unit's contraction to an instruction.

    Requires: each block inside covers a dense tile of its axes, the same from iteration to iteration of the loops
    outside; the loop is in no unit and has none inside.
    Raises: ScheduleError.    Source: TVM ``Schedule.blockize``.
    """
    asked = f"blockize({loop})"
    node, outer = find_loop(nest, loop, asked)
    for lp in (*outer, *(n for n, _ in walk_nodes((node,)) if isinstance(n, Loop))):
        if is_unit(lp):
            where = "it is one already" if lp is node else f"the loop {lp.var} is a unit"
            raise ScheduleError(asked, f"{where}, and units do not nest", nest, lp.var.name)
    fixed = {lp.var for lp in outer}
    for block in blocks_under(node):
        inner = {lp.var: lp.extent for lp in find_block(nest, block.name, asked)[1] if lp.var not in fixed}
        for axis, region in axis_regions(block, fixed, inner).items():
            if not region.is_dense:
                raise ScheduleError(
                    asked, f"{block.name} does not cover a dense tile of its axis {axis}", nest, block.name,
                    "let the inner loops of a split stand inside, and the outer ones outside",
                )  # fmt: skip
    return with_annotation(nest, node, UNIT.name, True)


def is_unit(loop: Loop) -> bool:
    """Whether a loop and all that is in it is one unit."""
    return UNIT.of(loop)


def check_units(before: LoopNest, after: LoopNest, asked: object) -> None:
    """Refuse what changed a unit inside: its loops, its blocks or their statements. Raises ScheduleError."""
    units = list(_units(before.body))
    if not units:
        return
    now = {n.var: n for n, _ in walk_nodes(after.body) if isinstance(n, Loop)}
    for unit in units:
        new = now.get(unit.var)
        if new is None or not is_unit(new) or not _alike(unit, new):
            raise ScheduleError(
                str(asked), f"it would change what is inside the unit {unit.var}", before, unit.var.name,
                "do it before blockize",
            )  # fmt: skip


def _units(body: tuple[Node, ...]) -> Iterator[Loop]:
    return (n for n, _ in walk_nodes(body) if isinstance(n, Loop) and is_unit(n))


def _alike(a: Node, b: Node) -> bool:
    """Whether two trees differ at most in hints, and in how the loops outside bind the axes."""
    if a is b:
        return True
    match a, b:
        case Loop(), Loop():
            plain = replace(a, body=(), annotations=()) == replace(b, body=(), annotations=())
            return plain and len(a.body) == len(b.body) and all(map(_alike, a.body, b.body))
        case Block(), Block():
            return (a.name, a.axes, a.body) == (b.name, b.axes, b.body)
    return False
