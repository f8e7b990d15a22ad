"""The program under ``torch.compile(backend="mlc")``, whose cache the export has filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .tensors import PROGRAM, inputs, keep, program

__all__ = ["inputs", "keep", "load", "write"]


def write(folder: Path, threads: int) -> list[Path]:
    """Compile by a first call."""
    load(folder, inputs(folder), threads)()
    return [folder / PROGRAM]


def load(folder: Path, inputs: Sequence[torch.Tensor], threads: int) -> Callable[[], object]:
    """A call of the compiled module."""
    torch.set_num_threads(threads)
    compiled = torch.compile(program(folder).module(), backend="mlc", fullgraph=True)

    def call() -> object:
        with torch.no_grad():
            return compiled(*inputs)

    return call
