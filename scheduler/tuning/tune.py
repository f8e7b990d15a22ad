"""Tuning: measure what the rules offer for a nest, and keep the fastest.

A search over parameters: the default, the other rules' defaults, then neighbours of the best so far, then random
points. Every measurement is recorded before the next begins. Running code is the measurer's business; this room knows
only times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol, TypeAlias

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ..error import ScheduleError
from ..rules import design_space
from ..rules.registry import Candidate, DesignSpace, Params, Rule, Value
from ..schedule.schedule import Schedule
from ..schedule.trace import Trace
from .database import Database

# Seconds a call, or why there are none (it did not compile, it gave a wrong answer).
Measurement: TypeAlias = float | Exception
Point: TypeAlias = tuple[int, tuple[tuple[str, Value], ...]]
# A design space larger than this is searched without ever being listed.
MAX_LISTED = 4096
# Candidates that are measured a second time at most.
MAX_LOOKS = 8


class MeasuringError(MlcError):
    """Nothing can be measured, whatever the candidate: the text says why."""


class Measurer(Protocol):
    """Runs scheduled nests on the target."""

    def measure(self, candidates: list[Schedule]) -> Iterable[Measurement]:
        """Seconds a call of each candidate in order (a median over warm calls), or the error that it met; each may come
        as soon as it is known. Raises MeasuringError."""
        ...

    def close(self) -> None:
        """Give back what measuring holds."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: counts of schedules, and seconds."""

    name: str
    measured: int
    failed: int
    elapsed: float
    budget: float
    default_seconds: float | None
    best_seconds: float | None
    best: str = ""


