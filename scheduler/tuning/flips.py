"""Search among the decisions of a graph: those with most at stake are taken otherwise, and the graph is timed whole.

Each other way is planned first, which compiles nothing: one that changes no call is none, and the predicted time of all
calls says which are tried first. Those are built, run once, and raced with the graph as it is and a copy of that. What
wins by samples of its own becomes the graph that the next ones are raced with, so that decisions are taken together
only where they gain together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...ir.errors import MlcError
from ..decisions import UNSEARCHED, DecisionOverrides, DecisionRecord
from ..decisions.decide import flipped
from .database import GraphDecisions, Verdict
from .measurer import Entered, Failure, MeasuringError
from .race import LEAST_GAIN, NOTHING_KNOWN, Estimate, Race
from .search import AT_A_TIME, FAR_BEHIND, FINAL_ROUNDS, FIRST_ROUNDS, MORE_ROUNDS

# Decisions that are looked at, those with most at stake; other ways that are predicted to take so many times as long
# are not; those that are raced at most, and how many at a time.
MOST_DECISIONS, HOPELESS, MOST_RACED, TOGETHER = 32, 4.0, 24, 4
# The share of the time that planning may take before anything runs.
PLANNING = 0.3


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph with a set of decisions, before anything is compiled. ``key`` is equal for equal calls, ``seconds`` what
    they take by the cost model. ``plan`` is for who builds it."""

    chosen: DecisionOverrides
    key: str
    seconds: float
    records: tuple[DecisionRecord, ...]
    plan: Any = field(default=None, repr=False, compare=False)


class GraphPrograms(Protocol):
    """Plans, builds and runs a graph with other decisions. What runs is known by number. All but ``plan`` raise
    MeasuringError."""

    def plan(self, chosen: DecisionOverrides) -> PlannedGraph:
        """Raises MlcError where the graph cannot be so."""
        ...

    def enter(self, planned: PlannedGraph) -> Entered | Failure:
        """Build it, run it once and compare its results with those of the first."""
        ...

    def copy(self, number: int) -> Entered | Failure:
        """The same program once more, elsewhere in memory."""
        ...

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """Seconds a run of each in so many rounds, or fewer, in which they take turns."""
        ...

    def leave(self, numbers: Sequence[int]) -> None:
        """Forget what takes part no more."""
        ...


@dataclass(slots=True)
class FlipTrial:
    """What became of one other way: of which decision, what the graph was predicted to take longer (seconds), and how
    it compares with the graph that it was raced with; None where it was not."""

    record: DecisionRecord
    option: str
    planned: PlannedGraph
    predicted: float
    found: Estimate | None = None
    verdict: Verdict | None = None
    reason: str = ""
    number: int | None = None

    @property
    def told(self) -> str:
        return f"{self.record.name}: {self.option} rather than {self.record.chosen}"


@dataclass(frozen=True, slots=True)
class FlipSearch:
    """What a search ended with: the decisions to take (those that it was given where none won), how many times as fast
    the graph is, by samples of their own, the noise of a ratio, and all that was tried."""

    chosen: DecisionOverrides
    speedup: float
    sigma: float
    seconds: float
    before: float
    trials: tuple[FlipTrial, ...] = ()
    looked_at: int = 0
    # Other ways for which there was no time.
    unraced: int = 0

    @property
    def won(self) -> tuple[FlipTrial, ...]:
        """What was accepted, in order."""
        return tuple(t for t in self.trials if t.verdict is Verdict.ACCEPTED)


Recorder = Callable[[FlipTrial, float | None, float], None]


