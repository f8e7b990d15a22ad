"""Which schedule a kernel gets: one that is measured now, the fastest measured before, or its rule's default.

For a GPU that is not here times are predicted instead, where tuning is asked for. They decide the kernels of that
compilation alone, which have keys of their own in caches, and stand apart from what was measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

from ...ir.function.function import TensorFunction
from ...ir.nest.loops import LoopNest, blocks
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ...runtime.counters import counters
from ...runtime.log import logger
from ...runtime.settings.options import Options
from ...runtime.targets import is_here, named_target
from ...runtime.timing import PhaseTimer
from ...runtime.tuning.machine import shipped, tuning_database
from ...runtime.tuning.progress import Totals, TuneProgress, outcome_text
from ...scheduler.error import ScheduleError
from ...scheduler.rules import default_schedule
from ...scheduler.schedule.carry import carried
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.schedule.trace import Trace
from ...scheduler.tuning.database import Database, Record, Similar
from ...scheduler.tuning.database.shipped import FOLDER, Shipped
from ...scheduler.tuning.database.verify import replayed
from ...scheduler.tuning.features import about_workload
from ...scheduler.tuning.measurer import Measurer, MeasuringError
from ...scheduler.tuning.model_choice import SEEDS, ChoosingRanker, chosen_by_model
from ...scheduler.tuning.ranker import Of, RankerError, shipped_rankers
from ...scheduler.tuning.search import Search, SearchResult
from ...scheduler.tuning.seeds import seeds, workload_of
from ...scheduler.tuning.space import Draft, Numerics, Space
from ...scheduler.tuning.strategies import Evolution
from ...scheduler.tuning.tune import TuningJob, search_of, tune_together
from .predicting import PredictingMeasurer, measurer_of

_LOG = logger(__name__)
# Schedules by kernel and target.
ByRules: TypeAlias = dict[tuple[str, Target], Schedule]
DATABASE = "tuning.sqlite"
# What a launch costs besides its bytes, in bytes: no kernel is so small that it gets no share of the budget.
_LAUNCH_BYTES = 1 << 16
# Candidates that are chosen before the first of them is measured, as many as compile side by side at least.
_BATCH = 8


def rankers_for(target: Target) -> Mapping[Of, ChoosingRanker] | None:
    """The models of drafts and of nests that come with the package for a kind of target; None where there are none."""
    try:
        return shipped_rankers("gpu" if target.is_gpu else "cpu")
    except RankerError as error:
        _LOG.warning("kernels are scheduled without the model of tuning: %s", error)
        return None


@dataclass(slots=True)
class Budget:
    """Seconds of tuning for one graph, and what each kernel costs a run of it, as ``tuning_costs`` says."""

    seconds: float
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TunedNest:
    """What came of tuning a nest: a search, or why there was none; ``predicted``: nothing ran."""

    nest: LoopNest
    outcome: SearchResult | MeasuringError
    predicted: bool


def tuning_costs(functions: Mapping[str, TensorFunction], calls: Mapping[str, int]) -> dict[str, float]:
    """What each function costs a run of its graph, as bytes moved at typical sizes."""
    return {name: calls.get(name, 1) * (_LAUNCH_BYTES + _bytes(f)) for name, f in functions.items()}


def _bytes(function: TensorFunction) -> int:
    buffers = (*function.inputs, *(o.buffer for o in function.outputs))
    return sum(function.symbols.hint(b.numel) * b.dtype.itemsize for b in buffers)


class ChosenBy(Enum):
    """Who chose a kernel's schedule."""

    DEFAULT = "by default"
    MEASURED = "by tuning"
    RECORDED = "by an earlier tuning"
    PREDICTED = "by prediction"
    MODEL = "by the model"
    RANK = "by a rank of this job"
    HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a schedule came from; ``outcome`` is the search that was made, ``record`` what an earlier one found."""

    source: ChosenBy
    outcome: SearchResult | None = None
    record: Record | None = None

    def __str__(self) -> str:
        """``by tuning: 1.31x of the default (1.28 to 1.33, noise 1 %), 40 candidates, 3 failed``."""
        if self.outcome is not None:
            return f"{self.source.value}: {outcome_text(self.outcome)}"
        if self.record is not None and self.record.speedup is not None:
            return f"{self.source.value}: {self.record.speedup:.2f}x of the default, on {self.record.date[:10]}"
        return self.source.value


BY_DEFAULT, BY_HAND = Choice(ChosenBy.DEFAULT), Choice(ChosenBy.HAND)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where schedules come from in one compilation. ``budget`` is None where nothing is to be measured, and
    ``workers`` processes at most compile candidates. ``predictions`` are what is known of GPUs that are not here.
    ``calls`` is how often the graph runs each kernel. With ``by_model`` the shipped model picks, and nobody looks into
    databases. ``anew``: what is chosen takes the place of what caches have."""

    database: Database | None
    budget: Budget | None
    timer: PhaseTimer
    measurer: Callable[[LoopNest, Target, int], Measurer | None] = measurer_of
    workers: int = 0
    predictions: Database | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    numerics: Numerics = "any"
    by_model: bool = False
    anew: bool = False
    rankers: Callable[[Target], Mapping[Of, ChoosingRanker] | None] = rankers_for
    shipped: Shipped = field(default_factory=shipped)
    # By kernel and target, of one plan: the schedules that rules have made of it, for its time or its code.
    by_rules: ByRules | None = None
    # By kernel, as they are made.
    choices: dict[str, Choice] = field(default_factory=dict)
    # By target and workload: what tuning has found.
    tuned: dict[tuple[Target, str], TunedNest] = field(default_factory=dict)
    # By target and workload: what the ranks of a job have agreed on, None for the default.
    agreed: dict[tuple[Target, str], Trace | None] = field(default_factory=dict)

    def schedule(self, name: str, nest: LoopNest, target: Target) -> Schedule:
        """The schedule of a kernel. Raises ScheduleError where no rule applies."""
        choice, schedule = self._agreed(name, nest, target) or self._chosen(name, nest, target)
        self.choices[name] = choice
        return schedule

    def tune(self, kernels: Sequence[tuple[str, LoopNest, Target]]) -> None:
        """Tune kernels of the graph together, within what is left of its budget: the next batch is for the kernel that
        gains most by it. Equal nests are one. ``schedule`` takes what is found."""
        if self.budget is None or self.by_model:
            return
        jobs: dict[tuple[Target, str], TuningJob] = {}
        predicts = False
        before = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self.timer.phase("tune"))
            progress = stack.enter_context(TuneProgress(done="predicted" if _is_predicted(kernels) else "measured"))
            for name, nest, target in kernels:
                key = (target, structural_key(nest))
                calls, cost = self.calls.get(name, 1), self.budget.costs.get(name, 0.0)
                if key in jobs:
                    jobs[key] = replace(jobs[key], calls=jobs[key].calls + calls)
                elif key not in self.tuned and (measurer := self.measurer(nest, target, self.workers)) is not None:
                    stack.enter_context(closing(measurer))
                    predicts = isinstance(measurer, PredictingMeasurer)
                    # What was measured elsewhere is worth more than a prediction.
                    if predicts and self._known(nest, target) is not None:
                        continue
                    with suppress(ScheduleError):  # no rule: ``schedule`` says so
                        search = self._search(nest, target, measurer, predicts, progress)
                        jobs[key] = TuningJob(name, search, calls, cost / calls)
            of_job = {job.name: key for key, job in jobs.items()}
            found = tune_together([*jobs.values()], self.budget.seconds, batch=max(_BATCH, self.workers))
        self.budget.seconds = max(0.0, self.budget.seconds - (time.monotonic() - before))
        for name, outcome in found.items():
            search = jobs[of_job[name]].search
            self.tuned[of_job[name]] = TunedNest(search.nest, outcome, predicts)
            if isinstance(outcome, MeasuringError):
                _LOG.warning("%s is not tuned, for %s; it gets the schedule that it has anyway", name, outcome)
            else:
                counters.add("kernels_tuned")

    @property
    def found_faster(self) -> bool:
        """Whether a kernel has a schedule that was measured now."""
        return any(c.source is ChosenBy.MEASURED for c in self.choices.values())

    def tell(self, more: str = "") -> None:
        """Say what tuning came to, and ``more``, in one line of standard error, whether that is a terminal or not."""
        found: dict[int, tuple[SearchResult, int]] = {}
        for name, c in self.choices.items():
            if c.outcome is not None and (c.source is ChosenBy.MEASURED or c.source is ChosenBy.DEFAULT):
                _, calls = found.get(id(c.outcome), (c.outcome, 0))
                found[id(c.outcome)] = c.outcome, calls + self.calls.get(name, 1)
        totals = Totals.of(found.values()) if found else None
        told = [t for t in (str(totals) if totals else "", more) if t]
        if told:
            print("; ".join(told), file=sys.stderr, flush=True)
        if totals is not None and totals.warning:
            _LOG.warning("%s", totals.warning)

    def _agreed(self, name: str, nest: LoopNest, target: Target) -> tuple[Choice, Schedule] | None:
        """What the ranks have agreed on. A schedule that does not apply here is the default one: it applies nowhere."""
        key = (target, structural_key(nest)) if self.agreed else None
        if key not in self.agreed:
            return None
        trace, own = self.agreed[key], self.choices.get(name)
        schedule = None if trace is None else self._replayed(trace, nest, target)
        if schedule is None:
            return BY_DEFAULT, self._by_rule(name, nest, target)
        return (own if own is not None and own.outcome is not None else Choice(ChosenBy.RANK)), schedule

    def _chosen(self, name: str, nest: LoopNest, target: Target) -> tuple[Choice, Schedule]:
        if self.by_model:
            return self._by_model(nest, target) or (BY_DEFAULT, self._by_rule(name, nest, target))
        if self.budget is not None:
            key = (target, structural_key(nest))
            if key not in self.tuned:
                self.tune([(name, nest, target)])
            found = self.tuned.get(key)
            if found is not None and isinstance(found.outcome, SearchResult):
                source = ChosenBy.PREDICTED if found.predicted else ChosenBy.MEASURED
                schedule = carried(found.outcome.trace, found.nest, nest)
                return Choice(source if found.outcome.is_faster else ChosenBy.DEFAULT, found.outcome), schedule
        return self._known(nest, target) or (BY_DEFAULT, self._by_rule(name, nest, target))

    def _by_rule(self, name: str, nest: LoopNest, target: Target) -> Schedule:
        """The schedule of its rule, which is made once for a kernel of a plan."""
        if self.by_rules is None:
            return default_schedule(nest, target)
        if (name, target) not in self.by_rules:
            self.by_rules[name, target] = default_schedule(nest, target)
        return self.by_rules[name, target]

    def _known(self, nest: LoopNest, target: Target) -> tuple[Choice, Schedule] | None:
        """The best schedule that was measured and applies."""
        record = self.database.lookup(structural_key(nest), target) if self.database is not None else None
        schedule = self._replayed(record.trace, nest, target) if record is not None else None
        return None if schedule is None else (Choice(ChosenBy.RECORDED, record=record), schedule)

    def _by_model(self, nest: LoopNest, target: Target) -> tuple[Choice, Schedule] | None:
        rankers = self.rankers(target)
        if rankers is None:
            return None
        with self.timer.phase("tune"):
            space = Space(nest, target, self._numerics_of(nest))
            schedule = chosen_by_model(space, rankers["draft"], rankers["nest"], self._shipped_seeds(space))
        return None if schedule is None else (Choice(ChosenBy.MODEL), schedule)

    def _shipped_seeds(self, space: Space) -> list[Draft]:
        """What came with the package of similar nests: of that the model may take, since it is the same everywhere."""
        if not self.shipped.has_any:
            return []
        workload = workload_of(space.nest, about_workload(space))
        found = (Similar.of(row) for row in self.shipped.similar(workload))
        return seeds(space, workload, [s for s in found if s is not None], SEEDS)

    def _search(
        self, nest: LoopNest, target: Target, measurer: Measurer, predicts: bool, progress: TuneProgress
    ) -> Search:
        rankers: Mapping[Of, ChoosingRanker] = self.rankers(target) or {}
        drafts, nests = rankers.get("draft"), rankers.get("nest")
        return search_of(
            nest, target, measurer, self.predictions if predicts else self.database, progress,
            numerics=self._numerics_of(nest), ranker=nests,
            strategy=partial(Evolution, draft_ranker=drafts, nest_ranker=nests),
        )  # fmt: skip

    def _numerics_of(self, nest: LoopNest) -> Numerics:
        """Where results have to have the same bits, sums keep their order."""
        fixed = self.numerics == "same" or torch.are_deterministic_algorithms_enabled()
        return "same" if fixed and any(b.is_reduction for b, _ in blocks(nest)) else "any"

    def _replayed(self, trace: Trace, nest: LoopNest, target: Target) -> Schedule | None:
        """A recorded schedule, or None where it is of an older version and does not apply any more, or may not."""
        if self._numerics_of(nest) == "same":
            return Space(nest, target, "same").schedule(trace)
        try:
            return replayed(trace, nest)
        except ScheduleError as error:
            _LOG.info("%s: a recorded schedule does not apply any more (%s)", nest.name, error.reason)
            return None


