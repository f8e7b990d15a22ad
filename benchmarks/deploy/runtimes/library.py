"""The program as a library of torch-mlc's, called with NumPy by the file that is made to be copied: no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .arrays import inputs, keep

__all__ = ["inputs", "keep", "load", "write"]

WRITES_WITH = ("torch_mlc", "torch.export")
OPEN = Path(__file__).resolve().parents[3] / "runtime" / "export" / "open.py"


def write(folder: Path, threads: int) -> list[Path]:
    """Export; of what is written, a program at run time needs the library and the weights."""
    tensors = importlib.import_module(f"{__package__}.tensors")
    made = importlib.import_module("torch_mlc").export(tensors.program(folder), folder / "library")
    return [made / "model.so", made / "model.safetensors"]


def load(folder: Path, inputs: Sequence[Any], threads: int) -> Callable[[], object]:
    """A call of the library, which makes new arrays for its results."""
    spec = importlib.util.spec_from_file_location("open_library", OPEN)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.ModelLibrary(folder / "library", threads=threads)
    return lambda: model.call("forward", *inputs)
