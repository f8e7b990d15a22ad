"""Reductions across contiguous columns on CPUs: lanes over columns, rows one after the other.

A team over column blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.loops import LoopNest
from ...ir.target import Target
from ..schedule import Schedule
from .analysis import Shape, analyse
from .cpu_common import (
    best_vector,
    choose_width,
    cut_rows,
    inline_cheap,
    is_long,
    merge_rows,
    parallel_roots,
    run_length,
)
from .registry import Params, Rule, Value


def _matches(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    return shape.has_reduction and bool(shape.rows) and shape.rows[-1][0] == best_vector(shape)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {"unroll": (8, 4, 2), "partials": _partials(analyse(nest), target)}


def _partials(shape: Shape, target: Target) -> tuple[int, ...]:
    """Into how many pieces to cut the rows: more than one where the columns alone do not occupy the team."""
    columns = shape.row_count
    if columns >= 64 * target.cores or target.cores == 1 or shape.inner_count < 64 * target.cores:
        return (1,)
    return (target.cores, 1)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    unroll, partials = int(params["unroll"]), int(params["partials"])
    rows = len(shape.rows)
    inline_cheap(schedule)
    cut: list[str] = []
    if partials > 1:
        cut = [p for b in shape.reductions if (p := cut_rows(schedule, b.name, rows, partials)) is not None]
    for block in schedule.get_blocks():
        _lanes_inside(schedule, block, rows + (block in cut), target, unroll)
    if not cut:
        merge_rows(schedule, rows)
    parallel_roots(schedule, target)


def _lanes_inside(schedule: Schedule, block: str, rows: int, target: Target, unroll: int) -> None:
    """Split the last row loop by the width of the vectors and move its lanes inside the reduction."""
    loops = schedule.get_loops(block)
    column = loops[rows - 1]
    extent = schedule.extent(column)
    width = choose_width(target, schedule.nest, extent, unroll)
    if width == 1:
        return
    lane = column
    outer = loops[: rows - 1]
    if extent != width:
        blocks_of, lane = schedule.split(column, [None, width])
        outer = [*outer, blocks_of]
    inner = loops[rows:]
    if inner and is_long(schedule, inner[-1], 1):
        *rest, last = inner
        outside, run = schedule.split(last, [None, run_length(schedule, last, 1)])
        schedule.annotate(run, "cascade", True)
        inner = [*rest, outside, run]
    if inner:
        schedule.reorder(*outer, *inner, lane)
    schedule.vectorize(lane)


CPU_COLUMN_REDUCTION = Rule("cpu_column_reduction", ("cpu",), _matches, _parameters, _apply)
