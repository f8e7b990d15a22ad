"""Rows of a few registers on CPUs, whose stages wait for one another: many rows a stage.

Stage after stage of one row is a chain of sums over lanes, roots and quotients, far longer than its instructions take,
and a core looks ahead over few of them. So each stage goes over a tile of rows before the next begins, and what is
made of a row alone is made of a row a lane.
"""

from __future__ import annotations

import sympy

from ....ir.nest.loops import LoopKind, LoopNest
from ....ir.target import Target
from ...cost.cpu_kernels import HEAVY_FLOPS, LEAST_IN_FLIGHT, SHORT_ROWS_TILES, SHORT_ROWS_TOGETHER
from ...schedule.schedule import Schedule
from ..analysis import analyse, reads_results
from .common import best_vector, cost, lane_bytes, merge_rows, vectorize_innermost


def is_short(nest: LoopNest, target: Target) -> bool:
    """Whether a nest has many rows of a few registers, light work, and reductions that wait for one another."""
    shape = analyse(nest)
    if not shape.rows or len(shape.inner) != 1 or any(b.is_scan or b.is_scatter for b in shape.blocks):
        return False
    ((along, extent),) = shape.inner
    if (
        not extent.is_Integer
        or int(extent) > LEAST_IN_FLIGHT * target.lanes(lane_bytes(nest))
        or best_vector(shape) != along
    ):
        return False
    if any(cost(b) >= HEAVY_FLOPS for b in shape.blocks if any(a.var == along for a in b.axes)):
        return False
    many = (
        nest.symbols.hint(shape.rows[-1][1]) >= SHORT_ROWS_TOGETHER
        and shape.row_count >= SHORT_ROWS_TILES * SHORT_ROWS_TOGETHER * target.cores
    )
    return many and reads_results(shape)


def rows_together(schedule: Schedule, target: Target, rows: int, count: int, unroll: int) -> None:
    """Stages over ``count`` rows at a time, in loops over rows that they share."""
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if len(loops) >= rows:
            schedule.split(loops[rows - 1], [None, count])
    merge_rows(schedule, rows)
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if len(loops) == rows + 1 and schedule.extent(loops[rows]) == sympy.Integer(count):
            if schedule.loop(loops[rows]).kind is LoopKind.SERIAL:
                schedule.vectorize(loops[rows])
    vectorize_innermost(schedule, target, max(unroll, LEAST_IN_FLIGHT), skip=rows + 1)
