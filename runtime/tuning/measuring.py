"""Measuring schedules in a process of its own: what tuning asks of the runtime.

What a candidate does to the process that runs it, be it an illegal access, a crash or a loop without an end, is a
verdict about the candidate: the process is started again and tuning goes on. Candidates are compiled side by side while
those before them are measured.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.printer import show
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.tuning.measurer import Entered, Failure, Measurement, Measurer, MeasuringError
from ..compile.kernels import KernelCode
from ..triton.compile import RunTriton
from .candidates import begun, running
from .measure import MeasureError
from .representatives import representatives
from .worker_race import LIMIT_SECONDS, MeasuringProcess, Request, WorkerRace, failure_of, process_of

SERVICE = f"{__package__}.measure_service"
# Rounds of candidates of which nothing is known.
SAMPLES = 15


class WorkerMeasurer(WorkerRace[KernelCode]):
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
        super().__init__(process_of(SERVICE) if process is None else process, limit)
        self.target = target
        self._nest = nest
        self._sizes = representatives(nest)
        self._workers = workers
        self._run = run

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        """Build each schedule, run it once and compare its results, in order, each as soon as it is known.

        Raises MeasuringError where nothing can be measured: the process does not start, the arguments are too large, or
        the default schedule itself fails.
        """
        for found in self._entered(candidates):
            yield self._named(found) if isinstance(found, int) else failure_of(found)

    def samples(self, numbers: Sequence[int], rounds: int) -> Mapping[int, Sequence[float] | Failure]:
        """As of every race; where sizes are symbols, the first is the default, and a sample is the worst of several
        sizes."""
        return self._raced(numbers, rounds, len(self._sizes))

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
        try:
            return self._prepared_new(code)
        except MeasureError as error:
            if self._first is None:
                raise MeasuringError(f"the default schedule cannot be measured: {error}") from error
            return error

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

    def _about(self) -> Request:
        kind = "cuda" if self.target.is_gpu else "cpu"
        device = torch.cuda.current_device() if self.target.is_gpu and torch.cuda.is_available() else 0
        about = {"kind": kind, "device": device, "threads": torch.get_num_threads()}
        return {"nests": [show(n) for n in self._sizes], **about}, ()

    def _of(self, candidate: KernelCode) -> Request:
        plain = {"key": candidate.key, "name": candidate.name, "language": candidate.language}
        return {"code": {**plain, "symbols": candidate.symbols, "meta": candidate.meta}}, (candidate.payload,)

    def _hash_of(self, candidate: KernelCode) -> str:
        return code_hash(candidate)


def code_hash(code: KernelCode) -> str:
    """The same for equal machine code that is launched alike."""
    if code.language == "llvm":
        return hashlib.sha256(code.payload).hexdigest()[:32]
    launched = {k: v for k, v in code.meta["binary"].items() if k != "assembly"}
    told = json.dumps([launched, code.meta["source"]["grid"]], sort_keys=True, default=str)
    return hashlib.sha256(told.encode() + code.payload[: code.meta["code"]]).hexdigest()[:32]


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
