"""The rule of last resort on GPUs: a program for each iteration of the outermost loop, all others serial. Always legal,
never fast: a nest that needs it is a nest that deserves a rule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ....ir.nest.hints import NUM_WARPS
from ....ir.nest.loops import LoopNest
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
    if row_depth(schedule, len(analyse(schedule.nest).rows)):
        with suppress(ScheduleError):  # one program, then
            schedule.bind(schedule.get_loops(schedule.get_blocks()[0])[0], "blockIdx.x")
    schedule.annotate("", NUM_WARPS, 1)


GPU_PLAIN = Rule("gpu_plain", GPUS, lambda nest, target: True, _parameters, _apply)