def _is_predicted(kernels: Sequence[tuple[str, LoopNest, Target]]) -> bool:
    return any(target.is_gpu and not is_here(target) for _, _, target in kernels)


def tuning_of(
    options: Options,
    timer: PhaseTimer,
    costs: Mapping[str, float],
    may_measure: bool,
    calls: Mapping[str, int] | None = None,
    by_rules: ByRules | None = None,
) -> Tuning:
    """What the settings say: the database beside the cache, and a budget where tuning is asked for and can be done."""
    predicts, by_model = predicted_schedules(options), options.tune == "model"
    budget = Budget(options.tune_budget, costs) if options.tune is True and (may_measure or predicts) else None
    path = options.cache_dir / DATABASE
    # A database that nobody has written is not made only to find nothing in it.
    wanted = options.cache and not by_model and (budget is not None or path.exists() or FOLDER.is_dir())
    database = _database(path) if wanted else None
    predictions = _database(path, predicted=True) if options.cache and predicts else None
    return Tuning(
        database, budget, timer, workers=options.compile_workers, predictions=predictions, calls=dict(calls or {}),
        numerics="same" if options.tune_numerics == "same" else "any", by_model=by_model,
        anew=budget is not None or options.tune == "replay", by_rules=by_rules,
    )  # fmt: skip


def by_default(tuning: Tuning) -> Tuning:
    """Where schedules come from in a graph that is to have those of its rules: its kernels are made anew, since others
    may have been found for them."""
    return Tuning(None, None, tuning.timer, calls=tuning.calls, anew=True, by_rules=tuning.by_rules)


def graph_database(options: Options) -> Database | None:
    """The database of what was measured of whole graphs; None where there is none, or nobody has written one."""
    path = options.cache_dir / DATABASE
    if not options.cache or options.tune == "model" or not (options.tune is True or path.exists()):
        return None
    return _database(path)


def predicted_schedules(options: Options) -> bool:
    """Whether kernels are tuned for a GPU that is not here."""
    if options.tune is not True or options.gpu is None:
        return False
    return not is_here(named_target(str(options.target)))


@lru_cache(maxsize=8)
def _database(path: Path, predicted: bool = False) -> Database:
    """One connection a file, table and process."""
    return tuning_database(path, predicted=predicted)
