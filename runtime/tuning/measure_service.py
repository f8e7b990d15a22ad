"""What runs candidates of tuning, in a process of its own (``service_worker.py``).

A request says what to ``do``: ``begin`` with a nest, by each of its sizes, ``prepare`` the code of a candidate,
``time`` what is prepared in so many rounds, ``drop`` some of it, ``end``. An answer holds samples, or a ``verdict`` and
its ``reason``: why there are none. After an error the GPU of a process may do nothing any more; the answer then says
that it is ``lost``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.text.parser import parse
from ...scheduler.tuning.database import Verdict
from ...scheduler.tuning.race import TOGETHER, turns
from ..compile.kernels import KernelCode, load_code
from .measure import ROUNDS_SECONDS, Arguments, Bench, MeasureError, ProcessorClock, Run

# What is written to have nothing of a kernel's arguments in a GPU's second-level cache, and calls of a sample.
_FLUSHED_BYTES, _CALLS = 256 << 20, 3
# What a candidate may raise: all else is a defect of this file, and told as that.
ERRORS = (MlcError, RuntimeError, MemoryError)


class Device(Protocol):
    """Where candidates run: ``place`` is torch's word for its memory."""

    place: str

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        """A call of a kernel over arguments, which need not have ended when it returns."""
        ...

    def synchronize(self) -> None:
        """Wait for all calls. Raises RuntimeError for what went wrong in them."""
        ...

    def samples(
        self, runs: Mapping[int, Run], rounds: int, begun: int, move: Callable[[], None]
    ) -> dict[int, list[float]]:
        """Seconds a call of each in every round, in turns; ``begun`` rounds were run before. Fewer where they take
        long. Now and then arguments ``move``."""
        ...

    def drop(self, numbers: Sequence[int]) -> None:
        """Other runs may have these numbers from now on."""
        ...

    def forget(self) -> None:
        """Give memory back that nobody uses."""
        ...


class HostProcessor:
    """The CPU."""

    place = "cpu"

    def __init__(self, threads: int) -> None:
        self._clock = ProcessorClock.of_threads(threads)

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        # Two loads of the code take turns, so that where it lies is as little taken for a gain as where operands do.
        loaded = load_code(code), load_code(code)
        passed = arguments.passed

        def run() -> None:
            loaded[arguments.moves & 1].call(*passed)

        return run

    def synchronize(self) -> None:
        """Calls have ended when they return."""

    def samples(
        self, runs: Mapping[int, Run], rounds: int, begun: int, move: Callable[[], None]
    ) -> dict[int, list[float]]:
        return self._clock.samples(runs, rounds, begun, move)

    def drop(self, numbers: Sequence[int]) -> None:
        """Nothing is kept by number."""

    def forget(self) -> None:
        """Memory is given back at once."""


class Gpu:
    """The current GPU, timed by its own events, each call with a cold second-level cache."""

    place = "cuda"

    def __init__(self) -> None:
        self._flushed: torch.Tensor | None = None

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        kernel = load_code(code)

        def run() -> None:
            kernel.call(arguments.tensors, arguments.sizes)

        return run

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def samples(
        self, runs: Mapping[int, Run], rounds: int, begun: int, move: Callable[[], None]
    ) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {n: [] for n in runs}
        end = time.perf_counter() + ROUNDS_SECONDS
        for k, order in enumerate(turns([*runs], rounds, begun)):
            if k % TOGETHER == 0:
                move()
            events = [(n, self._timed(runs[n])) for n in order for _ in range(_CALLS)]
            torch.cuda.synchronize()
            taken = {n: [a.elapsed_time(b) * 1e-3 for m, (a, b) in events if m == n] for n in order}
            for n, seconds in taken.items():
                found[n].append(sum(seconds) / len(seconds))
            if time.perf_counter() >= end:
                break
        return found

    def _timed(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if self._flushed is None:
            self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()  # also gives the processor time to launch what is timed
        first.record()
        run()
        last.record()
        return first, last

    def drop(self, numbers: Sequence[int]) -> None:
        """Nothing is kept by number."""

    def forget(self) -> None:
        self._flushed = None
        torch.cuda.empty_cache()


def device_of(request: Mapping[str, Any]) -> Device:
    """The device that a nest is for."""
    if request["kind"] == "cpu":
        torch.set_num_threads(request["threads"])
        return HostProcessor(request["threads"])
    torch.cuda.set_device(request["device"])
    return Gpu()


class MeasureService:
    """Answers requests about one nest at a time."""

    def __init__(self, device_of: Callable[[Mapping[str, Any]], Device] = device_of) -> None:
        self._device_of = device_of
        self._device: Device | None = None
        # One for each of the sizes that candidates are timed at, and of each candidate a run for each.
        self._benches: list[Bench] = []
        self._runs: dict[int, list[Run]] = {}

    def __call__(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        try:
            return self._done(request, parts), ()
        except ERRORS as error:
            text = f"{type(error).__name__}: {error}" if not isinstance(error, MlcError) else str(error)
            verdict = error.verdict if isinstance(error, MeasureError) else Verdict.FAILED
            return {"reason": text, "verdict": verdict.value, "lost": self._is_lost()}, ()

    def _done(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> dict[str, Any]:
        match request["do"]:
            case "begin":
                self._end()
                self._device = self._device_of(request)
                for text in request["nests"]:
                    nest = parse(text)
                    assert isinstance(nest, LoopNest)
                    self._benches.append(Bench(nest, self._device.place))
                    assert self._benches[-1].arguments
                self._device.synchronize()
            case "prepare":
                self._prepare(request["id"], KernelCode(**request["code"], payload=parts[0]))
            case "time":
                assert self._device is not None
                found: dict[str, list[list[float]]] = {str(k): [] for k in request["ids"]}
                for number, bench in enumerate(self._benches[: request["sizes"]]):
                    runs = {k: self._runs[k][number] for k in request["ids"]}
                    taken = self._device.samples(runs, request["rounds"], request["begun"], bench.move)
                    for k, s in taken.items():
                        found[str(k)].append(s)
                return {"samples": found}
            case "drop":
                self._drop(request["ids"])
            case "end":
                self._end()
        return {}

    def _prepare(self, number: int, code: KernelCode) -> None:
        device, made = self._device, list[Run]()
        assert self._benches and device is not None
        for bench in self._benches:
            run = device.run_of(code, bench.arguments)

            def whole(run: Run = run, device: Device = device) -> None:
                run()
                device.synchronize()

            bench.check(whole)
            made.append(run)
        self._drop([number])
        self._runs[number] = made

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._runs.pop(number, None)
        if self._device is not None:
            self._device.drop(numbers)

    def _is_lost(self) -> bool:
        """Whether an error stays: then no call can end well any more."""
        try:
            if self._device is not None:
                self._device.synchronize()
        except ERRORS:
            return True
        return False

    def _end(self) -> None:
        self._benches, self._runs = [], {}
        if self._device is not None:
            self._device.forget()


def service() -> MeasureService:
    """What answers the requests of one process."""
    return MeasureService()
