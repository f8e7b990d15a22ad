"""What runs in a process of its own, in turns: whatever it does there is a verdict about it.

The process is started again when it was lost, and given again what takes part.
"""

from __future__ import annotations

import atexit
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar

from ...scheduler.tuning.database import Verdict
from ...scheduler.tuning.measurer import Entered, Failure, MeasuringError
from ..triton.service_process import ServiceProcess
from ..triton.worker_process import CRASHES, LostError, RefusedError
from .measure import ROUNDS_SECONDS, MeasureError
from .representatives import worst

C = TypeVar("C")
# A request to a process, and bytes that go with it.
Request: TypeAlias = tuple[dict[str, Any], Sequence[bytes]]
# Seconds for a candidate to run once, and again for it to be timed; for the process to start and make arguments.
LIMIT_SECONDS, BEGIN_SECONDS = 20.0, 180.0
# How often a race is run again that ended the process.
_TRIALS = 3
# A GPU holds the context of the process as long as it lives.
IDLE_SECONDS = 20.0


class MeasuringProcess(ServiceProcess):
    """The process in which candidates run. Whoever asks is known by ``session``: None after the process was lost."""

    def __init__(self, service: str, command: list[str] | None = None) -> None:
        super().__init__(service, IDLE_SECONDS, command)
        self.session: object | None = None

    def end(self) -> None:
        """End the process."""
        self.session = None
        super().end()

    def disown(self) -> None:
        """In a fork: the process is the parent's."""
        self.session = None
        super().disown()


@cache
def _processes() -> dict[str, MeasuringProcess]:
    """Those that are there, by their services."""
    return {}


def process_of(service: str) -> MeasuringProcess:
    """The process that measures by a service for this one, which ends with it."""
    found = _processes().get(service)
    if found is None:
        found = _processes()[service] = MeasuringProcess(service)
        atexit.register(found.end)
    return found


def _forked() -> None:
    for process in _processes().values():
        process.disown()
    _processes.cache_clear()


os.register_at_fork(after_in_child=_forked)