def search_flips(
    programs: GraphPrograms,
    begun: PlannedGraph,
    budget_seconds: float,
    *,
    fixed: Iterable[tuple[str, str]] = (),
    known: Mapping[DecisionOverrides, GraphDecisions] | None = None,
    record: Recorder | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FlipSearch:
    """Look for decisions that make a graph faster, within ``budget_seconds``.

    ``fixed`` decisions (kind and key) stay as they are. What is ``known`` of a set to fail or to be no faster is not
    tried again. ``record`` is told of each result when it is known, with seconds and noise.

    Raises:
        MeasuringError: the graph as it is does not run.
    """
    search = _FlipSearch(programs, begun, budget_seconds, frozenset(fixed), known or {}, record, clock, clock())
    return search.run()


@dataclass(slots=True)
class _FlipSearch:
    programs: GraphPrograms
    base: PlannedGraph
    budget: float
    fixed: frozenset[tuple[str, str]]
    known: Mapping[DecisionOverrides, GraphDecisions]
    record: Recorder | None
    clock: Callable[[], float]
    begun: float
    race: Race = field(init=False)
    trials: list[FlipTrial] = field(default_factory=list)
    taken: set[tuple[str, str]] = field(default_factory=set)
    looked_at: int = 0
    # Candidates that were raced once more so far: any of them might have been taken.
    asked: int = 0
    # The noise of the last race that decided anything.
    sigma: float = 0.0

    def run(self) -> FlipSearch:
        waiting = self._promising()
        if not waiting:
            return FlipSearch(self.base.chosen, 1.0, 0.0, self._elapsed(), 0.0, (), self.looked_at)
        self._enter_base(self.programs.enter(self.base))
        self._sampled(self.race, [], FIRST_ROUNDS)
        before, speedup = self.race.seconds(self.race.default), 1.0
        while waiting and self._has_time() and len(self.trials) < MOST_RACED:
            batch, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
            won = self._raced(batch)
            if won is None or won.found is None:
                continue
            speedup *= won.found.speedup
            self._take(won)
            again = [t for t in self.trials if t.found is not None and t.found.ratio < 1.0 and t is not won]
            waiting = self._atop([*again, *waiting])
        return FlipSearch(
            self.base.chosen, speedup, self.sigma, self._elapsed(), before, tuple(self.trials), self.looked_at,
            len(waiting),
        )  # fmt: skip

    # --- what is tried ------------------------------------------------------------------------------------------------

    def _promising(self) -> list[FlipTrial]:
        """Other ways of the decisions with most at stake that make another graph, those first that are predicted to be
        fastest."""
        found: list[FlipTrial] = []
        seen = {self.base.key}
        for r in self._weighed()[:MOST_DECISIONS]:
            self.looked_at += 1
            for option, more in flipped(r):
                cost = r.cost(r.chosen)
                if more is not None and cost and more > (HOPELESS - 1.0) * cost:
                    continue
                if self._elapsed() > PLANNING * self.budget and found:
                    break
                trial = self._planned(r, option)
                if trial is not None and trial.planned.key not in seen and not self._is_settled(trial):
                    seen.add(trial.planned.key)
                    found.append(trial)
        return sorted(found, key=lambda t: (t.predicted, -t.record.stake, t.record.name, t.option))

    def _weighed(self) -> list[DecisionRecord]:
        """Decisions that may be taken otherwise, and whose ways a race tells apart."""
        return [r for r in self.base.records if r.kind not in UNSEARCHED and (r.kind, r.key) not in self.fixed]

    def _planned(self, r: DecisionRecord, option: str) -> FlipTrial | None:
        chosen = self.base.chosen.having({(r.kind, r.key): option})
        try:
            planned = self.programs.plan(chosen)
        except MlcError:
            return None  # another way that this place only seemed to have
        return FlipTrial(r, option, planned, planned.seconds - self.base.seconds)

    def _is_settled(self, trial: FlipTrial) -> bool:
        known = self.known.get(trial.planned.chosen)
        if known is None or known.verdict is Verdict.ACCEPTED:
            return False
        return known.verdict is not Verdict.TIMED or (known.ratio or 0.0) >= 1.0

    def _atop(self, trials: Sequence[FlipTrial]) -> list[FlipTrial]:
        """The same ways on top of what was taken."""
        found, seen = list[FlipTrial](), {self.base.key}
        for t in trials:
            if (t.record.kind, t.record.key) in self.taken:
                continue
            again = self._planned(t.record, t.option)
            if again is not None and again.planned.key not in seen and not self._is_settled(again):
                seen.add(again.planned.key)
                found.append(again)
        return found

    # --- races --------------------------------------------------------------------------------------------------------

    def _enter_base(self, entered: Entered | Failure) -> None:
        if isinstance(entered, Failure):
            raise MeasuringError(f"the graph as it is does not run on random inputs: {entered.reason}")
        twin = self.programs.copy(entered.number)
        if isinstance(twin, Failure):
            raise MeasuringError(f"the graph ran once, and then not alike: {twin.reason}")
        self.race = Race(entered.number, twin.number)

    def _raced(self, batch: Sequence[FlipTrial]) -> FlipTrial | None:
        """The best of some candidates that is faster for sure."""
        racing: list[FlipTrial] = []
        for trial in batch:
            if not self._has_time():
                break
            self.trials.append(trial)
            entered = self.programs.enter(trial.planned)
            if isinstance(entered, Failure):
                self._fail(trial, entered)
            else:
                trial.number = entered.number
                racing.append(trial)
        if not racing:
            return None
        self._sampled(self.race, racing, FIRST_ROUNDS)
        close = [t for t in racing if t.number is not None and self._ratio(self.race, t) <= FAR_BEHIND]
        self._sampled(self.race, close, MORE_ROUNDS)
        self.sigma = self.race.sigma
        for trial in racing:
            if trial.number is not None:
                trial.found, trial.verdict = self.race.estimate(trial.number), Verdict.TIMED
        finalists = [t for t in racing if t.number is not None and t.found and t.found.gain > LEAST_GAIN]
        won = self._final(finalists) if finalists else None
        for trial in racing:
            if trial is not won and trial.number is not None:
                if trial.verdict is Verdict.TIMED:
                    self._tell(trial, self.race)
                self.programs.leave([trial.number])
        return won

    def _final(self, finalists: Sequence[FlipTrial]) -> FlipTrial | None:
        """Race those that seemed faster once more: by these samples alone one is taken."""
        self.asked += len(finalists)
        own, racing = Race(self.race.default, self.race.twin), list(finalists)
        for _ in range(-(-FINAL_ROUNDS // AT_A_TIME) * 2):
            if not racing or len(own.rounds) >= FINAL_ROUNDS:
                break
            self._sampled(own, racing, AT_A_TIME)
            racing = [t for t in racing if t.number is not None and self._ratio(own, t) < 1.0]
        self.sigma = own.sigma
        better = [t for t in racing if t.number is not None and own.is_better(t.number, self.asked)]
        won = min(better, key=lambda t: self._ratio(own, t), default=None)
        for trial in finalists:
            if trial.number is not None:
                trial.found = own.estimate(trial.number)
                trial.verdict = Verdict.ACCEPTED if trial is won else Verdict.REJECTED
                if trial is not won:
                    self._tell(trial, own)
        if won is not None:
            self._tell(won, own)
        return won

    def _take(self, won: FlipTrial) -> None:
        """Make what won the graph that the next ones are raced with."""
        assert won.number is not None
        self.programs.leave([self.race.default, self.race.twin])
        self.base = won.planned
        self.taken.add((won.record.kind, won.record.key))
        self._enter_base(Entered(won.number, won.planned.key))

    def _sampled(self, race: Race, trials: Sequence[FlipTrial], rounds: int) -> None:
        numbers = {t.number: t for t in trials if t.number is not None}
        if trials and not numbers:
            return
        times: dict[int, Sequence[float]] = {}
        for number, found in self.programs.samples([race.default, race.twin, *numbers], rounds).items():
            if not isinstance(found, Failure):
                times[number] = found
            elif number in numbers:
                self._fail(numbers[number], found)
            else:
                raise MeasuringError(f"the graph ran before, and now does not: {found.reason}")
        race.add(times)

    def _ratio(self, race: Race, trial: FlipTrial) -> float:
        assert trial.number is not None
        return race.estimate(trial.number).ratio

    def _fail(self, trial: FlipTrial, failure: Failure) -> None:
        trial.found, trial.verdict, trial.reason, trial.number = None, failure.verdict, failure.reason, None
        if self.record is not None:
            self.record(trial, None, 0.0)

    def _tell(self, trial: FlipTrial, race: Race) -> None:
        if self.record is not None and trial.number is not None:
            self.record(trial, race.seconds(trial.number), race.sigma)

    def _has_time(self) -> bool:
        return self._elapsed() < self.budget

    def _elapsed(self) -> float:
        return self.clock() - self.begun


def race_graphs(
    programs: GraphPrograms, default: PlannedGraph, other: PlannedGraph, rounds: int = FINAL_ROUNDS
) -> tuple[Estimate, float]:
    """How one program of a graph compares with another, and the noise. Raises MeasuringError where one of them does not
    run."""
    entered = programs.enter(default)
    if isinstance(entered, Failure):
        raise MeasuringError(f"the graph by default does not run on random inputs: {entered.reason}")
    twin, rival = programs.copy(entered.number), programs.enter(other)
    for failed in (twin, rival):
        if isinstance(failed, Failure):
            raise MeasuringError(f"the graph does not run as it did by default: {failed.reason}")
    assert isinstance(twin, Entered) and isinstance(rival, Entered)
    race = Race(entered.number, twin.number)
    for _ in range(-(-rounds // AT_A_TIME) * 2):
        if len(race.rounds) >= rounds:
            break
        found = programs.samples([race.default, race.twin, rival.number], AT_A_TIME)
        times: dict[int, Sequence[float]] = {}
        for number, samples in found.items():
            if isinstance(samples, Failure):
                raise MeasuringError(f"a program of the graph ran once, and then no more: {samples.reason}")
            times[number] = samples
        race.add(times)
    one = race.estimate(rival.number)
    return (one if one.count else NOTHING_KNOWN), race.sigma
