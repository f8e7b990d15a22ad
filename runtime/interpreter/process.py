"""Kernels of a GPU that is not here, run over tensors of the CPU: by Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets, so it cannot be in this process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...codegen.kernel import KernelSource
from ...ir.errors import MlcError
from ...ir.target import Target
from ..compile.kernels import source_to_json
from ..gpu.launch import grid_function
from ..triton.service_process import ServiceProcess
from ..triton.worker_process import LostError, RefusedError

SERVICE = f"{__package__}.service"
IDLE_SECONDS = 60.0
# What a kernel may take beyond the seconds it is given: for one program, and for the process to start.
GRACE_SECONDS = 60.0


class InterpretedFaultError(MlcError):
    """A kernel did in the interpreter what it must not."""


@cache
def interpreting_process() -> ServiceProcess:
    """The process that interprets kernels for this one, which ends with it."""
    process = ServiceProcess(SERVICE, IDLE_SECONDS)
    atexit.register(process.end)
    return process


def _forked() -> None:
    if interpreting_process.cache_info().currsize:
        interpreting_process().disown()
        interpreting_process.cache_clear()


os.register_at_fork(after_in_child=_forked)


@dataclass(slots=True)
class InterpretedKernel:
    """A kernel as a function of rows of tensors and their sizes, of which all together may take ``seconds``.

    ``unknown`` says afterwards why some of it could not be run, "" where all of it was.
    """

    source: KernelSource
    target: Target
    seconds: float
    process: ServiceProcess = field(default_factory=interpreting_process, repr=False)
    unknown: str = ""

    def __call__(self, rows: Sequence[Sequence[Tensor]], sizes: Sequence[Mapping[str, int]]) -> float:
        """Run it, and return the share of its programs that ran: 1 for all, 0 where nothing is known of the results.

        Raises InterpretedFaultError where it reads or writes beside its arguments.
        """
        if self.seconds <= 0:
            self.unknown = self.unknown or "sizes before took all the time that there is for it"
            return 0.0
        numbers = [[int(row[s]) for s in self.source.symbols] for row in sizes]
        memory = {_address(t): t.untyped_storage() for row in rows for t in row}
        places = {address: k for k, address in enumerate(memory)}
        request = {
            "source": source_to_json(self.source),
            "target": str(self.target),
            "grid": grid_function(self.source)(*numbers[0]),
            "sizes": [n for row in numbers for n in row],
            "rows": [[_plain(t, places[_address(t)]) for t in row] for row in rows],
            "seconds": self.seconds,
        }
        with self.process.lock:
            try:
                parts = [_bytes(m).numpy().tobytes() for m in memory.values()]
                answer, after = self.process.ask(request, self.seconds + GRACE_SECONDS, *parts)
            except (LostError, RefusedError) as error:
                self.unknown = f"the process that interprets kernels {error}"
                return 0.0
        if "fault" in answer:
            raise InterpretedFaultError(answer["fault"])
        if "unknown" in answer:
            self.unknown = answer["unknown"]
            return 0.0
        self.seconds -= answer["seconds"]
        if answer["programs"] < answer["total"]:
            self.unknown = f"{answer['programs']} of {answer['total']} programs ran in the time that there is for it"
        for storage, content in zip(memory.values(), after, strict=True):
            _bytes(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return answer["programs"] / answer["total"] if answer["total"] else 1.0


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _plain(t: Tensor, memory: int) -> dict[str, Any]:
    return {
        "memory": memory, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape),
        "strides": list(t.stride()), "offset": t.storage_offset(),
    }  # fmt: skip
