"""Inputs and results as tensors, and the program, for runtimes within torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from . import arrays

PROGRAM = "program.pt2"


def inputs(folder: Path) -> list[torch.Tensor]:
    """The inputs of the program, in their order."""
    return [torch.from_numpy(a) for a in arrays.inputs(folder)]


def keep(folder: Path, results: Any) -> None:
    """Write the results of a call."""
    arrays.keep(folder, [r.numpy() for r in tree_leaves(results)])


def program(folder: Path) -> ExportedProgram:
    """The program to be exported."""
    return torch.export.load(folder / PROGRAM)
