"""Scatters on GPUs: all that is scattered at once, combined in memory by atomic operations. Several of the same points
are one loop.

And sums that data end, as those of sorted segments are: rows of results beside one another in a tile, each with the
elements that are its own. What is summed lies along the results and not along the elements, whose places data name. So
a loop over the elements stands in the program, and ends where the longest of the tile's rows does.

And small things that have nothing to do with one another but their launch, one of which may scatter: each program does
a part of every one. The points of each are laid end to end and cut into tiles of one size. There are as many programs
as the one with the most points has tiles, and what has fewer points leaves the last programs idle.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.data_ends import data_end
from ....ir.nest.hints import DATA_ENDS, NUM_WARPS
from ....ir.nest.loops import AxisKind, DimKind, LoopNest, blocks
from ....ir.target import Target
from ...cost.gpu_kernels import POINTWISE_THREADS, SMALL_TILE
from ...cost.segments import AT_ONCE, TILE, rows_at_once
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..cpu.common import merge_paths
from ..registry import Params, Rule, Value
from .common import GPUS, clamp_power, cut, fused, inner_loops, programs, row_depth, tile, tile_size, typical, warps_for
from .pointwise import GPU_POINTWISE
from .row import inline_elements


def _matches(nest: LoopNest, target: Target) -> bool:
    found = [b for b, _ in blocks(nest)]
    return bool(found) and all(b.is_scatter for b in found)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return GPU_POINTWISE.parameters(nest, target)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    for name in schedule.get_blocks():
        schedule.atomic(name)
    GPU_POINTWISE.apply(schedule, target, params)


GPU_SCATTER = Rule("gpu_scatter", GPUS, _matches, _parameters, _apply)


def _are_small(nest: LoopNest, target: Target) -> bool:
    found = [b for b, _ in blocks(nest)]
    points = [sympy.Mul(*(a.extent for a in b.axes)) for b in found]
    kinds = {a.kind for b in found for a in b.axes}
    return (
        len(found) > 1
        and kinds <= {AxisKind.SPATIAL, AxisKind.SCATTER}
        and all(b.axes and all(a.dim is DimKind.EXTRA for a in b.axes) for b in found)
        and all(n.is_Integer and n > 0 for n in points)
        and (len(set(points)) > 1 or not _matches(nest, target))
    )


def _small_parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {"block": (SMALL_TILE, SMALL_TILE * 2, SMALL_TILE // 2)}


def _small(schedule: Schedule, target: Target, params: Params) -> None:
    block = int(params["block"])
    for b, _ in list(blocks(schedule.nest)):
        if b.is_scatter:
            schedule.atomic(b.name)
    loops = [fused(schedule, schedule.get_loops(name)) for name in schedule.get_blocks()]
    points = {lp: int(schedule.extent(lp)) for lp in loops if lp is not None}
    count = -(-max(points.values()) // block)
    paths = [schedule.split(lp, [count, block]) for lp in points]
    (program,) = merge_paths(schedule, [[over] for over, _ in paths])
    for _, within in paths:
        tile(schedule, within)
    programs(schedule, (program,))
    schedule.annotate("", NUM_WARPS, max(POINTWISE_THREADS // target.warp, 1))


GPU_SMALL = Rule("gpu_small", GPUS, _are_small, _small_parameters, _small)


def _is_ended_by_data(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    reductions = shape.reductions
    return bool(shape.rows) and len(reductions) == 1 and data_end(reductions[0]) is not None


def _columns(shape: NestShape) -> sympy.Expr:
    """How many results lie together."""
    return shape.rows[-1][1] if len(shape.rows) > 1 else sympy.S.One


def _segment_parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    columns = tile_size(nest, _columns(shape), TILE)
    places = typical(nest, sympy.Mul(*(e for _, e in shape.rows[:-1])))
    rows, at_once = clamp_power(places, 1, TILE // columns), rows_at_once(places, shape.inner_count)
    warps = warps_for(target, rows * columns, 8)
    return {
        "columns": (columns,),
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, 1), 1))),
        "at_once": tuple(dict.fromkeys((at_once, AT_ONCE, 4, 1))),
        "warps": (warps, max(warps // 2, 1)),
    }


def _segments(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    inline_elements(schedule)
    depth = row_depth(schedule, len(shape.rows))
    loops = schedule.get_loops(schedule.get_blocks()[0])[:depth]
    if depth < len(shape.rows):
        schedule.bind(loops[0] if loops else "", "no common row loops")  # refuses, with the nest
    *others, last = loops
    over, column = cut(schedule, last, int(params["columns"])) if others else (last, None)
    if others:
        row = fused(schedule, others)
        assert row is not None
    else:
        row, over = last, None
    rows_of, within = cut(schedule, row, int(params["rows"]))
    order = [lp for lp in (rows_of, over, within, column) if lp is not None]
    if len(order) > 1:
        schedule.reorder(*order)
    programs(schedule, (rows_of, over))
    for lp in (within, column):
        if lp is not None:
            tile(schedule, lp)
    count = len(order) - (rows_of is not None and over is not None)
    for loop in inner_loops(schedule, count, merge=False):
        steps, part = cut(schedule, loop, int(params["at_once"]))
        if steps is not None:
            schedule.annotate(steps, DATA_ENDS, True)
            schedule.unroll(part)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


GPU_SEGMENTS = Rule("gpu_segments", GPUS, _is_ended_by_data, _segment_parameters, _segments)
