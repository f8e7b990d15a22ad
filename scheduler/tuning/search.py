"""The search of one nest's schedules: a strategy proposes drafts, those whose code is new are built, run once, and
raced with the best so far and two copies of the default. What seemed fastest is raced once more in the end: by these
samples alone it is accepted. Every result is recorded when it is known.

The nest is searched by names of position, in which traces are kept, so that they serve every nest that is built alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from ...ir.nest.loops import LoopNest
from ..schedule.carry import carried
from ..schedule.trace import Trace
from .database import Record, Records, Verdict, Workload
from .features import nest_features
from .measurer import Entered, Failure, Measurer, MeasuringError
from .race import LEAST_GAIN, NOTHING_KNOWN, Estimate, Race
from .space import Draft, Space
from .strategies import Ranker, Strategy

# Rounds of a race: before those that are far behind give up (that much slower than the best), and after that.
FIRST_ROUNDS, MORE_ROUNDS, FAR_BEHIND = 4, 8, 1.2
# The last race: who takes part, in how many rounds, run so many at a time, and asked for so often at most.
FINALISTS, FINAL_ROUNDS, AT_A_TIME, MOST_ASKED = 3, 36, 9, 12
# Batches that gain less than what counts, after which a search ends.
PATIENCE = 3
# The share of its time that a batch is expected to save a kernel of which nothing is known, and how much of what was
# expected before counts beside the last batch.
FIRST_PROMISE, KEPT_PROMISE = 0.15, 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: counts of schedules, and seconds. ``found`` compares the best so far with the default."""

    name: str
    measured: int
    failed: int
    elapsed: float
    budget: float
    found: Estimate | None = None
    best: str = ""


