"""Tuning: one nest, or all nests of a graph within one budget, the next batch for that which gains most by it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ...ir.nest.loops import LoopNest
from ...ir.nest.positions import named_by_position
from ...ir.target import Target
from .database import Records
from .features import about_workload
from .measurer import Measurer, MeasuringError
from .search import FIRST_PROMISE, Progress, Search, SearchResult
from .seeds import seeds_of, workload_of
from .space import Numerics, Space
from .strategies import Evolution, Ranker, Strategy

# Seconds that are kept for the last race of each search that has found something; how many times less than a batch it
# costs to begin a search.
LAST_RACE, BEGUN_CHEAPLY = 0.3, 8.0


def tune(
    nest: LoopNest,
    target: Target,
    measurer: Measurer,
    budget_seconds: float,
    database: Records | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    numerics: Numerics = "any",
    strategy: Callable[[Space, random.Random], Strategy] = Evolution,
    ranker: Ranker | None = None,
    batch: int = 8,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The fastest schedule that was found within ``budget_seconds``, or in three rounds that gained less than 1 %.

    A schedule other than the default is the result only where a race of its own says so (``Race.is_better``). What
    ``database`` holds of the same code is not measured again, and what similar nests have chosen is tried first. An
    interrupt passes through, and everything measured before it is in the database. ``numerics`` is as for ``Space``;
    ``ranker`` scores ``NEST_FEATURES``, to be told beside what was measured.

    Raises:
        ScheduleError: no rule matches the nest.
        MeasuringError: the measurer's.
    """
    begun = clock()
    search = search_of(
        nest, target, measurer, database, progress, numerics=numerics, strategy=strategy, ranker=ranker, seed=seed,
        clock=clock,
    )  # fmt: skip
    search.until, search.told = begun + budget_seconds, (begun, budget_seconds)
    search.begin()
    while clock() < search.until and not search.is_over:
        search.batch(batch)
    return search.finish()


def search_of(
    nest: LoopNest,
    target: Target,
    measurer: Measurer,
    database: Records | None = None,
    progress: Callable[[Progress], None] | None = None,
    *,
    numerics: Numerics = "any",
    strategy: Callable[[Space, random.Random], Strategy] = Evolution,
    ranker: Ranker | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """A search that has not begun; the arguments are as for ``tune``. Raises ScheduleError where no rule matches."""
    by_position = named_by_position(nest)
    space = Space(by_position, target, numerics)
    workload = workload_of(by_position, about_workload(space))
    proposing = strategy(space, random.Random(seed))
    if database is not None and (seeds := seeds_of(space, workload, database)):
        proposing.suggest(seeds)
    return Search(nest, space, proposing, measurer, database, workload, ranker, progress, clock)


@dataclass(frozen=True, slots=True)
class TuningJob:
    """A nest of a graph: its search, how often the graph runs it, and what a call may take before that is measured, in
    units that are the same for all jobs."""

    name: str
    search: Search
    calls: float = 1.0
    expected: float = 1.0


def tune_together(
    jobs: Sequence[TuningJob], budget_seconds: float, *, batch: int = 8, clock: Callable[[], float] = time.monotonic
) -> dict[str, SearchResult | MeasuringError]:
    """Tune several nests within one budget. Each batch goes to the nest with the largest calls × time × predicted gain.

    The prediction begins with what a batch gains in general, and goes on with what the last batches of the nest have
    gained, so that a nest that gains nothing falls behind. To begin a nest, which tells what its calls take, is cheap
    and counts as that. Time is kept for the last races. The result has the nests
    that were begun, and of those that cannot be measured why.
    """
    begun = clock()
    end = begun + budget_seconds
    open_, waiting = dict[str, TuningJob](), {j.name: j for j in jobs}
    found: dict[str, SearchResult | MeasuringError] = {}
    for job in jobs:
        job.search.until, job.search.told = end, (begun, budget_seconds)
    while True:
        promises = _promises(open_, waiting)
        racing = sum(j.search.has_found for j in open_.values())
        if not promises or clock() + LAST_RACE * racing >= end:
            break
        name = max(promises, key=lambda n: promises[n])
        try:
            if name in waiting:
                open_[name] = waiting.pop(name)
                open_[name].search.begin()
            else:
                open_[name].search.batch(batch)
        except MeasuringError as error:
            found[name] = error
            del open_[name]
    for name, job in sorted(open_.items(), key=lambda item: -item[1].calls * item[1].search.call_seconds):
        try:
            found[name] = job.search.finish()
        except MeasuringError as error:
            found[name] = error
    return found


def _promises(open_: Mapping[str, TuningJob], waiting: Mapping[str, TuningJob]) -> dict[str, float]:
    """Seconds of a run of the graph that the next batch of each job may save, of those whose searches go on."""
    known = [j.search.call_seconds / j.expected for j in open_.values() if j.expected > 0]
    unit = median(known) if known else 1.0
    promises = {n: j.calls * j.expected * unit * FIRST_PROMISE * BEGUN_CHEAPLY for n, j in waiting.items()}
    for name, job in open_.items():
        if not job.search.is_over:
            promises[name] = job.calls * job.search.call_seconds * job.search.promise
    return promises
