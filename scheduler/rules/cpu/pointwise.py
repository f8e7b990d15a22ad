"""Point-wise nests on CPUs: lanes along the dimension that most bytes are contiguous in, a team over the rest."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.cpu_kernels import TRANSPOSED_TILE, VISITED_BLOCK
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Capability, Params, Rule, Value
from .common import (
    begins_in_lines,
    best_vector,
    crosses,
    lane_bytes,
    merge_rows,
    parallel_roots,
    tile_lanes,
    unroll_values,
    vectorize_loop,
)
from .concat import has_concats, partition_concats
from .prefetch import fetch_ahead, fetch_jumps


def _matches(nest: LoopNest, target: Target) -> bool:
    return not analyse(nest).has_reduction


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    concats: Mapping[str, tuple[Value, ...]] = {"partition": (True, False)} if has_concats(nest) else {}
    tiles: Mapping[str, tuple[Value, ...]] = {"blocks": (True, False)} if begins_in_lines(analyse(nest)) else {}
    return {**unroll_values(nest, target), **concats, **tiles}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    best = best_vector(shape)
    across = crosses(shape, best)
    for block in schedule.get_blocks():
        _innermost(schedule, block, across)
        _innermost(schedule, block, best)
    depth = max((len(schedule.get_loops(b)) for b in schedule.get_blocks()), default=0)
    merge_rows(schedule, depth)
    if across is None and params.get("partition"):
        partition_concats(schedule, target)
    done: set[str] = set()
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if not loops or loops[-1] in done:
            continue
        if across is not None and len(loops) >= 2:
            done.add(_tile(schedule, shape, loops, target, params.get("blocks")))
        else:
            vectorize_loop(schedule, loops[-1], target, int(params["unroll"]))
            done.add(schedule.get_loops(block)[-1])
    if across is not None:
        merge_rows(schedule, 1)
    fetch_jumps(schedule, target)
    fetch_ahead(schedule, target)
    parallel_roots(schedule, target)


def _innermost(schedule: Schedule, block: str, var: sympy.Symbol | None) -> None:
    """Bring the loop of a dimension innermost."""
    loops = schedule.get_loops(block)
    node = schedule.block(block)
    for axis, binding in zip(node.axes, node.bindings, strict=True):
        if axis.var == var and binding.is_Symbol and binding.name in loops and loops[-1] != binding.name:
            others = [lp for lp in loops if lp != binding.name]
            schedule.reorder(*others, binding.name)


def _tile(schedule: Schedule, shape: NestShape, loops: list[str], target: Target, blocks: Value | None) -> str:
    """Tiles of the two innermost loops: one side in lanes, the other unrolled.

    So that the emitter transposes in registers. ``blocks`` is None where rows begin anywhere in a line.
    """
    *outer, rows, columns = loops
    if 1 < schedule.nest.symbols.hint(schedule.extent(rows)) < TRANSPOSED_TILE and schedule.extent(rows).is_Integer:
        # Groups of a few neighbours, each whole in the copies, and a register of groups.
        column_outer, lane = schedule.split(columns, [None, target.lanes(lane_bytes(schedule.nest))])
        schedule.reorder(*outer, column_outer, rows, lane)
        schedule.unroll(rows)
        schedule.vectorize(lane)
        return lane
    lanes = tile_lanes(shape, target)
    whole = all(schedule.nest.symbols.divisor(schedule.extent(lp)) % VISITED_BLOCK == 0 for lp in (rows, columns))
    if blocks and whole:
        row_outer, row, row_inner = schedule.split(rows, [None, VISITED_BLOCK // TRANSPOSED_TILE, TRANSPOSED_TILE])
        column_outer, column, lane = schedule.split(columns, [None, VISITED_BLOCK // lanes, lanes])
        schedule.reorder(*outer, row_outer, column_outer, row, column, row_inner, lane)
    else:
        row_outer, row_inner = schedule.split(rows, [None, TRANSPOSED_TILE])
        column_outer, lane = schedule.split(columns, [None, lanes])
        schedule.reorder(*outer, row_outer, column_outer, row_inner, lane)
    schedule.unroll(row_inner)
    schedule.vectorize(lane)
    return lane


CPU_POINTWISE = Rule("cpu_pointwise", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.BRANCHES}))
