"""Measuring on machines of others: schedules go to the workers of any ``concurrent.futures.Executor``.

dask.distributed's ``client.get_executor()`` and Ray's are such. A worker times the default schedule beside those that
it is given, so that what comes back is a ratio of one machine; times of different ones never meet. A search that
measures here sees those ratios as times of the first machine. What is recorded is recorded under the session of the
worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...scheduler.error import ScheduleError
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.schedule.trace import Trace
from ...scheduler.tuning.database import Records, Session, Verdict, Workload, target_key
from ...scheduler.tuning.database.rows import checked_trace
from ...scheduler.tuning.database.verify import nest_of, replayed
from ...scheduler.tuning.tune import Measurement, MeasuringError
from ..cache.fingerprint import environment_fingerprint
from ..targets import cpu_target, is_here, target_for
from .machine import machine_facts, part_of
from .measure import MeasureError
from .measuring import measurer_for

# Seconds for a worker to answer, how often schedules are given to another one, and seconds between two of those.
LIMIT_SECONDS, TRIES, PAUSE_SECONDS = 600.0, 10, 0.2


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A schedule on a worker: ``ratio`` is its time over the default's there, None for one that failed."""

    trace: Trace
    session: Session
    target: str
    seconds: float | None
    ratio: float | None
    error: str = ""


class FleetMeasurer:
    """Times schedules of one nest on the workers of an executor. The first that is measured is the default schedule.

    A worker serves where it is of the target, of this version, and of the same part as the first that answered; others
    are passed over. ``batch`` schedules at most go to one worker at a time. ``runs`` are all results so far; they are
    recorded in ``database`` too, where one is given. Machines should have one worker with one thread each, or what runs
    beside a measurement disturbs it.
    """

    def __init__(
        self,
        nest: LoopNest,
        target: Target,
        executor: Executor,
        *,
        batch: int = 8,
        database: Records | None = None,
        limit: float = LIMIT_SECONDS,
        tries: int = TRIES,
    ) -> None:
        self.target = target
        self.runs: list[WorkerRun] = []
        self._workload = Workload.of(nest)
        self._executor = executor
        self._batch = batch
        self._database = database
        self._limit = limit
        self._tries = tries
        self._default = ""
        # Of the first machine: how rows name its part, and the default's seconds there.
        self._key = ""
        self._reference = 0.0
        self._recorded: set[str] = set()

    def measure(self, candidates: Sequence[Schedule]) -> Iterator[Measurement]:
        """Seconds a call of each schedule in order, or the error that it met, as the first machine would have them.

        Raises MeasuringError where no worker can measure, or the default schedule itself fails there.
        """
        texts = [c.trace.to_json() for c in candidates]
        if not self._default and texts:
            self._default = texts[0]
            self._take(self._ask([]), [])  # says which part it is, before there are several
        pieces = [texts[k : k + self._batch] for k in range(0, len(texts), self._batch)]
        begun = [self._submit(piece) for piece in pieces]
        try:
            for piece, future in zip(pieces, begun, strict=True):
                yield from self._take(self._ask(piece, future), piece)
        finally:
            for future in begun:
                future.cancel()

    def close(self) -> None:
        """Nothing is held: the executor is its owner's."""

    def _submit(self, piece: list[str]) -> Future[dict[str, Any]]:
        asked = {
            "workload": self._workload.key, "nest": self._workload.text, "target": asdict(self.target),
            "versions": environment_fingerprint(), "key": self._key, "traces": [self._default, *piece],
        }  # fmt: skip
        return self._executor.submit(measure_batch, asked)

    def _ask(self, piece: list[str], future: Future[dict[str, Any]] | None = None) -> dict[str, Any]:
        """What a worker answers that serves."""
        why = ""
        for number in range(self._tries):
            if number:
                time.sleep(PAUSE_SECONDS)
            try:
                future = self._submit(piece) if future is None else future
                answer = future.result(self._limit)
            except (Exception, CancelledError) as error:  # whatever an executor makes of a worker that is lost
                why = f"a worker was lost ({type(error).__name__}: {error})"
                if future is not None:
                    future.cancel()
            else:
                if "refused" not in answer:
                    return answer
                why = answer["refused"]
            future = None
        raise MeasuringError(f"no worker measures {self.target}: {why}")

    def _take(self, answer: dict[str, Any], piece: list[str]) -> list[Measurement]:
        """The results of a piece, and of the default before it."""
        session = Session(
            answer["session"], answer["versions"], answer["date"], tuple(tuple(f) for f in answer["facts"])
        )
        default, *seconds = answer["seconds"]
        if default is None:
            raise MeasuringError(f"the default schedule cannot be measured: {answer['errors'][0]}")
        self._key = self._key or answer["key"]
        self._reference = self._reference or default
        self._keep(WorkerRun(checked_trace(self._default), session, answer["key"], default, 1.0))
        found: list[Measurement] = []
        for text, taken, error in zip(piece, seconds, answer["errors"][1:], strict=True):
            if text == self._default:
                found.append(self._reference)
                continue
            ratio = None if taken is None else taken / default
            self._keep(WorkerRun(checked_trace(text), session, answer["key"], taken, ratio, error))
            found.append(MeasureError(error) if ratio is None else ratio * self._reference)
        return found

    def _keep(self, run: WorkerRun) -> None:
        self.runs.append(run)
        if self._database is None:
            return
        verdict = Verdict.FAILED if run.seconds is None else Verdict.TIMED
        self._database.record(
            self._workload, self.target, run.trace, run.seconds, run.error, ratio=run.ratio, verdict=verdict,
            session=run.session, key=run.target,
        )  # fmt: skip


