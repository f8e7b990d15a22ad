"""Scatters on CPUs: the places that data name are visited in order, and a team shares what data do not decide.

Neither atomic operations nor copies for each thread: a thread has features, or rows, of its own, and sees all indices.
Lanes run along elements that lie side by side whatever the data say. Where data decide every dimension, one thread does
it all.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ...ir.expr import free_symbols, is_value
from ...ir.loops import AxisKind, Block, LoopNest, blocks
from ...ir.target import Target
from ..error import ScheduleError
from ..schedule import Schedule
from .cpu_common import lane_bytes, vectorize_loop
from .registry import Params, Rule, Value

# A thread's part of a row is at least so many bytes: whole cache lines, so that two threads seldom share one.
_PART_BYTES = 256
# Fewer elements side by side than a register holds are no lanes.
_SHORT = 4


def _matches(nest: LoopNest, target: Target) -> bool:
    return any(b.is_scatter for b, _ in blocks(nest))


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {"unroll": (4, 2, 8, 1)}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    unroll = int(params["unroll"])
    for name in schedule.get_blocks():
        block = schedule.block(name)
        loops = dict(zip((a.var for a in block.axes), schedule.get_loops(name), strict=True))
        lanes = _lanes(schedule.nest, block)
        if block.is_scatter:
            _scatter(schedule, block, loops, lanes, target, unroll)
        elif loops:
            if lanes is not None:
                schedule.reorder(*(lp for v, lp in loops.items() if v != lanes), loops[lanes])
                vectorize_loop(schedule, loops[lanes], target, unroll)
            _try_parallel(schedule, schedule.get_loops(name)[0])


def _scatter(
    schedule: Schedule, block: Block, loops: dict[sympy.Symbol, str], lanes: sympy.Symbol | None, target: Target,
    unroll: int,
) -> None:  # fmt: skip
    free = [a for a in block.axes if a.kind is AxisKind.SPATIAL and a.extent != 1 and a.var != lanes]
    ordered = [loops[a.var] for a in block.axes if a.kind is AxisKind.SCATTER]
    hint = schedule.nest.symbols.hint
    rest = [loops[a.var] for a in block.axes if a.kind is AxisKind.SPATIAL and a.var != lanes]
    shared: list[str] = []
    if free:  # rows of the result that nobody else writes: the one with most of them is shared by the team
        shared = [loops[max(free, key=lambda a: hint(a.extent)).var]]
    elif lanes is not None and target.cores > 1:
        part = target.lanes(lane_bytes(schedule.nest)) * unroll
        part = max(part, _PART_BYTES // lane_bytes(schedule.nest))
        extent = schedule.extent(loops[lanes])
        if hint(extent) >= 2 * part:
            outer, loops[lanes] = schedule.split(loops[lanes], [None, part])
            shared = [outer]
    last = [loops[lanes]] if lanes is not None else []
    inner = [lp for lp in rest if lp not in shared]
    schedule.reorder(*shared, *ordered, *inner, *last)
    if lanes is not None:
        vectorize_loop(schedule, loops[lanes], target, unroll)
    if shared:
        _try_parallel(schedule, shared[0])


def _try_parallel(schedule: Schedule, loop: str) -> None:
    try:
        schedule.parallel(loop)
    except ScheduleError:
        return


def _lanes(nest: LoopNest, block: Block) -> sympy.Symbol | None:
    """The axis along which all that a block writes lies side by side, and no place in it is data."""
    for axis in reversed(block.axes):
        if axis.kind is not AxisKind.SPATIAL or nest.symbols.hint(axis.extent) < _SHORT:
            continue
        if all(_is_beside(nest, w.buffer, w.indices, axis.var) for w in block.writes):
            return axis.var
    return None


def _is_beside(nest: LoopNest, name: str, indices: tuple[object, ...], var: sympy.Symbol) -> bool:
    buffer = nest.buffer(name)
    for index, stride in zip(indices, buffer.strides, strict=True):
        if is_value(index):
            if var in free_symbols(index):
                return False
        elif var in index.free_symbols and (index != var or stride != 1):  # type: ignore[attr-defined]
            return False
    return any(index == var for index in indices)


CPU_SCATTER = Rule("cpu_scatter", ("cpu",), _matches, _parameters, _apply)
