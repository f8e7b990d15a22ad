"""A process that compiles GPU kernels: ``python -I triton_worker.py <parent> <seconds>``.

It is run as a file, by whoever has ``runtime/triton/worker_pool.py``, and imports Triton and nothing else: not torch,
nothing of ours but the files beside it, and never the program that wants its kernels, so that a script needs no guard.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Compiler:
    """Answers requests for kernels. Texts that stand in for libdevice are files in memory, known by their hash."""

    def __init__(self) -> None:
        self._stages = _beside("triton_stages")
        self._files: dict[str, str] = {}

    def __call__(self, request: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
        for text in parts:
            self._add(text)
        if request["library"] is not None:
            request["library"] = self._files[request["library"]]
        answer = self._stages.run_stages(self._stages.Request(**request))
        plain, binary = self._stages.answer_parts(answer)
        return {"answer": plain}, binary

    def _add(self, text: bytes) -> None:
        descriptor = os.memfd_create("torch-mlc-libdevice")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(text)
        self._files[hashlib.sha256(text).hexdigest()] = f"/proc/self/fd/{descriptor}"


def _beside(name: str) -> Any:
    """A file beside this one, without the package around it."""
    full = f"torch_mlc_{name}"
    spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _beside("worker_wire").serve(int(sys.argv[1]), float(sys.argv[2]), _Compiler())
