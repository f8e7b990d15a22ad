"""The program as torch runs it, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .tensors import PROGRAM, inputs, keep, program

__all__ = ["inputs", "keep", "load", "write"]


def write(folder: Path, threads: int) -> list[Path]:
    """The program's own file."""
    return [folder / PROGRAM]


def load(folder: Path, inputs: Sequence[torch.Tensor], threads: int) -> Callable[[], object]:
    """A call of the program's module."""
    torch.set_num_threads(threads)
    module = program(folder).module()

    def call() -> object:
        with torch.no_grad():
            return module(*inputs)

    return call
