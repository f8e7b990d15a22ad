"""The program as a package of AOTInductor, called from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._inductor import aoti_compile_and_package, aoti_load_package

from .tensors import inputs, keep, program

__all__ = ["inputs", "keep", "load", "write"]


def write(folder: Path, threads: int) -> list[Path]:
    """Compile into a package."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        return [Path(aoti_compile_and_package(program(folder), package_path=str(folder / "packaged.pt2")))]


def load(folder: Path, inputs: Sequence[torch.Tensor], threads: int) -> Callable[[], object]:
    """A call of the package."""
    torch.set_num_threads(threads)
    model = aoti_load_package(str(folder / "packaged.pt2"))

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call
