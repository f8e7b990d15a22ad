"""Reductions along contiguous rows on CPUs: a team over rows.

All stages of a row while it is in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.cpu_kernels import SHORT_ROWS_TOGETHER
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from .common import inline_cheap, merge_inner, merge_rows, parallel_roots, row_loops, unroll_values, vectorize_innermost
from .online import in_tiles, keep_states
from .prefetch import fetch_ahead
from .short import is_short, rows_together


def _matches(nest: LoopNest, target: Target) -> bool:
    return analyse(nest).has_reduction


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = unroll_values(nest, target)
    return {**found, "together": (SHORT_ROWS_TOGETHER, 1)} if is_short(nest, target) else found


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    rows = row_loops(analyse(schedule.nest))
    inline_cheap(schedule)
    if (together := int(params.get("together", 1))) > 1:
        rows_together(schedule, target, rows, together, int(params["unroll"]))
        parallel_roots(schedule, target)
        return
    keep_states(schedule)
    merge_rows(schedule, rows)
    in_tiles(schedule, target, rows)
    merge_inner(schedule, rows)
    vectorize_innermost(schedule, target, int(params["unroll"]), skip=rows)
    fetch_ahead(schedule, target)
    parallel_roots(schedule, target)


CPU_ROW_REDUCTION = Rule("cpu_row_reduction", ("cpu",), _matches, _parameters, _apply)