def tune(
    nest: LoopNest,
    target: Target,
    measurer: Measurer,
    budget_seconds: float,
    database: Database | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    batch: int = 4,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Trace:
    """The trace of the fastest schedule that was found within ``budget_seconds``.

    The default schedule is measured first, and once more against the winner at the end: the result is never slower than
    it as measured. What the database holds already is not measured again. An interrupt passes through, and everything
    measured before it is in the database.

    Raises:
        ScheduleError: no rule matches the nest.
        MeasuringError: the measurer's.
    """
    space = design_space(nest, target)
    search = _Search(
        space, measurer, database, structural_key(nest), progress, budget_seconds, clock, random.Random(seed)
    )
    return search.run(batch)


@dataclass(slots=True)
class _Search:
    space: DesignSpace
    measurer: Measurer
    database: Database | None
    workload: str
    progress: Callable[[Progress], None] | None
    budget: float
    clock: Callable[[], float]
    random: random.Random
    begun: float = 0.0
    results: dict[str, float | None] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)
    points: dict[str, Point] = field(default_factory=dict)
    seen: set[Point] = field(default_factory=set)
    values: list[Mapping[str, tuple[Value, ...]]] = field(default_factory=list)
    default: str = ""

    def run(self, batch: int) -> Trace:
        self.begun = self.clock()
        self.values = [r.parameters(self.space.nest, self.space.target) for r in self.space.rules]
        known = self.database.measured(self.workload, self.space.target) if self.database else {}
        first = self._first()
        self.default = first.schedule.trace.to_json()
        self._measure([first])
        waiting: list[Candidate] = []
        for candidate in self._candidates(known):
            waiting.append(candidate)
            if len(waiting) >= batch:
                self._measure(waiting)
                waiting = []
            if self._elapsed() >= self.budget:
                break
        if waiting and self._elapsed() < self.budget:
            self._measure(waiting)
        return self._winner()

    def _first(self) -> Candidate:
        """The default: the first rule that applies, with its default parameters."""
        for k, values in enumerate(self.values):
            candidate = self._candidate((k, tuple((n, v[0]) for n, v in values.items())))
            if candidate is not None:
                return candidate
        raise ScheduleError("tune", f"no rule applies to {self.space.nest.name}", self.space.nest)

    def _candidate(self, point: Point) -> Candidate | None:
        if point in self.seen:
            return None
        self.seen.add(point)
        rule: Rule = self.space.rules[point[0]]
        params: Params = dict(point[1])
        candidate = self.space.candidate(rule, params)
        if candidate is None:
            return None
        key = candidate.schedule.trace.to_json()
        if key in self.points:  # other parameters that make the same loops
            return None
        self.points[key] = point
        self.traces[key] = candidate.schedule.trace
        return candidate

    def _candidates(self, known: Mapping[str, float | None]) -> Iterator[Candidate]:
        """Points worth measuring, for as long as there are any; each depends on what the last ones took."""
        for point in self._points():
            candidate = self._candidate(point)
            if candidate is None:
                continue
            key = candidate.schedule.trace.to_json()
            if key in known:
                self.results[key] = known[key]
                continue
            yield candidate

    def _points(self) -> Iterator[Point]:
        for k, values in enumerate(self.values):
            yield (k, tuple((n, v[0]) for n, v in values.items()))
        rest = self._rest()
        while True:
            fresh = [p for p in self._neighbours() if p not in self.seen]
            if fresh:
                yield self.random.choice(fresh)
                continue
            point = next(rest, None)
            if point is None:
                return
            yield point

    def _neighbours(self) -> list[Point]:
        """The best point with one parameter changed."""
        best = self._best()
        if best is None:
            return []
        rule, params = self.points[best]
        return [
            (rule, (*params[:k], (name, other), *params[k + 1 :]))
            for k, (name, value) in enumerate(params)
            for other in self.values[rule][name]
            if other != value
        ]

    def _rest(self) -> Iterator[Point]:
        """The points of all rules in random order; of a space too large to list, random draws."""
        for k, values in enumerate(self.values):
            count = 1
            for v in values.values():
                count *= len(v)
            if count <= MAX_LISTED:
                listed = [tuple(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
                self.random.shuffle(listed)
                yield from ((k, point) for point in listed)
            else:
                for _ in range(MAX_LISTED):
                    yield (k, tuple((n, self.random.choice(v)) for n, v in values.items()))

    # --- results ------------------------------------------------------------------------------------------------------

    def _measure(self, candidates: list[Candidate]) -> None:
        # Each is recorded before the next is measured, so that an interrupt loses nothing.
        found = self.measurer.measure([c.schedule for c in candidates])
        for candidate, result in zip(candidates, found, strict=True):
            self._keep(candidate.schedule.trace, result)

    def _keep(self, trace: Trace, result: Measurement) -> None:
        seconds = None if isinstance(result, Exception) else float(result)
        self.results[trace.to_json()] = seconds
        if self.database is not None:
            error = str(result) if isinstance(result, Exception) else ""
            self.database.record(self.workload, self.space.target, trace, seconds, error)
        self._report()

    def _winner(self) -> Trace:
        """The fastest by a second look, side by side with the default.

        Of many noisy times the least is a lucky one. A second look puts an honest time in its place, so the one that is
        fastest then may be another, which is looked at in its turn; what is recorded in the end is what was seen twice.
        """
        looked: set[str] = {self.default}
        while (best := self._best()) is not None and best not in looked and len(looked) <= MAX_LOOKS:
            looked.add(best)
            pair = [self.default, best]
            schedules = [self._again(k) for k in pair]
            for key, result in zip(pair, self.measurer.measure(schedules), strict=True):
                self._keep(self.traces[key], result)
        return self.traces[best if best in looked and best is not None else self.default]

    def _again(self, key: str) -> Schedule:
        rule, params = self.points[key]
        candidate = self.space.candidate(self.space.rules[rule], dict(params))
        assert candidate is not None, "a point that applied once applies always"
        return candidate.schedule

    def _best(self) -> str | None:
        timed = {k: s for k, s in self.results.items() if s is not None and k in self.points}
        return min(timed, key=timed.__getitem__, default=None)

    def _elapsed(self) -> float:
        return self.clock() - self.begun

    def _report(self) -> None:
        if self.progress is None:
            return
        best = self._best()
        text = ""
        if best is not None:
            rule, params = self.points[best]
            text = f"{self.space.rules[rule].name}({', '.join(f'{k}={v}' for k, v in params)})"
        self.progress(
            Progress(
                self.space.nest.name, len(self.results), sum(s is None for s in self.results.values()),
                self._elapsed(), self.budget, self.results.get(self.default),
                None if best is None else self.results[best], text,
            )
        )  # fmt: skip
