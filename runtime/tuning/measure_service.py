"""What runs candidates of tuning, in a process of its own (``service_worker.py``).

A request says what to ``do``: ``begin`` with a nest, ``prepare`` the code of a candidate, ``time`` what is prepared,
``end``. An answer holds seconds, or a ``verdict``: why there are none. After an error the GPU of a process may do
nothing any more; the answer then says that the process is ``lost``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.text.parser import parse
from ..compile.kernels import KernelCode, load_code
from .measure import Arguments, Bench, Run, interleaved_seconds

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

    def seconds(self, runs: Mapping[int, Run]) -> dict[int, float]:
        """Seconds a call of each."""
        ...

    def forget(self) -> None:
        """Give memory back that nobody uses."""
        ...


class HostProcessor:
    """The CPU."""

    place = "cpu"

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        kernel = load_code(code)
        passed = (*(t.data_ptr() for t in arguments.tensors), *arguments.sizes)

        def run() -> None:
            kernel.call(*passed)

        return run

    def synchronize(self) -> None:
        """Calls have ended when they return."""

    def seconds(self, runs: Mapping[int, Run]) -> dict[int, float]:
        return interleaved_seconds(runs)

    def forget(self) -> None:
        """Memory is given back at once."""


class Gpu:
    """The current GPU, timed with a cold second-level cache (Triton's ``do_bench``)."""

    place = "cuda"

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        kernel = load_code(code)

        def run() -> None:
            kernel.call(arguments.tensors, arguments.sizes)

        return run

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, runs: Mapping[int, Run]) -> dict[int, float]:
        # Triton comes with GPU builds of torch alone.
        from triton.testing import do_bench

        return {k: float(do_bench(r, warmup=10, rep=50, return_mode="median")) * 1e-3 for k, r in runs.items()}

    def forget(self) -> None:
        torch.cuda.empty_cache()


def device_of(request: Mapping[str, Any]) -> Device:
    """The device that a nest is for."""
    if request["kind"] == "cpu":
        torch.set_num_threads(request["threads"])
        return HostProcessor()
    torch.cuda.set_device(request["device"])
    return Gpu()


class MeasureService:
    """Answers requests about one nest at a time."""

    def __init__(self, device_of: Callable[[Mapping[str, Any]], Device] = device_of) -> None:
        self._device_of = device_of
        self._device: Device | None = None
        self._bench: Bench | None = None
        self._runs: dict[int, Run] = {}

    def __call__(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        try:
            return self._done(request, parts), ()
        except ERRORS as error:
            text = f"{type(error).__name__}: {error}" if not isinstance(error, MlcError) else str(error)
            return {"verdict": text, "lost": self._is_lost()}, ()

    def _done(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> dict[str, Any]:
        match request["do"]:
            case "begin":
                self._end()
                nest = parse(request["nest"])
                assert isinstance(nest, LoopNest)
                self._device = self._device_of(request)
                self._bench = Bench(nest, self._device.place)
                assert self._bench.arguments
                self._device.synchronize()
            case "prepare":
                self._prepare(request["id"], KernelCode(**request["code"], payload=parts[0]))
            case "time":
                assert self._device is not None
                return {"seconds": {str(k): s for k, s in self._device.seconds(self._taken(request["ids"])).items()}}
            case "end":
                self._end()
        return {}

    def _prepare(self, number: int, code: KernelCode) -> None:
        bench, device = self._bench, self._device
        assert bench is not None and device is not None
        run = device.run_of(code, bench.arguments)

        def whole() -> None:
            run()
            device.synchronize()

        bench.check(whole)
        self._runs[number] = run

    def _taken(self, numbers: Sequence[int]) -> dict[int, Run]:
        return {k: self._runs.pop(k) for k in numbers}

    def _is_lost(self) -> bool:
        """Whether an error stays: then no call can end well any more."""
        try:
            if self._device is not None:
                self._device.synchronize()
        except ERRORS:
            return True
        return False

    def _end(self) -> None:
        self._bench, self._runs = None, {}
        if self._device is not None:
            self._device.forget()


def service() -> MeasureService:
    """What answers the requests of one process."""
    return MeasureService()
