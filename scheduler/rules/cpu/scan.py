"""Scans on CPUs: a team over rows, one visit of the elements with all that is made before and after on the way.

Lanes run across rows where those are contiguous, each with a state of its own; else along the scan, by shifts within
a register.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import AxisKind, LoopNest, blocks
from ....ir.target import Target
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Capability, Params, Rule, Value
from .column import lanes_inside, sharing
from .common import (
    best_vector,
    inline_cheap,
    merge_inner,
    merge_rows,
    parallel_roots,
    unroll_values,
    vectorize_innermost,
)


def _matches(nest: LoopNest, target: Target) -> bool:
    return any(b.is_scan for b, _ in blocks(nest))


def _across_rows(shape: NestShape) -> bool:
    return bool(shape.rows) and shape.rows[-1][0] == best_vector(shape)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {"unroll": (4, 2, 8)} if _across_rows(analyse(nest)) else unroll_values(nest, target)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    rows, unroll = len(shape.rows), int(params["unroll"])
    inline_cheap(schedule)
    if not _across_rows(shape):
        merge_rows(schedule, rows)
        merge_inner(schedule, rows)
        vectorize_innermost(schedule, target, unroll, skip=rows)
    elif _visits(shape) == 1:
        merge_rows(schedule, rows)
        merge_inner(schedule, rows)
        for together in sharing(schedule, rows):
            lanes_inside(schedule, together, rows, target, (unroll, 1))
    else:
        for block in schedule.get_blocks():
            lanes_inside(schedule, [block], rows, target, (unroll, 1))
        merge_rows(schedule, rows)
        merge_inner(schedule, rows)
    parallel_roots(schedule, target)


def _visits(shape: NestShape) -> int:
    """How often elements are visited at least: again after each result of a row that a stage over elements needs."""
    reduced = {
        w.buffer for b in shape.blocks if b.is_reduction and b.axes_of(AxisKind.REDUCTION) for w in b.writes
    }  # fmt: skip
    return 2 if any(ld.buffer in reduced for b in shape.blocks for ld in b.reads) else 1


CPU_SCAN = Rule("cpu_scan", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.KEEP_ROWS}))
