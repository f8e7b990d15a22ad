"""What runs kernels in Triton's interpreter, in a process of its own (``service_worker.py``).

A request has the source of a kernel, and the shapes of its tensors within runs of bytes. An answer has those bytes as
they are afterwards, a ``fault`` of the kernel's, or why it is ``unknown`` what the kernel does.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir.expr.dtypes import DType
from ...ir.target import gpu_target
from ..compile.kernels import source_of_json


class InterpreterService:
    """Answers requests for launches, one after the other."""

    def __call__(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        # The environment is the asking process's.
        os.environ["TRITON_INTERPRET"] = "1"
        launching = importlib.import_module(f"{__package__}.launching")
        source = source_of_json(request["source"])
        memory = [torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in parts]
        rows = [[_tensor(t, memory) for t in row] for row in request["rows"]]
        start = time.perf_counter()
        try:
            if source.option("table"):
                launching.launch_table(source, gpu_target(request["target"]), rows, request["sizes"])
                done, total = 1, 1
            else:
                made = launching.launch_some(
                    source, tuple(request["grid"]), rows[0], request["sizes"], request["seconds"]
                )
                done, total = made.programs, made.total
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # Triton's interpreter wraps what a kernel raises, and its own defects alike.
            return ({"fault": text} if "beside the arguments" in text else {"unknown": text}), ()
        seconds = time.perf_counter() - start
        return {"programs": done, "total": total, "seconds": seconds}, [m.numpy().tobytes() for m in memory]


def _tensor(plain: Mapping[str, Any], memory: Sequence[torch.Tensor]) -> torch.Tensor:
    content = memory[plain["memory"]].view(DType(plain["dtype"]).torch)
    return content.as_strided(plain["shape"], plain["strides"], plain["offset"])


def service() -> InterpreterService:
    """What answers the requests of one process."""
    return InterpreterService()