class WorkerRace(ABC, Generic[C]):
    """Candidates that run in a process and are timed there in turns. The first that runs says which results are right.

    ``limit`` is how many seconds one may take to run.
    """

    def __init__(self, process: MeasuringProcess, limit: float = LIMIT_SECONDS) -> None:
        self._process = process
        self._limit = limit
        self._first: C | None = None
        self._count = 0
        # What is to run, by number, and which of it the process has.
        self._codes: dict[int, C] = {}
        self._prepared: set[int] = set()
        self._rounds = 0

    @abstractmethod
    def _about(self) -> Request:
        """What all candidates share, as the process is to know it."""

    @abstractmethod
    def _of(self, candidate: C) -> Request:
        """A candidate, as the process is to know it."""

    @abstractmethod
    def _hash_of(self, candidate: C) -> str:
        """Equal for candidates that are the same code."""

    def copy(self, number: int) -> Entered | Failure:
        """Load the code of one that has entered once more, elsewhere in memory."""
        with self._process.lock:
            code, new = self._codes[number], self._numbered()
            try:
                self._prepare(new, code)
            except MeasureError as error:
                return failure_of(error)
        return Entered(new, self._hash_of(code))

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """Seconds a call of each in so many rounds, in which they take turns; fewer rounds where they take long. One
        that ends the process, or never ends, has a failure, and the others run again. Raises as ``enter`` does."""
        return self._raced(numbers, rounds)

    def _raced(self, numbers: Sequence[int], rounds: int, sizes: int = 1) -> Mapping[int, Sequence[float] | Failure]:
        """At so many sizes, of which a sample is the worst, beside the first of those that race."""
        failed: dict[int, Failure] = {}
        with self._process.lock, self._ended_by_interrupts():
            for _ in range(_TRIALS):
                racing = [n for n in numbers if n not in failed]
                if not racing:
                    break
                try:
                    return {**worst(self._timed(racing, rounds, sizes), racing[0]), **failed}
                except MeasureError as error:
                    last = failure_of(error)
                    failed |= self._guilty(racing)
            # Together they end the process, and none does alone: the race has no result.
            return {**{n: last for n in numbers}, **failed}

    def leave(self, numbers: Sequence[int]) -> None:
        """Forget what is timed no more."""
        for number in numbers:
            self._codes.pop(number, None)
        with self._process.lock:
            self._process.refresh()
            if self._process.session is self and (gone := self._prepared & set(numbers)):
                self._prepared -= gone
                with suppress(MeasureError):
                    self._ask({"do": "drop", "ids": sorted(gone)}, self._limit)

    def close(self) -> None:
        """Let the process forget the nest, whose arguments may be large."""
        with self._process.lock:
            self._process.refresh()
            if self._process.session is self:
                with suppress(LostError, RefusedError):
                    self._process.ask({"do": "end"}, self._limit, again=False)
                self._process.session = None

    # --- within -----------------------------------------------------------------------------------------------------

    def _numbered(self) -> int:
        self._count += 1
        return self._count

    def _timed(self, numbers: Sequence[int], rounds: int, sizes: int = 1) -> dict[int, list[list[float]]]:
        """Samples of each by size."""
        for n in numbers:
            self._begin()
            if n not in self._prepared:
                self._prepare(n, self._codes[n])
        if not self._prepared >= set(numbers):  # one of them ended the process, behind the others
            raise MeasureError("the process that measures was lost")
        request = {"do": "time", "ids": [*numbers], "rounds": rounds, "begun": self._rounds, "sizes": sizes}
        answer = self._ask(request, self._limit * len(numbers) + ROUNDS_SECONDS * sizes)
        self._rounds += rounds
        return {int(n): [[float(s) for s in of] for of in samples] for n, samples in answer["samples"].items()}

    def _guilty(self, numbers: Sequence[int]) -> dict[int, Failure]:
        """Which of several end the process by themselves."""
        found: dict[int, Failure] = {}
        for n in numbers:
            try:
                self._timed([n], 1)
            except MeasureError as error:
                found[n] = failure_of(error)
        return found

    @contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._process.end()
            raise

    def _prepared_new(self, candidate: C) -> int:
        """The number of a candidate that has run once. Raises MeasureError and MeasuringError."""
        with self._process.lock:
            number = self._numbered()
            self._prepare(number, candidate)
        return number

    def _named(self, number: int) -> Entered:
        return Entered(number, self._hash_of(self._codes[number]))

    def _prepare(self, number: int, candidate: C) -> None:
        """Have a candidate run once, and its results compared. Raises MeasureError and MeasuringError."""
        self._begin()
        request, parts = self._of(candidate)
        self._ask({"do": "prepare", "id": number, **request}, self._limit, *parts)
        self._prepared.add(number)
        self._codes[number] = candidate
        if self._first is None:
            self._first = candidate

    def _begin(self) -> None:
        """Have the process know what all share, and the first one's results."""
        self._process.refresh()
        if self._process.session is self:
            return
        try:
            request, parts = self._about()
            self._ask({"do": "begin", **request}, BEGIN_SECONDS, *parts)
            self._process.session, self._prepared = self, set()
            if self._first is not None:
                first, self._first = self._first, None
                self._prepare(0, first)
        except MeasureError as error:
            raise MeasuringError(str(error)) from error

    def _ask(self, request: dict[str, Any], seconds: float, *parts: bytes) -> dict[str, Any]:
        """Raises MeasureError with the verdict where a candidate gives no result."""
        try:
            answer, _ = self._process.ask(request, seconds, *parts, again=request["do"] == "begin")
        except LostError as lost:
            late = lost.status is None and "in time" in str(lost)
            raise MeasureError(_told(lost, seconds), Verdict.LATE if late else Verdict.CRASHED) from lost
        except RefusedError as error:
            raise MeasuringError(f"the process that measures is defective: {error}") from error
        if "verdict" in answer:
            if answer["lost"]:
                self._process.end()
            verdict = Verdict.CRASHED if answer["lost"] else Verdict(answer["verdict"])
            raise MeasureError(answer["reason"], verdict)
        return answer


def failure_of(error: Exception) -> Failure:
    """What an error says of the candidate that met it."""
    return Failure(error.verdict if isinstance(error, MeasureError) else Verdict.FAILED, str(error))


def _told(lost: LostError, seconds: float) -> str:
    if lost.status in CRASHES:
        return f"the process that ran it crashed ({signal.Signals(-lost.status).name})"  # type: ignore[operator]
    if lost.status is None and "in time" in str(lost):
        return f"it did not end within {seconds:g} s"
    return f"the process that measures {lost}"
