"""Measuring on machines of others: schedules go to the workers of any ``concurrent.futures.Executor``.

dask.distributed's ``client.get_executor()`` and Ray's are such. A worker times the default schedule beside those that
it is given, so that what comes back is a ratio of one machine; times of different ones never meet. A search that
measures here sees those ratios as times of the first machine. What is recorded is recorded under the session of the
worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any, TypeVar

import torch

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...scheduler.error import ScheduleError
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.schedule.trace import Trace
from ...scheduler.tuning.database import Records, Session, Verdict, Workload, target_key
from ...scheduler.tuning.database.rows import checked_trace
from ...scheduler.tuning.database.verify import nest_of, replayed
from ...scheduler.tuning.measurer import Entered, Failure, MeasuringError
from ..cache.fingerprint import environment_fingerprint
from ..targets import cpu_target, is_here, target_for
from .machine import machine_facts, part_of
from .measuring import measurer_for

T = TypeVar("T")
# Seconds for a worker to answer, how often schedules are given to another one, and seconds between two of those.
LIMIT_SECONDS, TRIES, PAUSE_SECONDS = 600.0, 10, 0.2


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A schedule on a worker in one race: ``ratio`` is its time over the default's there, None for one that failed."""

    trace: Trace
    session: Session
    target: str
    seconds: float | None
    ratio: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a worker says of schedules: samples in seconds by rounds, hashes of machine code, and why there are none;
    the default schedule's come first."""

    session: Session
    key: str
    samples: list[list[float]]
    codes: list[str]
    failures: list[Failure | None]


class FleetMeasurer:
    """Times schedules of one nest on the workers of an executor. The first that enters is the default schedule.

    A worker serves where it is of the target, of this version, and of the same part as the first that answered; others
    are passed over. ``batch`` schedules at most go to one worker at a time, and each time it builds and checks them:
    workers keep nothing. ``runs`` are all results so far; they are recorded in ``database`` too, where one is given.
    Machines should have one worker with one thread each, or what runs beside a measurement disturbs it.
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
        # The default's trace and the numbers under which it takes part; of the first machine, how rows name its part,
        # and the default's seconds there.
        self._default = ""
        self._first = 0
        self._key = ""
        self._reference = 0.0
        self._entered: dict[int, tuple[str, str]] = {}
        self._count = 0

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        """Have workers build each schedule, run it once and compare its results, in order, each piece as soon as it is
        known. Raises MeasuringError where no worker can measure, or the default schedule itself fails there."""
        texts = [c.trace.to_json() for c in candidates]
        if not self._default and texts:
            self._default = texts[0]
            for _ in self._asked([[]], 0):  # says which part it is, before there are several
                pass
        for piece, answer in self._asked(self._pieces(texts), 0):
            for text, code, failure in zip(piece, answer.codes[1:], answer.failures[1:], strict=True):
                if failure is not None:
                    self._keep(self._failed(text, answer, failure))
                    yield failure
                else:
                    yield self._numbered(text, code)

    def copy(self, number: int) -> Entered | Failure:
        """The same schedule under another number: a worker builds it twice, elsewhere in memory."""
        return self._numbered(*self._entered[number])

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """Seconds a call of each in so many rounds, as the first machine would have them: its default's, times the
        ratio of each round on the machine that ran it. Raises as ``enter`` does."""
        found: dict[int, list[float] | Failure] = {}
        pieces = self._pieces([n for n in numbers if n != self._first])
        texts = [[self._entered[n][0] for n in piece] for piece in pieces]
        for piece, (_, answer) in zip(pieces, self._asked(texts, rounds), strict=True):
            default, *others = answer.samples
            self._reference = self._reference or median(default)
            self._keep(self._run(self._default, answer, default, default))
            for n, samples, failure in zip(piece, others, answer.failures[1:], strict=True):
                text = self._entered[n][0]
                if failure is not None:
                    found[n] = failure
                    self._keep(self._failed(text, answer, failure))
                    continue
                found[n] = [self._reference * s / d for s, d in zip(samples, default, strict=False)]
                self._keep(self._run(text, answer, samples, default))
        counts = [len(s) for s in found.values() if not isinstance(s, Failure)]
        common = min(counts, default=rounds)
        if self._first in numbers:
            found[self._first] = [self._reference] * common
        return {n: s if isinstance(s, Failure) else s[:common] for n, s in found.items()}

    def leave(self, numbers: Sequence[int]) -> None:
        """Forget what takes part no more."""
        for n in numbers:
            self._entered.pop(n, None)

    def close(self) -> None:
        """Nothing is held: the executor is its owner's."""

    # --- within -------------------------------------------------------------------------------------------------------

    def _numbered(self, text: str, code: str) -> Entered:
        self._count += 1
        number = self._count
        if text == self._default and not self._first:
            self._first = number
        self._entered[number] = text, code
        return Entered(number, code)

    def _pieces(self, whole: Sequence[T]) -> list[list[T]]:
        return [list(whole[k : k + self._batch]) for k in range(0, len(whole), self._batch)]

    def _asked(self, pieces: Sequence[list[str]], rounds: int) -> Iterator[tuple[list[str], _Answer]]:
        """What workers answer, all at work at once, each piece as soon as it is known."""
        begun = [self._submit(piece, rounds) for piece in pieces]
        try:
            for piece, future in zip(pieces, begun, strict=True):
                yield piece, self._answered(self._ask(piece, rounds, future))
        finally:
            for future in begun:
                future.cancel()

    def _submit(self, piece: list[str], rounds: int) -> Future[dict[str, Any]]:
        asked = {
            "workload": self._workload.key, "nest": self._workload.text, "target": asdict(self.target),
            "versions": environment_fingerprint(), "key": self._key, "traces": [self._default, *piece],
            "rounds": rounds,
        }  # fmt: skip
        return self._executor.submit(measure_batch, asked)

    def _ask(self, piece: list[str], rounds: int, future: Future[dict[str, Any]] | None) -> dict[str, Any]:
        """What a worker answers that serves."""
        why = ""
        for number in range(self._tries):
            if number:
                time.sleep(PAUSE_SECONDS)
            try:
                future = self._submit(piece, rounds) if future is None else future
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

    def _answered(self, answer: dict[str, Any]) -> _Answer:
        session = Session(
            answer["session"], answer["versions"], answer["date"], tuple(tuple(f) for f in answer["facts"])
        )
        failures = [None if f is None else Failure(Verdict(f[0]), f[1]) for f in answer["failures"]]
        if failures[0] is not None:
            raise MeasuringError(f"the default schedule cannot be measured: {failures[0].reason}")
        self._key = self._key or answer["key"]
        return _Answer(session, answer["key"], answer["samples"], answer["codes"], failures)

    def _run(self, text: str, answer: _Answer, samples: Sequence[float], default: Sequence[float]) -> WorkerRun:
        ratio = median(s / d for s, d in zip(samples, default, strict=False))
        return WorkerRun(checked_trace(text), answer.session, answer.key, median(samples), ratio)

    def _failed(self, text: str, answer: _Answer, failure: Failure) -> WorkerRun:
        return WorkerRun(checked_trace(text), answer.session, answer.key, None, None, failure.reason)

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
        found = _measured(nest_of(asked["workload"], asked["nest"]), target, asked["traces"], asked["rounds"])
    return {
        "session": session.id, "versions": session.versions, "date": session.date, "facts": session.facts, "key": key,
        **found,
    }  # fmt: skip


