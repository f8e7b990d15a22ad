"""Tuning for a GPU that is not here: candidates are compiled, and their times predicted from machine code."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...runtime.compile.kernels import gpu_binary
from ...runtime.targets import is_here
from ...runtime.triton.compile import GpuBinary, RunTriton
from ...runtime.tuning.candidates import begun, running, source_of
from ...runtime.tuning.measuring import code_hash, measurer_for
from ...runtime.tuning.worker_race import failure_of
from ...scheduler.schedule.schedule import Schedule
from ...scheduler.tuning.measurer import Entered, Failure, Measurement, Measurer
from ..reports.prediction import predicted


class PredictionError(MlcError):
    """The time of a candidate cannot be predicted."""


class PredictingMeasurer:
    """Predicts the times of schedules for a GPU that need not be here; nothing runs, and there is no noise.

    ``workers`` processes compile, this one where that is zero; ``run`` stands for them.
    """

    def __init__(self, target: Target, *, workers: int = 0, run: RunTriton | None = None) -> None:
        self.target = target
        self._workers = workers
        self._run = run
        # What is known stays true: nobody has to compile it a second time.
        self._known: dict[str, tuple[float, str] | Exception] = {}
        self._seconds: list[tuple[float, str]] = []

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        """Compile each schedule, in order."""
        for found in self._predicted(candidates):
            yield failure_of(found) if isinstance(found, Exception) else self._numbered(found)

    def copy(self, number: int) -> Entered:
        """The same code takes the same time."""
        return self._numbered(self._seconds[number])

    def samples(self, numbers: Sequence[int], rounds: int) -> dict[int, Sequence[float]]:
        """Predicted seconds of a launch of each, as often as there are rounds."""
        return {n: [self._seconds[n][0]] * rounds for n in numbers}

    def leave(self, numbers: Sequence[int]) -> None:
        """Nothing is held."""

    def measure(self, candidates: Sequence[Schedule]) -> Iterator[Measurement]:
        """Predicted seconds of a launch of each schedule in order, or the error that it met."""
        for found in self._predicted(candidates):
            yield found if isinstance(found, Exception) else found[0]

    def close(self) -> None:
        """Nothing is held."""

    def _numbered(self, found: tuple[float, str]) -> Entered:
        self._seconds.append(found)
        return Entered(len(self._seconds) - 1, found[1])

    def _predicted(self, candidates: Sequence[Schedule]) -> Iterator[tuple[float, str] | Exception]:
        """Predicted seconds and the hash of the code."""
        stop = threading.Event()
        pool = ThreadPoolExecutor(max(self._workers, 1), thread_name_prefix="torch-mlc candidate")
        keys = [c.trace.to_json() for c in candidates]
        new = {key: c for key, c in zip(keys, candidates, strict=True) if key not in self._known}
        try:
            making = begun([*new.values()], self.target, pool, running(self._workers, stop, self._run))
            codes = dict(zip(new, making, strict=True))
            for key in keys:
                if key not in self._known:
                    try:
                        code = codes[key].result()
                        self._known[key] = self._of(new[key], gpu_binary(code)), code_hash(code)
                    except (MlcError, RuntimeError, MemoryError) as error:
                        self._known[key] = error
                yield self._known[key]
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _of(self, candidate: Schedule, binary: GpuBinary) -> float:
        found = predicted(binary, source_of(candidate, self.target), candidate.nest, self.target)
        if found is None:
            raise PredictionError(
                f"{candidate.nest.name}: the model does not know what its code takes of {self.target}"
            )
        return found.seconds


def measurer_of(nest: LoopNest, target: Target, workers: int = 0) -> Measurer | None:
    """What ranks the schedules of a nest: a process that runs them, or predictions for a GPU that is not here. None for
    a kernel over a table of tensors, which has no arguments of typical sizes."""
    if is_here(target):
        return measurer_for(nest, target, workers)
    return None if nest.table else PredictingMeasurer(target, workers=workers)
