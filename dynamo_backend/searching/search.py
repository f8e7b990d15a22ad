"""What tuning does with a whole graph: it looks for other decisions first, then the kernels of what it found are tuned,
and at last the tuned program is raced with the one by default.

Decisions come first: a schedule that was tuned for a kernel would count against every graph without that kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ir.errors import MlcError
from ...ir.target import Target
from ...runtime.cache.fingerprint import key_of
from ...runtime.log import logger
from ...runtime.settings.options import Options
from ...runtime.tuning.progress import percent_text, seconds_text
from ...runtime.tuning.ranks import Ranks
from ...scheduler.decisions import Alternative, Decider, DecisionOverrides, text_key
from ...scheduler.tuning.database import Database, Verdict
from ...scheduler.tuning.flips import FlipSearch, FlipTrial, PlannedGraph, race_graphs, search_flips
from ...scheduler.tuning.measurer import MeasuringError
from ...scheduler.tuning.race import Estimate
from ..compiling.job import Job
from ..compiling.pass_lists import context_of
from ..compiling.plans import Plan
from ..compiling.tuning import Tuning, graph_database
from ..importing.graph_key import GraphKey
from .programs import JobPrograms

_LOG = logger(__name__)
# The shares of a graph's budget for decisions, and kept for the race of whole graphs; below so many seconds for them
# nothing is done: that long it takes to start the process that runs programs.
DECISIONS_SHARE, WHOLE_SHARE, LEAST_SECONDS = 0.35, 0.1, 4.0
# The decision whether a graph has the schedules that were found for its kernels.
SCHEDULES, TUNED, DEFAULT = "schedules", "tuned", "default"


def graph_name(key: GraphKey) -> str:
    """What a graph is called in the database: the same in every process and under other settings."""
    return key_of([key.parts[part] for part in ("graph", "what is known of sizes", "parameters")])


@dataclass(slots=True)
class GraphSearch:
    """What is known of the decisions of one graph, and what tuning makes of it. ``why`` says why nothing is raced."""

    job: Job
    key: GraphKey | None
    database: Database | None
    recorded: DecisionOverrides = DecisionOverrides()
    why: str = ""
    found: FlipSearch | None = None
    whole: Estimate | None = None
    kept: bool = True
    # Why the whole graph was not timed, where kernels were tuned.
    untimed: str = ""
    _begun: float = 0.0
    _spent: float = 0.0
    _programs: JobPrograms | None = field(default=None, repr=False)

    @classmethod
    def of(cls, job: Job, key: GraphKey | None, may_measure: bool) -> GraphSearch:
        """With what the database has of the graph."""
        options, database = job.options, graph_database(job.options)
        if database is None and options.tune is not True:
            return cls(job, key, None, why="nothing is to be measured")
        if options.tune == "model" or keeps_order(options) or job.region or job.devices != ["cpu"] or key is None:
            return cls(job, key, None, why="it keeps to the decisions by cost")
        if database is None:
            return cls(job, key, None, why=_why_not(job, may_measure))
        found = database.decisions(graph_name(key), _target(job))
        return cls(
            job, key, database, found.chosen if found is not None else DecisionOverrides(), _why_not(job, may_measure)
        )

    @property
    def decider(self) -> Decider | None:
        """Who is asked about decisions; nobody where nothing else is known and nobody wants to hear of them."""
        options, measured, recorded = self.job.options, DecisionOverrides(), self.recorded
        by_hand = options.decisions or DecisionOverrides()
        if self.found is not None:  # which says what there is, whatever was found before
            measured, recorded = self.found.chosen, DecisionOverrides()
        keyed = bool(by_hand or measured or recorded or self.job.fresh or options.tune is True)
        if not keyed and options.lock is None:
            return None
        return Decider(by_hand, measured, recorded, self.job.locked, keyed)

    @property
    def left(self) -> float:
        """Seconds of the graph's budget for its kernels."""
        budget = self.job.options.tune_budget
        return max(budget - self._spent - (0.0 if self.why else WHOLE_SHARE * budget), 0.0)

    def search(self) -> None:
        """Look for decisions that make the graph faster, where it can be run."""
        if self.why:
            return
        self._begun, options = time.monotonic(), self.job.options
        assert self.key is not None
        self._programs = programs = JobPrograms(self.job, self.key)
        name, target = graph_name(self.key), _target(self.job)
        known = self.database.tried_decisions(name, target) if self.database is not None else {}

        def record(trial: FlipTrial, seconds: float | None, sigma: float) -> None:
            if self.database is not None and trial.verdict is not None:
                found = trial.found
                self.database.record_decisions(
                    name, target, trial.planned.chosen, seconds, trial.reason,
                    ratio=found.ratio if found else None, count=found.count if found else 0, sigma=sigma,
                    # It is for the end of the search to accept a set.
                    verdict=Verdict.TIMED if trial.verdict is Verdict.ACCEPTED else trial.verdict,
                )  # fmt: skip

        try:
            with self.job.timer.phase("tune"):
                base = programs.plan(DecisionOverrides())
                fixed = (options.decisions or DecisionOverrides()).chosen
                share = DECISIONS_SHARE * options.tune_budget
                self.found = search_flips(programs, base, share, fixed=fixed, known=known, record=record)
        except MeasuringError as error:
            self.why = str(error)
            _LOG.info("%s: decisions are not searched: %s", self.job.name, error)
        else:
            self._keep(self.found.chosen, self.found.before / self.found.speedup)
        finally:
            self._spent = time.monotonic() - self._begun

    def race(self, plan: Plan, host: Any, kernels: Mapping[str, Any], tuning: Tuning) -> bool:
        """Race the tuned graph with the one by default, and say whether it is kept: where it is faster for sure."""
        if self.why or self._programs is None or self.found is None or not tuning.found_faster:
            return True
        if time.monotonic() - self._begun > self.job.options.tune_budget:
            self.untimed = "no time is left"
            return True
        programs, chosen = self._programs, self.found.chosen
        try:
            with self.job.timer.phase("tune"):
                default, tuned = (
                    PlannedGraph(chosen, "", 0.0, (), program)
                    for program in (programs.program(plan, chosen), programs.tuned(plan, host, kernels))
                )
                self.whole, _ = race_graphs(programs, default, tuned)
        except (MeasuringError, MlcError) as error:
            self.untimed = str(error)
            _LOG.info("%s: the whole graph is not timed: %s", self.job.name, error)
            return True
        self.kept = self.whole.high < 1.0
        if not self.kept:
            assert self.key is not None
            self._keep(chosen.having({(SCHEDULES, text_key([graph_name(self.key)])): DEFAULT}), 0.0)
        return self.kept

    def uses_schedules(self, decider: Decider | None) -> bool:
        """Whether the graph has the schedules that were found for its kernels."""
        if decider is None or self.key is None or self.job.options.tune is True:
            return True
        place = text_key([graph_name(self.key)])
        by_hand = self.job.options.decisions or DecisionOverrides()
        if (SCHEDULES, place) not in {**self.recorded.chosen, **by_hand.chosen}:
            return True
        ways = (Alternative(TUNED), Alternative(DEFAULT))
        return decider.decide(SCHEDULES, place, ways, TUNED, at=self.job.name) == TUNED

    def close(self) -> None:
        """Let go of what runs programs."""
        if self._programs is not None:
            self._programs.close()

    def __str__(self) -> str:
        """What came of it, for the line that tuning ends with; "" where nothing was done."""
        told = []
        if (f := self.found) is not None and f.looked_at:
            won = f"{len(f.won)} otherwise, {f.speedup:.2f}x" if f.won else "none better otherwise"
            left = f", {f.unraced} ways not raced" if f.unraced else ""
            noise = f" (noise {percent_text(f.sigma)}{left})" if f.trials else left
            what = "1 decision" if f.looked_at == 1 else f"{f.looked_at} decisions"
            told.append(f"searched {what} in {seconds_text(f.seconds)}: {won}{noise}")
        if self.whole is not None:
            speed = f"{self.whole.speedup:.2f}x"
            told.append(
                f"the whole graph by its schedules: {speed}" if self.kept
                else f"the whole graph is not faster by them for sure ({speed}), so it keeps the default ones"
            )  # fmt: skip
        if self.untimed:
            told.append(f"the whole graph was not timed: {self.untimed}")
        return "; ".join(told)

    def _keep(self, chosen: DecisionOverrides, seconds: float) -> None:
        if self.database is not None and self.key is not None:
            speedup = self.found.speedup if self.found is not None else 1.0
            self.database.record_decisions(
                graph_name(self.key), _target(self.job), chosen, seconds, ratio=1.0 / speedup, verdict=Verdict.ACCEPTED,
                sigma=self.found.sigma if self.found is not None else None,
            )  # fmt: skip


def keeps_order(options: Options) -> bool:
    """Whether results have to have the same bits whatever is tuned. What another decision does to them is not known, so
    none is taken then."""
    return options.tune_numerics == "same" or torch.are_deterministic_algorithms_enabled()


def _why_not(job: Job, may_measure: bool) -> str:
    options = job.options
    if options.tune is not True or not may_measure:
        return "nothing is to be measured"
    if job.regions:
        return "it has control flow"
    if DECISIONS_SHARE * options.tune_budget < LEAST_SECONDS:
        return "the budget is too small"
    if Ranks.of_job(0.0) is not None:
        return "ranks of a job would decide differently"
    return ""


def _target(job: Job) -> Target:
    return context_of(job.options).target_of("cpu")


__all__ = ["GraphSearch", "graph_name", "keeps_order"]
