"""The program in ONNX Runtime. Where that is not installed beside this project, an interpreter that has it, torch and
onnxscript is named: ``--python onnxruntime=PATH``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .arrays import inputs, keep

__all__ = ["inputs", "keep", "load", "write"]

WRITES_WITH = ("torch.onnx", "onnxscript")


def write(folder: Path, threads: int) -> list[Path]:
    """Export to ONNX; weights of more than 2 GB lie in a file beside it."""
    tensors = importlib.import_module(f"{__package__}.tensors")
    torch = importlib.import_module("torch")
    torch.onnx.export(tensors.program(folder), dynamo=True, external_data=True).save(folder / "model.onnx")
    return sorted(folder.glob("model.onnx*"))


def load(folder: Path, inputs: Sequence[Any], threads: int) -> Callable[[], object]:
    """A call of a session, which copies its results."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    given = dict(zip([i.name for i in session.get_inputs()], inputs, strict=True))
    return lambda: session.run(None, given)
