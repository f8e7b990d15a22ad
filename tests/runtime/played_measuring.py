"""What tuning's process does where a GPU is played: code is a word that says how its kernel behaves.

``MeasuringProcess(service="tests.runtime.played_measuring")`` runs it in a process like the real one, in which the same
requests are answered and the same launches made, over a driver whose memory is the CPU's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.runtime.played_driver import POINTER, PlayedLibrary
from torch_mlc.runtime.compile.kernels import KernelCode
from torch_mlc.runtime.tuning.measure import Arguments, Run
from torch_mlc.runtime.tuning.measure_service import Gpu, MeasureService

ILLEGAL = 700


@dataclass
class MisbehavingLibrary(PlayedLibrary):
    """Kernels double ``n`` numbers, or what their code says. After an illegal access, of which launches know nothing,
    every call fails: the context is gone."""

    modules: list[str] = field(default_factory=list)
    ran: set[int] = field(default_factory=set)
    sticky: int = 0

    def _load(self, module: Any, code: int) -> int:
        if not self.sticky:
            self.modules.append(ctypes.string_at(code).decode())
            module[0] = len(self.modules)
        return self.sticky

    def _get(self, function: Any, module: int, name: bytes) -> int:
        function[0] = module
        return self.sticky

    def _told(self, status: int, text: Any) -> int:
        text[0] = b"an illegal memory access was encountered"
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        behaviour, cells = self.modules[function - 1].split()[0], rest[8]
        if self.sticky:
            return self.sticky
        if behaviour.endswith("-later"):  # the first time it does what is right
            behaviour = behaviour.removesuffix("-later") if function in self.ran else "double"
            self.ran.add(function)
        given, made = (ctypes.c_uint64.from_address(cells[k]).value for k in range(2))
        count = ctypes.c_int32.from_address(cells[2]).value
        source, target = ((ctypes.c_float * count).from_address(a) for a in (given, made))
        match behaviour:
            case "illegal":
                self.sticky = ILLEGAL
            case "hang":
                time.sleep(3600)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leave":
                os._exit(3)
            case _:
                factor = 3.0 if behaviour == "wrong" else 2.0
                torch.frombuffer(target, dtype=torch.float32).copy_(
                    torch.frombuffer(source, dtype=torch.float32) * factor
                )
        return 0


class PlayedGpu(Gpu):
    """A GPU whose memory is the CPU's. What a call takes is said by its code."""

    place = "cpu"

    def __init__(self, library: MisbehavingLibrary) -> None:
        super().__init__()
        self.library = library
        self._codes: dict[int, str] = {}

    def run_of(self, code: KernelCode, arguments: Arguments) -> Run:
        run = super().run_of(code, arguments)
        self._codes[id(run)] = code.payload.decode()
        return run

    def synchronize(self) -> None:
        if self.library.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def samples(
        self, runs: Mapping[int, Run], rounds: int, begun: int, move: Callable[[], None]
    ) -> dict[int, list[float]]:
        for run in runs.values():
            run()
        self.synchronize()
        return {k: [float(self._codes[id(r)].split()[1])] * rounds for k, r in runs.items()}

    def forget(self) -> None:
        """Nothing is kept."""


def service() -> MeasureService:
    library = MisbehavingLibrary()
    library.play(pytest.MonkeyPatch())
    assert POINTER is ctypes.c_void_p
    return MeasureService(lambda request: PlayedGpu(library))
