"""The rule of last resort: always legal, never fast. A nest that needs it is a nest that deserves a rule."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..registry import Params, Rule, Value


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if loops:
            try:
                schedule.parallel(loops[0])
            except ScheduleError:
                continue


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {}


CPU_PLAIN = Rule("cpu_plain", ("cpu",), lambda nest, target: True, _parameters, _apply)