def _measured(nest: LoopNest, target: Target, traces: list[str], rounds: int) -> dict[str, list[Any]]:
    """Samples, hashes and failures of schedules, each a list as long as ``traces``."""
    schedules: dict[int, Schedule] = {}
    failures: list[tuple[str, str] | None] = [None] * len(traces)
    codes, samples = [""] * len(traces), [list[float]() for _ in traces]
    for k, text in enumerate(traces):
        try:
            schedules[k] = replayed(checked_trace(text), nest)
        except ScheduleError as error:
            failures[k] = Verdict.FAILED.value, error.reason
    measurer = measurer_for(nest, target)
    if measurer is None or 0 not in schedules:
        failures[0] = failures[0] or (Verdict.FAILED.value, "nothing here can time it")
        return {"samples": samples, "codes": codes, "failures": failures}
    numbers: dict[int, int] = {}
    with closing(measurer):
        try:
            for k, entered in zip(schedules, measurer.enter([*schedules.values()]), strict=True):
                if isinstance(entered, Failure):
                    failures[k] = entered.verdict.value, entered.reason
                else:
                    numbers[entered.number], codes[k] = k, entered.code_hash
            for number, times in (measurer.samples([*numbers], rounds) if rounds else {}).items():
                k = numbers[number]
                if isinstance(times, Failure):
                    failures[k] = times.verdict.value, times.reason
                else:
                    samples[k] = [*times]
        except MeasuringError as error:
            failures[0] = Verdict.FAILED.value, str(error)
    return {"samples": samples, "codes": codes, "failures": failures}


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
