"""Reductions along rows and across them in one visit, on CPUs: a team over pieces of the rows.

Each member of the team keeps sums of its own for all columns, in its first- or second-level cache, and adds each row
while it is in the first-level cache. What the pieces gave is combined at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

from ....ir.nest.loops import AxisKind, LoopNest
from ....ir.target import Target
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Capability, Params, Rule, Value
from .column import lanes_inside
from .common import inline_cheap, parallel_roots, unroll_values, vectorize_innermost

# Rows whose sums one accumulator takes: longer chains of additions err more than eager does.
PIECE = 512


def _matches(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    rows = {v for v, _ in shape.rows}
    over = [{a.var for a in b.axes if a.kind is AxisKind.REDUCTION} for b in shape.cross]
    return bool(over) and all(axes <= rows for axes in over)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    count = analyse(nest).row_count
    pieces = -(-count // PIECE)
    pieces = max(-(-pieces // target.cores) * target.cores, 1)
    return {**unroll_values(nest, target), "pieces": tuple(dict.fromkeys((pieces, target.cores, 2 * pieces)))}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    inline_cheap(schedule)
    over_rows = {b.name for b in shape.cross}
    pieces = int(params["pieces"])
    parts = [p for name in schedule.get_blocks() for p in _in_pieces(schedule, shape, name, over_rows, pieces)]
    # A piece, a row, the elements of a row; the combination of pieces, which stands between, goes behind.
    for level in range(3):
        for first, second in pairwise([p for p in parts if len(schedule.get_loops(p)) > level]):
            here, there = schedule.get_loops(first)[level], schedule.get_loops(second)[level]
            if here != there:
                with suppress(ScheduleError):
                    schedule.merge(here, there)
    for name in parts:
        vectorize_innermost(schedule, target, int(params["unroll"]), skip=2, only=name)
    for name in [b for b in schedule.get_blocks() if b in over_rows]:  # of a set the order differs between processes
        lanes_inside(schedule, [name], len(shape.inner), target, (int(params["unroll"]), 1))
    parallel_roots(schedule, target)


def _in_pieces(schedule: Schedule, shape: NestShape, name: str, over_rows: set[str], pieces: int) -> list[str]:
    """Cut the rows of a block into pieces; the block that is part of the visit of the rows, if any is."""
    loops = schedule.get_loops(name)[: len(shape.rows)]
    if name in over_rows and not schedule.block(name).is_reduction:
        return []
    row = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    piece, _ = schedule.split(row, [pieces, None])
    if name not in over_rows:
        return [name]
    partial = schedule.rfactor(piece)
    if schedule.get_loops(partial)[0] != piece:
        raise ScheduleError("cpu_cross_reduction", f"the pieces of {name} do not stand outermost", schedule.nest, name)
    return [partial]


CPU_CROSS_REDUCTION = Rule(
    "cpu_cross_reduction", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.SPLIT_ROWS})
)
