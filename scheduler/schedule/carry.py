"""Carrying a trace to a nest that is built alike and has other names, or other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ir.nest.loops import LoopNest
from ...ir.nest.positions import Naming, matched, named_by_position, renamed_key
from ..error import ScheduleError
from .schedule import Schedule, replay, take_step
from .trace import Trace

# What the arguments of steps name, by the argument's own name; ``at`` is a loop or a block, or "" for the nest.
_LOOPS = ("loop", "loops")
_EITHER = ("at", "first", "second")


def carried(trace: Trace, source: LoopNest, nest: LoopNest) -> Schedule:
    """Apply a trace of ``source`` to ``nest``: each step is taken on both, and what it names in the one nest is what
    stands in the same place of the other. The result's own trace has the names of ``nest``. Raises ScheduleError where
    the nests are not built alike, and where a step is not legal.
    """
    if source is nest:
        return replay(trace, nest)
    model, schedule = Schedule(source, trace.rule), Schedule(nest, trace.rule)
    for step in trace.steps:
        naming = matched(model.nest, schedule.nest)
        if naming is None:
            raise ScheduleError(str(step), "the trace is of a nest that is built otherwise")
        take_step(model, step, {k: model.given(v) for k, v in step.args})
        if model.trace.steps[-1].results != step.results:
            raise ScheduleError(str(step), "the trace is of another nest than its own")
        axes = naming.axes.get(str(dict(step.args).get("block")), {})
        take_step(schedule, step, {k: _there(k, schedule.given(v), naming, axes) for k, v in step.args})
    if matched(model.nest, schedule.nest) is None:
        raise ScheduleError("carried", "the steps make another nest there")
    return schedule


def applied(trace: Trace, nest: LoopNest) -> Schedule:
    """Apply a trace that has the nest's own names, or names of position, as tuning keeps them. Raises ScheduleError."""
    try:
        return replay(trace, nest)
    except ScheduleError:
        by_position = named_by_position(nest)
        if by_position is nest:
            raise
        return carried(trace, by_position, nest)


def _there(argument: str, value: Any, naming: Naming, axes: Mapping[str, str]) -> Any:
    """An argument of a step as it is named in the other nest."""
    if isinstance(value, tuple):
        return tuple(_there(argument, v, naming, axes) for v in value)
    if not isinstance(value, str):
        return value
    if argument in _LOOPS:
        return naming.loops.get(value, value)
    if argument in _EITHER:
        return naming.loops.get(value) or naming.blocks.get(value, value)
    match argument:
        case "block":
            return naming.blocks.get(value, value)
        case "buffer":
            return naming.buffers.get(value, value)
        case "order":
            return axes.get(value, value)
        case "key":
            return renamed_key(value, naming)
    return value
