"""Measuring schedules in a process of its own: what tuning asks of the runtime.

What a candidate does to the process that runs it, be it an illegal access, a crash or a loop without an end, is a
verdict about the candidate: the process is started again and tuning goes on. Candidates are compiled side by side while
those before them are measured.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.printer import show
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.tuning.database import Verdict
from ...scheduler.tuning.measurer import Entered, Failure, Measurement, Measurer, MeasuringError
from ..compile.kernels import KernelCode
from ..triton.compile import RunTriton
from ..triton.service_process import ServiceProcess
from ..triton.worker_process import CRASHES, LostError, RefusedError
from .candidates import begun, running
from .measure import ROUNDS_SECONDS, MeasureError
from .representatives import representatives, worst

SERVICE = f"{__package__}.measure_service"
# Seconds for a candidate to run once, and again for it to be timed; for the process to start and make arguments.
LIMIT_SECONDS, BEGIN_SECONDS = 20.0, 180.0
# Rounds of candidates of which nothing is known, and how often a race is run again that ended the process.
SAMPLES, _TRIALS = 15, 3
# A GPU holds the context of the process as long as it lives.
_IDLE_SECONDS = 20.0


class MeasuringProcess(ServiceProcess):
    """The process in which candidates run. Whoever asks is known by ``session``: None after the process was lost."""

    def __init__(self, service: str = SERVICE, command: list[str] | None = None) -> None:
        super().__init__(service, _IDLE_SECONDS, command)
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
def measuring_process() -> MeasuringProcess:
    """The process that measures for this one, which ends with it."""
    process = MeasuringProcess()
    atexit.register(process.end)
    return process


def _forked() -> None:
    if measuring_process.cache_info().currsize:
        measuring_process().disown()
        measuring_process.cache_clear()


os.register_at_fork(after_in_child=_forked)


class WorkerMeasurer:
    """Times schedules of one nest in a process of its own. The first that runs there is the default schedule, whose
    results the others must have.

    ``workers`` processes compile GPU kernels, this one where that is zero; ``run`` stands for them. A nest whose sizes
    are symbols is timed at several, and a race goes by the worst ratio to the default over them.
    """

    def __init__(
        self,
        nest: LoopNest,
        target: Target,
        *,
        workers: int = 0,
        process: MeasuringProcess | None = None,
        run: RunTriton | None = None,
        limit: float = LIMIT_SECONDS,
    ) -> None:
        self.target = target
        self._nest = nest
        self._sizes = representatives(nest)
        self._workers = workers
        self._process = measuring_process() if process is None else process
        self._run = run
        self._limit = limit
        self._default: KernelCode | None = None
        self._count = 0
        # What is to run, by number, and which of it the process has.
        self._codes: dict[int, KernelCode] = {}
        self._prepared: set[int] = set()
        self._rounds = 0

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        """Build each schedule, run it once and compare its results, in order, each as soon as it is known.

        Raises MeasuringError where nothing can be measured: the process does not start, the arguments are too large, or
        the default schedule itself fails.
        """
        for found in self._entered(candidates):
            yield Entered(found, code_hash(self._codes[found])) if isinstance(found, int) else failure_of(found)

    def copy(self, number: int) -> Entered | Failure:
        """Load the code of one that has entered once more, elsewhere in memory."""
        with self._process.lock:
            code, new = self._codes[number], self._numbered()
            try:
                self._prepare(new, code)
            except MeasureError as error:
                return failure_of(error)
        return Entered(new, code_hash(code))

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """Seconds a call of each in so many rounds, in which they take turns; fewer rounds where they take long. One
        that ends the process, or never ends, has a failure, and the others run again. Where sizes are symbols, the
        first is the default, and a sample is the worst of several sizes. Raises as ``enter`` does."""
        return self._raced(numbers, rounds, len(self._sizes))

    def _raced(self, numbers: Sequence[int], rounds: int, sizes: int) -> Mapping[int, Sequence[float] | Failure]:
        failed: dict[int, Failure] = {}
        with self._process.lock, self._ended_by_interrupts():
            for _ in range(_TRIALS):
                racing = [n for n in numbers if n not in failed]
                if not racing:
                    break
                try:
                    taken = self._timed(racing, rounds, sizes)
                    return {**worst(taken, racing[0]), **failed}
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

    def measure(self, candidates: Sequence[Schedule]) -> Iterator[Measurement]:
        """Seconds a call of each schedule in order, or the error that it met; each as soon as it is known on GPUs, in
        turns on CPUs. The lower quartile counts: what else runs on a machine makes samples longer and never shorter.
        Raises as ``enter`` does."""
        waiting: list[int | Exception] = []
        for found in self._entered(candidates):
            waiting.append(found)
            if self.target.is_gpu:
                yield from self._measured(waiting)
                waiting = []
        yield from self._measured(waiting)

    def close(self) -> None:
        """Let the process forget the nest, whose arguments may be large."""
        with self._process.lock:
            self._process.refresh()
            if self._process.session is self:
                with suppress(LostError, RefusedError):
                    self._process.ask({"do": "end"}, self._limit, again=False)
                self._process.session = None

    # --- within -----------------------------------------------------------------------------------------------------

    def _entered(self, candidates: Sequence[Schedule]) -> Iterator[int | Exception]:
        stop = threading.Event()
        pool = ThreadPoolExecutor(max(self._workers, 1), thread_name_prefix="torch-mlc candidate")
        try:
            with self._ended_by_interrupts():
                for future in begun(candidates, self.target, pool, running(self._workers, stop, self._run)):
                    yield self._ran_once(future)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _ran_once(self, future: Future[KernelCode]) -> int | Exception:
        try:
            code = future.result()
        except (MlcError, RuntimeError, MemoryError) as error:
            return error
        with self._process.lock:
            number = self._numbered()
            try:
                self._prepare(number, code)
            except MeasureError as error:
                if self._default is None:
                    raise MeasuringError(f"the default schedule cannot be measured: {error}") from error
                return error
        return number

    def _numbered(self) -> int:
        self._count += 1
        return self._count

    def _measured(self, found: Sequence[int | Exception]) -> list[Measurement]:
        numbers = [n for n in found if isinstance(n, int)]
        times = self._raced(numbers, SAMPLES, 1)
        self.leave(numbers)
        results: list[Measurement] = []
        for n in found:
            if isinstance(n, Exception):
                results.append(n)
                continue
            match times[n]:
                case Failure() as failure:
                    results.append(MeasureError(failure.reason, failure.verdict))
                case samples:
                    results.append(sorted(samples)[len(samples) // 4])
        return results

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

    def _prepare(self, number: int, code: KernelCode) -> None:
        """Have a candidate run once, and its results compared. Raises MeasureError and MeasuringError."""
        self._begin()
        plain = {"key": code.key, "name": code.name, "language": code.language, "symbols": code.symbols}
        request = {"do": "prepare", "id": number, "code": {**plain, "meta": code.meta}}
        self._ask(request, self._limit, code.payload)
        self._prepared.add(number)
        self._codes[number] = code
        if self._default is None:
            self._default = code

    def _begin(self) -> None:
        """Have the process know the nest and the default schedule's results."""
        self._process.refresh()
        if self._process.session is self:
            return
        kind = "cuda" if self.target.is_gpu else "cpu"
        device = torch.cuda.current_device() if self.target.is_gpu and torch.cuda.is_available() else 0
        about = {"kind": kind, "device": device, "threads": torch.get_num_threads()}
        try:
            self._ask({"do": "begin", "nests": [show(n) for n in self._sizes], **about}, BEGIN_SECONDS)
            self._process.session, self._prepared = self, set()
            if self._default is not None:
                default, self._default = self._default, None
                self._prepare(0, default)
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


