"""How a kernel that is verified is run: by this machine, or by Triton's interpreter where its GPU is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from ...ir.target import Target
from ...runtime.compile.kernels import KernelCode, LoadedKernel, load_code, source_of_json
from ...runtime.interpreter.process import InterpretedKernel
from ...runtime.targets import target_for

Rows = Sequence[Sequence[Tensor]]
Sizes = Sequence[Mapping[str, int]]
# Seconds that Triton's interpreter gets for a kernel, all sizes together. A line of a kernel takes it about a tenth of
# a millisecond for each program, so that is some thousand programs of a small kernel.
INTERPRETER_SECONDS = 2.0


class KernelRun(Protocol):
    """A kernel over rows of tensors on ``device``, and their sizes. A call returns the share of it that ran.

    ``unknown`` says why something could not be run, "" where nothing stood against it.
    """

    @property
    def device(self) -> str: ...

    @property
    def unknown(self) -> str: ...

    def __call__(self, rows: Rows, sizes: Sizes) -> float: ...


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """Machine code of this machine."""

    code: KernelCode
    kernel: LoadedKernel
    table: bool
    device: str
    unknown: str = ""

    def __call__(self, rows: Rows, sizes: Sizes) -> float:
        numbers = [[row[s] for s in self.code.symbols] for row in sizes]
        count = [len(rows)] if self.table else []
        if self.code.language == "llvm":
            pairs = zip(rows, numbers, strict=True)
            self.kernel.call(*count, *(a for row, n in pairs for a in (*(t.data_ptr() for t in row), *n)))
        else:
            self.kernel.call(*count, tuple(t for row in rows for t in row), tuple(n for row in numbers for n in row))
        return 1.0


@dataclass(frozen=True, slots=True)
class InterpretedRun:
    """The text of a kernel."""

    kernel: InterpretedKernel
    device: str = "cpu"

    @property
    def unknown(self) -> str:
        return self.kernel.unknown

    def __call__(self, rows: Rows, sizes: Sizes) -> float:
        return self.kernel(rows, sizes)


@dataclass(frozen=True, slots=True)
class NoRun:
    """A kernel that nothing here can run."""

    unknown: str
    device: str = "cpu"

    def __call__(self, rows: Rows, sizes: Sizes) -> float:
        return 0.0


def kernel_run(code: KernelCode, target: Target, *, table: bool) -> KernelRun:
    """How to run a kernel, of which a function over a ``table`` takes several rows at once."""
    if not target.is_gpu or _is_here(target):
        return LoadedRun(code, load_code(code), table, "cuda" if target.is_gpu else "cpu")
    if find_spec("triton") is None:
        return NoRun(f"there is no {target} here, and no Triton that could interpret it")
    return InterpretedRun(InterpretedKernel(source_of_json(code.meta["source"]), target, INTERPRETER_SECONDS))


def _is_here(target: Target) -> bool:
    if not torch.cuda.is_available():
        return False
    here = target_for("cuda")
    return here.kind == target.kind and here.arch == target.arch
