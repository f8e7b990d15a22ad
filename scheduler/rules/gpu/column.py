"""Column reductions on GPUs: a program for some columns, a loop over blocks of rows, partial results in registers.

A nest is one kernel, and programs do not combine results, so that few columns occupy few processors whatever the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from ....ir.nest.hints import NUM_WARPS
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.columns import SECTOR, columns_of
from ...cost.gpu_kernels import COLUMN_TILE
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from .common import (
    GPUS,
    clamp_power,
    column_like,
    cut,
    has_scan,
    inner_loops,
    narrowest_bytes,
    programs,
    read_ahead,
    row_depth,
    steps_of_reads,
    steps_to_try,
    tile,
    typical,
    warps_for,
)
from .row import inline_elements


def _matches(nest: LoopNest, target: Target) -> bool:
    return column_like(analyse(nest)) and not has_scan(nest)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    itemsize = narrowest_bytes(shape)
    least = max(SECTOR // itemsize, 8)
    extents = [typical(nest, e) for _, e in shape.rows]
    columns = columns_of(target.machine, extents, itemsize)
    length = typical(nest, sympy.Mul(*(e for _, e in shape.inner)))
    rows = clamp_power(length, 1, COLUMN_TILE // columns)
    warps = warps_for(target, columns * rows, 16)
    count = math.prod(extents) // extents[-1] * -(-extents[-1] // columns)
    along = [shape.rows[-1][0], *(v for v, _ in shape.inner)]
    stages = steps_of_reads(shape, target, along, columns * rows, warps, count)
    sizes = dict.fromkeys((columns, max(columns // 2, least), min(columns * 2, 256)))
    return {
        "columns": tuple(sizes),
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, 1)))),
        "warps": (warps, warps_for(target, columns * rows, 32), warps_for(target, columns * rows, 8)),
        "stages": steps_to_try(target, stages) if length > rows else (1,),
    }


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    vector = shape.rows[-1][0]
    inline_elements(schedule)
    depth = row_depth(schedule, len(shape.rows))
    first = schedule.get_blocks()[0]
    loops = dict(zip([v for v, _ in shape.rows], schedule.get_loops(first)[:depth], strict=False))
    if vector not in loops:
        schedule.bind(schedule.get_loops(first)[0], "no common row loop")  # refuses, with the nest
    column = loops[vector]
    others = [lp for v, lp in loops.items() if v != vector]
    over, within = cut(schedule, column, int(params["columns"]))
    order = [lp for lp in (*others, over, within) if lp is not None]
    if len(order) > 1:
        schedule.reorder(*order)
    programs(schedule, (*others, over))
    tile(schedule, within)
    depth = 1 + bool(others or over is not None)
    for loop in inner_loops(schedule, depth, merge=True):
        steps, rows = cut(schedule, loop, int(params["rows"]))
        tile(schedule, rows)
        read_ahead(schedule, steps, int(params["stages"]))
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


GPU_COLUMN_REDUCTION = Rule("gpu_column_reduction", GPUS, _matches, _parameters, _apply)