def code_hash(code: KernelCode) -> str:
    """The same for equal machine code that is launched alike."""
    if code.language == "llvm":
        return hashlib.sha256(code.payload).hexdigest()[:32]
    launched = {k: v for k, v in code.meta["binary"].items() if k != "assembly"}
    told = json.dumps([launched, code.meta["source"]["grid"]], sort_keys=True, default=str)
    return hashlib.sha256(told.encode() + code.payload[: code.meta["code"]]).hexdigest()[:32]


def _told(lost: LostError, seconds: float) -> str:
    if lost.status in CRASHES:
        return f"the process that ran it crashed ({signal.Signals(-lost.status).name})"  # type: ignore[operator]
    if lost.status is None and "in time" in str(lost):
        return f"it did not end within {seconds:g} s"
    return f"the process that measures {lost}"


def measurer_for(nest: LoopNest, target: Target, workers: int = 0) -> Measurer | None:
    """What times schedules of a nest here; None where this machine has no GPU of the target's kind.

    A kernel over a table of tensors has no arguments of typical sizes, and is not timed either.
    """
    if nest.table:
        return None
    is_hip = torch.version.hip is not None
    if target.is_gpu and not (torch.cuda.is_available() and is_hip == (target.kind == "hip")):
        return None
    return WorkerMeasurer(nest, target, workers=workers if target.is_gpu else 0)
