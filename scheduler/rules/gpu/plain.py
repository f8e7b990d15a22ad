"""The rule of last resort on GPUs: a program for each iteration of the outermost loop, all others serial. Never fast: a
nest that needs it is a nest that deserves a rule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ....ir.nest.hints import NUM_WARPS
from ....ir.nest.loops import AxisKind, LoopNest
from ....ir.target import Target
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from .common import GPUS, row_depth
from .row import inline_elements


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    # A value that stays inside lives in a register, so whoever reads it runs in the iteration that made it.
    inline_elements(schedule)
    for name in schedule.get_blocks():
        # Loops of one iteration are nothing that stages could share.
        order = [lp for lp in _loops_of_results(schedule, name) if schedule.extent(lp) != 1]
        order += [lp for lp in schedule.get_loops(name) if lp not in order]
        if order != schedule.get_loops(name):
            schedule.reorder(*order)
    depth = row_depth(schedule, len(analyse(schedule.nest).rows))
    for name in reversed(schedule.get_blocks()):
        _make_where_it_is_read(schedule, name)
    if depth:
        with suppress(ScheduleError):  # one program, then
            schedule.bind(schedule.get_loops(schedule.get_blocks()[0])[0], "blockIdx.x")
    schedule.annotate("", NUM_WARPS, 1)


def _loops_of_results(schedule: Schedule, name: str) -> list[str]:
    """The loops that select what a block writes: a register holds the state of one result."""
    block = schedule.block(name)
    over = {
        s.name
        for axis, binding in zip(block.axes, block.bindings, strict=True)
        if axis.kind is not AxisKind.REDUCTION
        for s in binding.free_symbols
    }
    return [lp for lp in schedule.get_loops(name) if lp in over]


def _make_where_it_is_read(schedule: Schedule, name: str) -> None:
    """Bring a block whose results stay inside to its readers, where they are in other loops than it."""
    local = {b.name for b in schedule.nest.locals} & {w.buffer for w in schedule.block(name).writes}
    readers = [b for b in schedule.get_blocks() if b != name and {ld.buffer for ld in schedule.block(b).reads} & local]
    chains = [schedule.get_loops(b) for b in readers]
    if not chains or all(lp in c for lp in _loops_of_results(schedule, name) for c in chains):
        return
    own = schedule.get_loops(name)
    for loop in reversed([lp for lp in chains[0] if all(lp in c for c in chains) and lp not in own]):
        with suppress(ScheduleError):
            schedule.compute_at(name, loop)
            return


GPU_PLAIN = Rule("gpu_plain", GPUS, lambda nest, target: True, _parameters, _apply)
