"""Scatters on CPUs: the places that data name are visited in order, and a team shares what data do not decide.

Neither atomic operations nor copies for each thread: a thread has features, or rows, of its own, and sees all indices.
Lanes run along elements that lie side by side whatever the data say. Where data decide every dimension, one thread does
it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from ....ir.expr.value import free_symbols, is_value
from ....ir.nest.loops import AxisKind, Block, LoopNest, blocks
from ....ir.target import Target
from ...cost.cpu_kernels import SCATTERED_PART, SCATTERED_SHORT
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..registry import Params, Rule, Value
from .common import lane_bytes, vectorize_loop

# Iterations that are written out where there are no lanes.
_COPIES = 4
# Rows that are updated at the same places by one visit of these.
_FEATURES = 4
# Iterations of short innermost loops, as those over the neighbours of a place, that are written out as a whole.
_WRITTEN = 8


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
    nest, hint = schedule.nest, schedule.nest.symbols.hint
    spatial = [a for a in block.axes if a.kind is AxisKind.SPATIAL and a.var != lanes]
    ordered = [loops[a.var] for a in block.axes if a.kind is AxisKind.SCATTER]
    before = block.axes[: next((k for k, a in enumerate(block.axes) if a.kind is AxisKind.SCATTER), 0)]
    shared: list[str] = []
    outer = [a for a in spatial if a in before and a.extent != 1]
    if outer:  # rows of the result that nobody else writes
        shared = [loops[max(outer, key=lambda a: hint(a.extent)).var]]
    elif target.cores > 1 and (free := lanes or next((a.var for a in reversed(spatial) if a.extent != 1), None)):
        # Pieces of each row, of whole cache lines.
        size = lane_bytes(nest)
        part = max(target.lanes(size) * unroll, SCATTERED_PART // size)
        if hint(schedule.extent(loops[free])) >= 2 * part:
            piece, loops[free] = schedule.split(loops[free], [None, part])
            shared = [piece]
    rest = [loops[a.var] for a in spatial if loops[a.var] not in shared]
    if lanes is not None:
        schedule.reorder(*shared, *ordered, *rest, loops[lanes])
        vectorize_loop(schedule, loops[lanes], target, unroll)
    else:
        inner = [lp for lp in schedule.get_loops(block.name) if lp not in shared]
        features = _features(schedule, block, {v: lp for v, lp in loops.items() if lp in rest and lp in inner})
        if features is not None:
            # The places and weights of an update are made once for a few rows, and not for each of them.
            inner.remove(features)
            pieces, features = schedule.split(features, [None, _together(int(schedule.extent(features)))])
            schedule.reorder(*shared, pieces, *inner, features)
            schedule.unroll(features)
        else:
            schedule.reorder(*shared, *inner)
        _write_out(schedule, inner)
    if shared:
        _try_parallel(schedule, shared[0])


def _features(schedule: Schedule, block: Block, loops: dict[sympy.Symbol, str]) -> str | None:
    """The loop over rows that are updated at the same places: along it nothing that data decide moves."""
    moved = {s for w in block.writes for i in w.indices if is_value(i) for s in free_symbols(i)}
    found = [lp for v, lp in loops.items() if v not in moved and schedule.extent(lp).is_Integer]
    found = [lp for lp in found if int(schedule.extent(lp)) > 1]
    return found[-1] if found else None


def _together(extent: int) -> int:
    """How many of so many rows one visit updates: pieces of one size where there are such, else a short last one."""
    if extent < 2 * _FEATURES:
        return extent
    return next((n for n in (_FEATURES, _FEATURES + 1, _FEATURES - 1) if extent % n == 0), _FEATURES)


def _write_out(schedule: Schedule, loops: list[str]) -> None:
    """A few iterations of the innermost loop in a row, or the short innermost loops as a whole."""
    short: list[str] = []
    for loop in reversed(loops):
        extent = schedule.extent(loop)
        if not extent.is_Integer or math.prod(int(schedule.extent(lp)) for lp in (*short, loop)) > _WRITTEN:
            break
        short.append(loop)
    for loop in short:
        schedule.unroll(loop)
    if short:
        return
    if loops and schedule.nest.symbols.hint(schedule.extent(loops[-1])) >= 4 * _COPIES:
        _, copies = schedule.split(loops[-1], [None, _COPIES])
        schedule.unroll(copies)


def _try_parallel(schedule: Schedule, loop: str) -> None:
    try:
        schedule.parallel(loop)
    except ScheduleError:
        return


def _lanes(nest: LoopNest, block: Block) -> sympy.Symbol | None:
    """The axis along which all that a block writes lies side by side, and no place in it is data."""
    for axis in reversed(block.axes):
        if axis.kind is not AxisKind.SPATIAL or nest.symbols.hint(axis.extent) < SCATTERED_SHORT:
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