@dataclass(slots=True)
class Trial:
    """What became of one candidate: ``told`` is its draft as text, ``score`` what the model gives it (higher is
    faster). ``found`` is None where it failed, for which ``reason`` says why."""

    draft: Draft
    trace: Trace
    told: str
    found: Estimate | None = None
    verdict: Verdict = Verdict.TIMED
    reason: str = ""
    code_hash: str = ""
    score: float | None = None
    # Its number in the race, while it takes part.
    number: int | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search ended with.

    ``trace`` is the schedule to take, the default's unless ``is_faster``; ``found`` compares it with the default, by
    samples of its own; ``sigma`` is the noise of a ratio (0.01 is 1 %). The search took ``seconds``, and a call of the
    default takes ``default_seconds``. ``hidden`` is what the best one seemed to gain where noise was above that.
    """

    name: str
    trace: Trace
    is_faster: bool
    found: Estimate
    sigma: float
    seconds: float
    default_seconds: float
    trials: tuple[Trial, ...]
    hidden: float = 0.0

    @property
    def failed(self) -> int:
        """Candidates without a time."""
        return sum(t.found is None for t in self.trials)


@dataclass(slots=True)
class Search:
    """The search of one nest, step by step: ``begin``, then ``batch`` as often as it is worth it, then ``finish``.

    ``nest`` is what the result's trace is for, ``space`` that of the nest by names of position. Beyond ``until`` (by
    ``clock``) no candidate is begun; ``told`` is what is left to say where progress is told: when all began, and the
    budget. All steps raise MeasuringError.
    """

    nest: LoopNest
    space: Space
    strategy: Strategy
    measurer: Measurer
    database: Records | None = None
    workload: Workload | None = None
    ranker: Ranker | None = None
    progress: Callable[[Progress], None] | None = None
    clock: Callable[[], float] = time.monotonic
    until: float = float("inf")
    told: tuple[float, float] = (0.0, float("inf"))
    # By the JSON of traces.
    trials: dict[str, Trial] = field(default_factory=dict)
    default: Trial = field(init=False)
    race: Race = field(init=False)
    # Seconds that it took so far; batches that gained nothing, one after the other; what the next may gain.
    seconds: float = 0.0
    stale: int = 0
    promise: float = FIRST_PROMISE
    is_exhausted: bool = False
    failed_before: frozenset[str] = frozenset()
    known: Mapping[str, Record] = field(default_factory=dict)
    known_traces: Mapping[str, Record] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no further batch is worth it: there is none, or three gained nothing."""
        return self.is_exhausted or self.stale >= PATIENCE

    @property
    def has_found(self) -> bool:
        """Whether something seems faster than the default, so that there will be a last race."""
        return bool(self._finalists())

    @property
    def call_seconds(self) -> float:
        """What a call takes by the best schedule so far."""
        return self.race.seconds(self.race.default) * min(self._best_ratio(), 1.0)

    def begin(self) -> None:
        """Run two copies of the default: the first of the rules' own schedules that does."""
        with self._timed():
            self._begin()

    def batch(self, count: int) -> None:
        """One batch of candidates."""
        with self._timed():
            drafts = self.strategy.propose(count)
            if not drafts:
                self.is_exhausted = True
                return
            before = self._best_ratio()
            self._round(drafts)
            gain = 1.0 - self._best_ratio() / before
            self.stale = 0 if gain > LEAST_GAIN else self.stale + 1
            self.promise = KEPT_PROMISE * self.promise + (1.0 - KEPT_PROMISE) * max(gain, 0.0)

    def finish(self) -> SearchResult:
        """Race those that seemed fastest once more: by the samples that they were chosen by they are lucky ones."""
        with self._timed():
            found = self._final()
        trace = carried(found.trace, self.space.nest, self.nest).trace
        return replace(found, trace=trace, seconds=self.seconds)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        before = self.clock()
        try:
            yield
        finally:
            self.seconds += self.clock() - before

    # --- the default --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._remember()
        why = ""
        for draft in self.space.first():
            trial = self._trial(draft)
            if trial is None:
                continue
            (entered,) = self._entered([trial])
            if isinstance(entered, Failure):
                why = why or entered.reason
                continue
            twin = self.measurer.copy(entered.number)
            if isinstance(twin, Failure):
                raise MeasuringError(f"the default schedule ran once, and then no more: {twin.reason}")
            self.default, self.race = trial, Race(entered.number, twin.number)
            self.known_traces = {
                r.trace.to_json(): r for r in self.known.values() if r.against == trial.code_hash and r.ratio
            }
            self._run([], FIRST_ROUNDS)
            return
        raise MeasuringError(f"no schedule of its rules runs: {why}")

    def _remember(self) -> None:
        if self.database is None or self.workload is None:
            return
        measured = self.database.measured(self.workload.key, self.space.target)
        self.failed_before = frozenset(text for text, seconds in measured.items() if seconds is None)
        found = self.database.by_code(self.workload.key, self.space.target)
        self.known = {h: r for h, r in found.items() if r.trace.to_json() in measured}

    # --- one round ----------------------------------------------------------------------------------------------------

    def _round(self, drafts: Sequence[Draft]) -> None:
        trials = [(d, self._trial(d)) for d in drafts]
        new: list[Trial] = []
        for draft, trial in trials:
            if trial is None:
                self.strategy.observe(draft, None)
            elif trial.found is None and trial.verdict is Verdict.TIMED and not self._was_known(trial):
                new.append(trial)
        racing = []
        for trial, entered in zip(new, self._entered(new), strict=False):
            if isinstance(entered, Entered) and not self._has_known_code(trial):
                racing.append(trial)
        self._race(racing)
        for draft, trial in trials:
            if trial is not None and (trial.found is not None or trial.verdict is not Verdict.TIMED):
                self.strategy.observe(draft, trial.found.speedup if trial.found else None)
        self._leave()

    def _trial(self, draft: Draft) -> Trial | None:
        """The candidate of a draft, which other drafts may have made before; None where it is illegal."""
        schedule = self.space.replayed(draft)
        if schedule is None:
            return None
        return self.trials.setdefault(schedule.trace.to_json(), Trial(draft, schedule.trace, str(draft)))

    def _was_known(self, trial: Trial) -> bool:
        """Take what the database knows of a schedule."""
        text = trial.trace.to_json()
        if text in self.failed_before:
            trial.verdict, trial.reason = Verdict.FAILED, "it failed before"
            return True
        record = self.known_traces.get(text)
        if record is not None and record.ratio:
            trial.found, trial.code_hash = _recorded(record), record.code_hash
        return record is not None

    def _has_known_code(self, trial: Trial) -> bool:
        """Take what is known of equal machine code."""
        twins = (t for t in self.trials.values() if t.code_hash == trial.code_hash and t.found and t is not trial)
        twin, record = next(twins, None), self.known.get(trial.code_hash)
        if twin is not None:
            trial.found = twin.found
        elif record is not None and record.against == self.default.code_hash and record.ratio:
            trial.found = _recorded(record)
        return trial.found is not None

    def _entered(self, trials: Sequence[Trial]) -> list[Entered | Failure]:
        """Build and run candidates, as far as there is time."""
        results = []
        schedules = [s for t in trials if (s := self.space.replayed(t.draft)) is not None]
        for trial, found in zip(trials, self.measurer.enter(schedules), strict=False):
            results.append(found)
            if isinstance(found, Failure):
                self._fail(trial, found)
            else:
                trial.number, trial.code_hash = found.number, found.code_hash
            self._report()
            if self.clock() >= self.until:
                break
        return results

    def _race(self, trials: Sequence[Trial]) -> None:
        if not trials:
            return
        best = self._best()
        beside = [best] if best is not None and best.number is not None and best not in trials else []
        self._run([*trials, *beside], FIRST_ROUNDS)
        limit = FAR_BEHIND * self._best_ratio()
        self._run([*(t for t in trials if t.found and t.found.ratio <= limit), *beside], MORE_ROUNDS)

    def _run(self, trials: Sequence[Trial], rounds: int) -> None:
        self._sampled(self.race, [t for t in trials if t is not self.default], rounds)
        for trial in (self.default, *trials):
            if trial.verdict is Verdict.TIMED:
                trial.found = self.race.estimate(self._number(trial))
                self._record(trial, self.race)
        self._report()

    def _sampled(self, race: Race, trials: Sequence[Trial], rounds: int) -> None:
        """Rounds of candidates and the default."""
        numbers = {self._number(t): t for t in trials}
        found = self.measurer.samples([race.default, race.twin, *numbers], rounds)
        times = {}
        for number, result in found.items():
            if not isinstance(result, Failure):
                times[number] = result
            elif number in numbers:
                self._fail(numbers[number], result)
            else:
                raise MeasuringError(f"the default schedule ran before, and now does not: {result.reason}")
        race.add(times)

    def _leave(self) -> None:
        """Only those that may win stay."""
        stay = {id(t) for t in self._finalists()} | {id(self.default)}
        gone = [t for t in self.trials.values() if t.number is not None and id(t) not in stay]
        self.measurer.leave([self._number(t) for t in gone])
        for trial in gone:
            trial.number = None

    # --- the end ------------------------------------------------------------------------------------------------------

    def _final(self) -> SearchResult:
        finalists = self._finalists()
        absent = [t for t in finalists if t.number is None]
        schedules = [s for t in absent if (s := self.space.replayed(t.draft)) is not None]
        for trial, entered in zip(absent, self.measurer.enter(schedules), strict=True):
            if isinstance(entered, Failure):
                self._fail(trial, entered)
            else:
                trial.number = entered.number
        finalists = [t for t in finalists if t.number is not None]
        own = Race(self.race.default, self.race.twin)
        tries = len(finalists)
        racing = finalists
        for _ in range(MOST_ASKED):
            if not racing or len(own.rounds) >= FINAL_ROUNDS:
                break
            self._sampled(own, racing, AT_A_TIME)
            racing = [t for t in racing if t.verdict is Verdict.TIMED and own.estimate(self._number(t)).ratio < 1.0]
        better = [t for t in racing if own.is_better(self._number(t), tries)]
        winner = min(better, key=lambda t: own.estimate(self._number(t)).ratio, default=self.default)
        race = own if own.rounds else self.race
        hidden = 0.0
        for trial in finalists:
            if trial.verdict is Verdict.TIMED:
                trial.found = own.estimate(self._number(trial))
                if trial not in better:
                    trial.verdict = Verdict.REJECTED
                    # Not by chance slower: what it gains may be real, and nobody can tell here.
                    hidden = max(hidden, trial.found.gain) if trial in racing else hidden
        winner.verdict = Verdict.ACCEPTED
        for trial in (self.default, *finalists):
            self._record(trial, race)
        self._report()
        is_faster = winner is not self.default
        found = winner.found or NOTHING_KNOWN
        return SearchResult(
            self.space.nest.name, winner.trace, is_faster, found, race.sigma, self.seconds,
            self.race.seconds(self.race.default), tuple(replace(t) for t in self._scored()),
            0.0 if is_faster or hidden <= LEAST_GAIN else hidden,
        )  # fmt: skip

    def _finalists(self) -> list[Trial]:
        """The fastest that seem to gain what counts, and whose code differs."""
        faster = [
            t for t in self.trials.values()
            if t.found is not None and t.verdict is Verdict.TIMED and t.found.gain > LEAST_GAIN
            and t is not self.default
        ]  # fmt: skip
        by_code: dict[str, Trial] = {}
        for t in sorted(faster, key=lambda t: (t.found.ratio if t.found else 1.0, t.number is None)):
            by_code.setdefault(t.code_hash, t)
        return list(by_code.values())[:FINALISTS]

    def _scored(self) -> list[Trial]:
        """All candidates, with what the model says of them."""
        trials = [*self.trials.values()]
        if self.ranker is not None:
            from_model = _scores(self.ranker, self.space, trials)
            for trial, score in zip(trials, from_model, strict=True):
                trial.score = score
        return trials

    # --- results ------------------------------------------------------------------------------------------------------

    def _number(self, trial: Trial) -> int:
        assert trial.number is not None, f"{trial.told} takes no part in the race"
        return trial.number

    def _fail(self, trial: Trial, failure: Failure) -> None:
        trial.found, trial.verdict, trial.reason, trial.number = None, failure.verdict, failure.reason, None
        if self.database is not None and self.workload is not None:
            self.database.record(
                self.workload, self.space.target, trial.trace, None, failure.reason, verdict=failure.verdict,
                code_hash=trial.code_hash, draft=_draft_text(trial.draft),
            )  # fmt: skip

    def _record(self, trial: Trial, race: Race) -> None:
        found = trial.found
        if self.database is None or self.workload is None:
            return
        if found is None or trial.number is None or not found.count:
            return
        sigma = race.sigma
        self.database.record(
            self.workload, self.space.target, trial.trace, race.seconds(trial.number), ratio=found.ratio,
            count=found.count, sigma=sigma if sigma < 1e9 else None, verdict=trial.verdict, code_hash=trial.code_hash,
            against=self.default.code_hash, draft=_draft_text(trial.draft),
        )  # fmt: skip

    def _best(self) -> Trial | None:
        timed = [t for t in self.trials.values() if t.found is not None and t.verdict is not Verdict.REJECTED]
        return min(timed, key=lambda t: t.found.ratio if t.found else 1.0, default=None)

    def _best_ratio(self) -> float:
        best = self._best()
        return 1.0 if best is None or best.found is None else best.found.ratio

    def _report(self) -> None:
        if self.progress is None:
            return
        best = self._best()
        trials = self.trials.values()
        begun, budget = self.told
        best_found, best_told = (best.found, best.told) if best is not None else (None, "")
        failed = sum(t.found is None and t.verdict is not Verdict.TIMED for t in trials)
        self.progress(
            Progress(
                self.space.nest.name, failed + sum(t.found is not None for t in trials), failed,
                self.clock() - begun, budget, best_found, best_told,
            )
        )  # fmt: skip


def _recorded(record: Record) -> Estimate:
    assert record.ratio is not None
    noise = 2.0 * (record.sigma or 0.0)
    return Estimate(record.ratio, record.ratio * (1.0 - noise), record.ratio * (1.0 + noise), record.count)


def _scores(ranker: Ranker, space: Space, trials: Sequence[Trial]) -> list[float | None]:
    schedules = [space.replayed(t.draft) for t in trials]
    rows = [nest_features(space, s) for s in schedules if s is not None]
    scores = iter(ranker.scores(np.stack(rows)) if rows else ())
    return [None if s is None else float(next(scores)) for s in schedules]


def _draft_text(draft: Draft) -> str:
    return json.dumps(draft.to_plain(), separators=(",", ":"), sort_keys=True)