# --- on a worker ------------------------------------------------------------------------------------------------------


def measure_batch(asked: dict[str, Any]) -> dict[str, Any]:
    """Time schedules of a nest in this process's machine, the default first: what a worker is asked. What is asked and
    answered is plain data."""
    target = Target(**asked["target"])
    if asked["versions"] != environment_fingerprint():
        return {"refused": "a worker has another version of torch-mlc, or of what it is built on"}
    with _threads(target):
        key = _key_here(target)
        wanted = asked["key"] or target_key(target)
        if key is None or not (key == wanted or (not asked["key"] and key.startswith(f"{wanted}:"))):
            return {"refused": f"a worker is {key or 'no such machine'}, not {wanted}"}
        session = _session(os.getpid())
        seconds, errors = _measured(nest_of(asked["workload"], asked["nest"]), target, asked["traces"])
    return {
        "session": session.id, "versions": session.versions, "date": session.date, "facts": session.facts, "key": key,
        "seconds": seconds, "errors": errors,
    }  # fmt: skip


def _measured(nest: LoopNest, target: Target, traces: list[str]) -> tuple[list[float | None], list[str]]:
    schedules: dict[int, Schedule] = {}
    seconds: list[float | None] = [None] * len(traces)
    errors = [""] * len(traces)
    for k, text in enumerate(traces):
        try:
            schedules[k] = replayed(checked_trace(text), nest)
        except ScheduleError as error:
            errors[k] = error.reason
    measurer = measurer_for(nest, target)
    if measurer is None or 0 not in schedules:
        return seconds, [errors[0] or "nothing here can time it", *errors[1:]]
    with closing(measurer):
        try:
            for k, found in zip(schedules, measurer.measure([*schedules.values()]), strict=True):
                seconds[k], errors[k] = (None, str(found)) if isinstance(found, Exception) else (float(found), "")
        except MeasuringError as error:
            seconds[0], errors[0] = None, str(error)
    return seconds, errors


def _key_here(target: Target) -> str | None:
    """How rows name the machine that a target is here; None where it is none."""
    if not target.is_gpu:
        here = cpu_target(target.cores)
    elif is_here(target):
        here = target_for(f"cuda:{torch.cuda.current_device()}")
    else:
        return None
    return target_key(here, part_of(here))


@contextmanager
def _threads(target: Target) -> Iterator[None]:
    """As many of torch's threads as the target has cores: many executors give their workers one."""
    before = torch.get_num_threads()
    try:
        if not target.is_gpu:
            torch.set_num_threads(target.cores)
        yield
    finally:
        with suppress(RuntimeError):
            torch.set_num_threads(before)


@cache
def _session(process: int) -> Session:
    """What a process measures is one session of its machine."""
    return Session.new(environment_fingerprint(), machine_facts())
