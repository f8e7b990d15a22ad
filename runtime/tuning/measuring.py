"""Measuring schedules in a process of its own: what tuning asks of the runtime.

What a candidate does to the process that runs it, be it an illegal access, a crash or a loop without an end, is a
verdict about the candidate: the process is started again and tuning goes on. Candidates are compiled side by side while
those before them are measured.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.printer import show
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.tuning.tune import Measurement, Measurer, MeasuringError
from ..compile.kernels import KernelCode
from ..triton.compile import RunTriton
from ..triton.service_process import ServiceProcess
from ..triton.worker_process import CRASHES, LostError, RefusedError
from .candidates import begun, running
from .measure import MeasureError

SERVICE = f"{__package__}.measure_service"
# Seconds for a candidate to run once, and again for it to be timed; for the process to start and make arguments.
LIMIT_SECONDS, BEGIN_SECONDS = 20.0, 180.0
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
    """Times schedules of one nest in a process of its own. The first that is measured is the default schedule, whose
    results the others must have.

    ``workers`` processes compile GPU kernels, this one where that is zero; ``run`` stands for them.
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
        self._workers = workers
        self._process = measuring_process() if process is None else process
        self._run = run
        self._limit = limit
        self._default: KernelCode | None = None
        # What the process has that is not timed yet.
        self._prepared: set[int] = set()

    def measure(self, candidates: Sequence[Schedule]) -> Iterator[Measurement]:
        """Seconds a call of each schedule in order, or the error that it met, each as soon as it is known.

        Raises MeasuringError where nothing can be measured: the process does not start, the arguments are too large, or
        the default schedule itself fails.
        """
        stop = threading.Event()
        pool = ThreadPoolExecutor(max(self._workers, 1), thread_name_prefix="torch-mlc candidate")
        try:
            codes = begun(candidates, self.target, pool, running(self._workers, stop, self._run))
            if self.target.is_gpu:
                for code in codes:
                    yield from self._measured([code])
            else:
                yield from self._measured(codes)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            self._process.end()
            raise
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Let the process forget the nest, whose arguments may be large."""
        with self._process.lock:
            self._process.refresh()
            if self._process.session is self:
                with suppress(LostError, RefusedError):
                    self._process.ask({"do": "end"}, self._limit, again=False)
                self._process.session = None

    # --- times ------------------------------------------------------------------------------------------------------

    def _measured(self, codes: Sequence[Future[KernelCode]]) -> list[Measurement]:
        """Candidates that are timed side by side."""
        results: dict[int, Measurement] = {}
        ready: dict[int, KernelCode] = {}
        with self._process.lock:
            for k, future in enumerate(codes):
                try:
                    code = future.result()
                except (MlcError, RuntimeError, MemoryError) as error:
                    results[k] = error
                    continue
                try:
                    self._prepare(k, code)
                except MeasureError as error:
                    if self._default is None:
                        raise MeasuringError(f"the default schedule cannot be measured: {error}") from error
                    results[k] = error
                else:
                    ready[k] = code
            results |= self._timed(ready)
        return [results[k] for k in range(len(codes))]

    def _timed(self, ready: dict[int, KernelCode]) -> dict[int, Measurement]:
        """Seconds of candidates that ran once. A process that is lost on the way says not by which of several, so that
        each is tried alone then."""
        if not ready:
            return {}
        if self._process.session is self and self._prepared >= ready.keys():  # not lost by another, behind them
            self._prepared -= ready.keys()
            try:
                answer = self._ask({"do": "time", "ids": [*ready]}, self._limit * len(ready))
                return {int(k): float(s) for k, s in answer["seconds"].items()}
            except MeasureError as error:
                if len(ready) == 1:
                    return dict.fromkeys(ready, error)
        found: dict[int, Measurement] = {}
        for k, code in ready.items():
            try:
                self._prepare(k, code)
                found |= self._timed({k: code})
            except MeasureError as error:
                found[k] = error
        return found

    def _prepare(self, number: int, code: KernelCode) -> None:
        """Have a candidate run once, and its results compared. Raises MeasureError and MeasuringError."""
        self._begin()
        plain = {"key": code.key, "name": code.name, "language": code.language, "symbols": code.symbols}
        request = {"do": "prepare", "id": number, "code": {**plain, "meta": code.meta}}
        self._ask(request, self._limit, code.payload)
        self._prepared.add(number)
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
            self._ask({"do": "begin", "nest": show(self._nest), **about}, BEGIN_SECONDS)
            self._process.session, self._prepared = self, set()
            if self._default is not None:
                default, self._default = self._default, None
                self._prepare(-1, default)
        except MeasureError as error:
            raise MeasuringError(str(error)) from error

    def _ask(self, request: dict[str, Any], seconds: float, *parts: bytes) -> dict[str, Any]:
        """Raises MeasureError with the verdict where a candidate gives no result."""
        try:
            answer, _ = self._process.ask(request, seconds, *parts, again=request["do"] == "begin")
        except LostError as lost:
            raise MeasureError(_told(lost, seconds)) from lost
        except RefusedError as error:
            raise MeasuringError(f"the process that measures is defective: {error}") from error
        if "verdict" in answer:
            if answer["lost"]:
                self._process.end()
            raise MeasureError(answer["verdict"])
        return answer


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
