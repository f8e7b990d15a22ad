"""Which schedule a kernel gets: one that is measured now, the fastest measured before, or its rule's default.

For a GPU that is not here times are predicted instead, where tuning is asked for. They decide the kernels of that
compilation alone, which have keys of their own in caches, and stand apart from what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from ...ir.function.function import TensorFunction
from ...ir.nest.loops import LoopNest, blocks
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ...runtime.cache.fingerprint import environment_fingerprint
from ...runtime.counters import counters
from ...runtime.log import logger
from ...runtime.settings.options import Options
from ...runtime.targets import is_here, named_target
from ...runtime.timing import PhaseTimer
from ...runtime.tuning.progress import TuneProgress
from ...scheduler.error import ScheduleError
from ...scheduler.rules import default_schedule
from ...scheduler.schedule.schedule import Schedule, replay
from ...scheduler.schedule.trace import Trace
from ...scheduler.tuning.database import Database
from ...scheduler.tuning.tune import Measurer, MeasuringError, tune
from .predicting import PredictingMeasurer, measurer_of

_LOG = logger(__name__)
DATABASE = "tuning.sqlite"
# What a launch costs besides its bytes, in bytes: no kernel is so small that it gets no share of the budget.
_LAUNCH_BYTES = 1 << 16
# Candidates that are chosen before the first of them is measured, as many as compile side by side at least.
_BATCH = 4


@dataclass(slots=True)
class Budget:
    """Seconds of tuning for one graph. What a kernel leaves of its share goes to those after it."""

    seconds: float
    costs: Mapping[str, float]
    _open: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._open = dict(self.costs)

    def share(self, kernel: str) -> float:
        """Seconds for one kernel: in proportion to its cost among those that are not tuned yet."""
        cost = self._open.get(kernel, 0.0)
        return self.seconds * cost / sum(self._open.values()) if cost else 0.0

    def spend(self, kernel: str, seconds: float) -> None:
        """Take what a kernel used, which need not be its share."""
        self._open.pop(kernel, None)
        self.seconds = max(0.0, self.seconds - seconds)


def tuning_costs(functions: Mapping[str, TensorFunction], calls: Mapping[str, int]) -> dict[str, float]:
    """What each function costs a run of its graph, as bytes moved at typical sizes."""
    return {name: calls.get(name, 1) * (_LAUNCH_BYTES + _bytes(f)) for name, f in functions.items()}


def _bytes(function: TensorFunction) -> int:
    buffers = (*function.inputs, *(o.buffer for o in function.outputs))
    return sum(function.symbols.hint(b.numel) * b.dtype.itemsize for b in buffers)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Where schedules come from in one compilation. ``budget`` is None where nothing is to be measured, and
    ``workers`` processes at most compile candidates. ``predictions`` are what is known of GPUs that are not here."""

    database: Database | None
    budget: Budget | None
    timer: PhaseTimer
    measurer: Callable[[LoopNest, Target, int], Measurer | None] = measurer_of
    workers: int = 0
    predictions: Database | None = None

    def schedule(self, name: str, nest: LoopNest, target: Target) -> Schedule:
        """The schedule of a kernel. Raises ScheduleError where no rule applies."""
        if self.budget is not None:
            measurer = self.measurer(nest, target, self.workers) if not _is_fixed(nest) else None
            # What was measured elsewhere is worth more than a prediction.
            if isinstance(measurer, PredictingMeasurer) and (known := self._known(nest, target)) is not None:
                return known
            if measurer is not None:
                done = "predicted" if isinstance(measurer, PredictingMeasurer) else "measured"
                with self.timer.phase("tune"), TuneProgress(done=done) as progress, closing(measurer):
                    try:
                        return self._tuned(name, nest, target, measurer, self.budget, progress)
                    except MeasuringError as error:
                        _LOG.warning("%s is not tuned, for %s; it gets the schedule that it has anyway", name, error)
        return self._known(nest, target) or default_schedule(nest, target)

    def _known(self, nest: LoopNest, target: Target) -> Schedule | None:
        """The fastest schedule that was measured and applies."""
        record = (
            self.database.lookup(structural_key(nest), target)
            if self.database is not None and not _is_fixed(nest)
            else None
        )
        return _replayed(record.trace, nest) if record is not None else None

    def _tuned(
        self, name: str, nest: LoopNest, target: Target, measurer: Measurer, budget: Budget, progress: TuneProgress
    ) -> Schedule:
        before, share = time.monotonic(), budget.share(name)
        database = self.predictions if isinstance(measurer, PredictingMeasurer) else self.database
        try:
            trace = tune(nest, target, measurer, share, database, progress, batch=max(_BATCH, self.workers))
        finally:
            budget.spend(name, time.monotonic() - before)
        counters.add("kernels_tuned")
        return replay(trace, nest)


def tuning_of(options: Options, timer: PhaseTimer, costs: Mapping[str, float], may_measure: bool) -> Tuning:
    """What the settings say: the database beside the cache, and a budget where tuning is asked for and can be done."""
    predicts = predicted_schedules(options)
    budget = Budget(options.tune_budget, costs) if options.tune and (may_measure or predicts) else None
    path = options.cache_dir / DATABASE
    # A database that nobody has written is not made only to find nothing in it.
    database = _database(path) if options.cache and (budget is not None or path.exists()) else None
    predictions = _database(path, predicted=True) if options.cache and predicts else None
    return Tuning(database, budget, timer, workers=options.compile_workers, predictions=predictions)


def predicted_schedules(options: Options) -> bool:
    """Whether kernels are tuned for a GPU that is not here."""
    if not options.tune or options.target in (None, "cpu"):
        return False
    return not is_here(named_target(str(options.target)))


@lru_cache(maxsize=8)
def _database(path: Path, predicted: bool = False) -> Database:
    """One connection a file, table and process."""
    return Database(path, versions=environment_fingerprint(), predicted=predicted)


def _is_fixed(nest: LoopNest) -> bool:
    """Whether measurements may not choose: another schedule may add in another order."""
    return torch.are_deterministic_algorithms_enabled() and any(b.is_reduction for b, _ in blocks(nest))


def _replayed(trace: Trace, nest: LoopNest) -> Schedule | None:
    """A recorded schedule, or None where it is of an older version and does not apply any more."""
    try:
        return replay(trace, nest)
    except ScheduleError as error:
        _LOG.info("%s: a recorded schedule does not apply any more (%s)", nest.name, error.reason)
        return None
