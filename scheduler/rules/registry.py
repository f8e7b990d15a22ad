"""Rules: how a kind of nest is scheduled on a kind of target, and what may be varied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TypeAlias

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ..error import ScheduleError
from ..schedule.schedule import Schedule

Value: TypeAlias = bool | int | str
Params: TypeAlias = Mapping[str, Value]


class Scarce(Enum):
    """What a compiled kernel took too much of: shared memory of a block, or registers of a thread, which spill."""

    SHARED = "shared memory"
    REGISTERS = "registers"


# Parameters that are no size: more warps hold a tile, and more parts a row, in fewer registers each; fewer stages hold
# fewer tiles in shared memory, and more of them have what is loaded there for longer, and not in registers.
_SPREAD, _STAGES = ("parts", "warps"), "stages"


def lighter_values(values: Mapping[str, tuple[Value, ...]], scarce: Scarce) -> Iterator[Params]:
    """Of the points of a design space, those that take less of what is scarce than the default, the nearest first: one
    parameter changed, then two, and so on. What a rule varies that is no number stays as it is."""
    options: dict[str, list[Value]] = {}
    for name, offered in values.items():
        first = offered[0]
        options[name] = [first]
        if isinstance(first, bool) or not isinstance(first, int):
            continue
        numbers = [v for v in offered if isinstance(v, int)]
        if name == _STAGES and scarce is Scarce.REGISTERS:
            options[name] += sorted(v for v in numbers if v > first > 1)
        elif name in _SPREAD:
            options[name] += sorted(v for v in numbers if v > first) if scarce is Scarce.REGISTERS else []
        else:
            options[name] += sorted((v for v in numbers if v < first), reverse=True)
    default = {k: v[0] for k, v in values.items()}
    points = (dict(zip(options, point, strict=True)) for point in product(*options.values()))
    changed = sorted(points, key=lambda p: sum(p[k] != default[k] for k in default))
    yield from (p for p in changed if p != default)


class Capability(Enum):
    """What some rules can take, or do inside one kernel; passes and fusion ask whether a target has a rule for it."""

    SPLIT_SUMS = "a sum in pieces and their total"
    SPLIT_ROWS = "reductions over rows beside others, in pieces and their total"
    SPLIT_KEYS = "an attention with its keys in pieces, and their combination"
    KEEP_ROWS = "rows of any length, kept for their next visit"
    TILE_REDUCTIONS = "reductions over the rows or columns of a product's results"
    FIRST_ROWS = "reductions of rows of an attention's operands before its keys"
    BRANCHES = "elements under conditions, computed where those hold"
    ATTENTION = "a softmax of a product's results in an operand of another"
    WEIGHTED_SUMS = "a function of a product's results, point by point, in an operand of another"
    SHARED_TOTALS = "sums of all scores beside products that take up the same tiles"


Capability.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to schedule nests of one kind.

    ``kinds`` are target kinds ("cpu", "cuda", "hip"). ``parameters`` gives, for a nest that matches, the values worth
    trying of each tunable; the first of each is the default, which must be good with no tuning. ``apply`` rewrites
    the schedule. ``can`` are capabilities that a target has by it. ``lighter`` gives, from those values, the points to
    try where the default compiles to more than the target has.
    """

    name: str
    kinds: tuple[str, ...]
    matches: Callable[[LoopNest, Target], bool]
    parameters: Callable[[LoopNest, Target], Mapping[str, tuple[Value, ...]]]
    apply: Callable[[Schedule, Target, Params], None]
    lighter: Callable[[Mapping[str, tuple[Value, ...]], Scarce], Iterator[Params]] = lighter_values
    can: frozenset[Capability] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of a design space: the rule, its parameters, and the schedule that they make."""

    rule: str
    params: tuple[tuple[str, Value], ...]
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class DesignSpace:
    """Every schedule that the rules offer for a nest. Points that turn out illegal are left out."""

    nest: LoopNest
    target: Target
    rules: tuple[Rule, ...]

    def candidates(self) -> Iterator[Candidate]:
        """The default first, then the neighbours of the default (one parameter changed), then all the rest."""
        for rule in self.rules:
            values = rule.parameters(self.nest, self.target)
            default = {k: v[0] for k, v in values.items()}
            points = sorted(
                (dict(zip(values, point, strict=True)) for point in product(*values.values())),
                key=lambda p: sum(p[k] != default[k] for k in default),
            )
            for params in points:
                candidate = self.candidate(rule, params)
                if candidate is not None:
                    yield candidate

    def candidate(self, rule: Rule, params: Params) -> Candidate | None:
        """The schedule of one point, or None where a primitive refuses it."""
        schedule = Schedule(self.nest, rule.name)
        try:
            rule.apply(schedule, self.target, params)
        except ScheduleError:
            return None
        return Candidate(rule.name, tuple(params.items()), schedule)


def matching(rules: Sequence[Rule], nest: LoopNest, target: Target) -> tuple[Rule, ...]:
    """The rules for a nest, best first. Raises ScheduleError where none fits."""
    found = tuple(r for r in rules if target.kind in r.kinds and r.matches(nest, target))
    if not found:
        raise ScheduleError("default_schedule", f"no rule for {nest.name} on {target}", nest)
    return found
