"""The schedule of a kernel as it is kept with its code, so that code from a cache can be told of as new code is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...runtime.compile.kernels import KernelCode
from ...scheduler.schedule.overrides import workload_of
from ...scheduler.schedule.schedule import Schedule
from .tuning import ChosenBy

_KEPT = "schedule"
_BY = {
    ChosenBy.DEFAULT: "by rule",
    ChosenBy.MEASURED: "by tuning",
    ChosenBy.RECORDED: "by tuning",
    ChosenBy.RANK: "by tuning",
    ChosenBy.PREDICTED: "by prediction",
    ChosenBy.MODEL: "by the model",
    ChosenBy.HAND: "by hand",
}


@dataclass(frozen=True, slots=True)
class ScheduleTold:
    """A schedule: of which workload (64 hex digits) on which target, the rule that gave it, who chose it, and its steps
    as text."""

    workload: str
    target: str
    rule: str
    by: str
    steps: tuple[str, ...]

    @classmethod
    def of(cls, code: KernelCode) -> ScheduleTold | None:
        """What is kept with code; None where nothing is."""
        kept = code.meta.get(_KEPT)
        if kept is None:
            return None
        workload, target, rule, by, steps = kept
        return cls(workload, target, rule, by, tuple(steps))


def with_schedule(code: KernelCode, nest: LoopNest, schedule: Schedule, target: Target, source: ChosenBy) -> KernelCode:
    """The code with its schedule beside it; the same where it has one."""
    if _KEPT in code.meta:
        return code
    kept = [workload_of(nest), str(target), schedule.rule, _BY[source], [str(s) for s in schedule.trace.steps]]
    return replace(code, meta={**code.meta, _KEPT: kept})


__all__ = ["ScheduleTold", "with_schedule"]
