"""Launches in Triton's interpreter, over tensors of the CPU, in a process in which Triton interprets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...codegen.kernel import KernelSource
from ...ir.target import Target
from ..gpu.table import GpuTableKernel
from ..triton.compile import load_source
from .arithmetic import LIBDEVICE, correct_interpreter, interpreter_builder
from .memory import allowed

Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Done:
    """How many programs of a launch ran, of how many."""

    programs: int
    total: int


class _HostMemory:
    """Memory for tables where there is one stream, and all of it is the host's."""

    def stream(self, device: int) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def upload(self, array: Any, device: int) -> Tensor:
        return torch.from_numpy(array.copy())

    def mark(self, device: int) -> None:
        return None

    def join(self, memory: Sequence[Tensor], mark: Any, device: int) -> None:
        """There is nothing to wait for."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)


@lru_cache(maxsize=256)
def _function(name: str, text: str) -> Any:
    correct_interpreter()
    fn = load_source(KernelSource(name, "triton", text, (), ()))
    fn.fn.__globals__["libdevice"] = LIBDEVICE
    return fn


def launch(source: KernelSource, grid: Sequence[int], tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> None:
    """Run a kernel over tensors and sizes, where they are."""
    fn = _function(source.name, source.text)
    with np.errstate(all="ignore"), allowed(tensors):
        fn[tuple(grid)](*_as_taken(source, tensors), *sizes)


def _as_taken(source: KernelSource, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as the kernel takes them: those of types that its target lacks as bytes."""
    return [t.view(b.dtype.torch) for t, b in zip(tensors, source.params, strict=True)]


def launch_table(
    source: KernelSource, target: Target, rows: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> list[tuple[bool, ...]]:
    """Run a kernel over a table, as a launch on a GPU would run it: the same rows and programs. Of each launch, which
    pointers were taken to be aligned."""
    launched: list[tuple[tuple[bool, ...], Grid]] = []
    kernel = GpuTableKernel(source, target, driver=object(), memory=_HostMemory())  # type: ignore[arg-type]

    def note(device: int, aligned: tuple[bool, ...], grid: Grid, arguments: Any, far: bool) -> None:
        launched.append((aligned, grid))

    tensors = [t for row in rows for t in row]
    kernel._kernel.launch = note  # type: ignore[method-assign, assignment]
    kernel(len(rows), tensors, sizes)
    if launched:
        ((_, grid),) = launched
        record = kernel.record(-1)
        assert record is not None
        fn = _function(source.name, source.text)
        with np.errstate(all="ignore"), allowed([*tensors, *record.memory]):
            fn[grid](*record.memory)
    return [aligned for aligned, _ in launched]


def launch_some(
    source: KernelSource, grid: Grid, tensors: Sequence[Tensor], sizes: Sequence[int], seconds: float
) -> Done:
    """Run as many programs of a kernel as about ``seconds`` allow: all of them in order, or some from the first to the
    last of the grid. None where some show nothing, as programs combine what they write in memory.
    """
    total = prod(grid)
    if total == 0:
        return Done(0, 0)
    together = "tl.atomic" in source.text
    fn, tensors = _function(source.name, source.text), _as_taken(source, tensors)
    # One program, over copies, tells how long the others take.
    copies = _copies(tensors)
    start = time.perf_counter()
    _run(fn, grid, [0], copies, sizes)
    each = time.perf_counter() - start
    afforded = max(1, int(seconds / each))
    if afforded < total and together:
        return Done(0, total)
    chosen: Sequence[int] = range(total)
    if afforded < total:
        chosen = sorted({int(k) for k in np.linspace(0, total - 1, max(afforded, 2))})
    _run(fn, grid, chosen, tensors, sizes)
    return Done(len(chosen), total)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in memory of their own, those of one memory in one."""
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().clone() for t in tensors}
    return [
        t.new_empty(0).set_(memory[t.untyped_storage().data_ptr()], t.storage_offset(), t.size(), t.stride())  # type: ignore[call-overload]
        for t in tensors
    ]


def _run(fn: Any, grid: Grid, programs: Sequence[int], tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Run these programs of a grid, counted with the last dimension fastest, one after the other."""
    width, depth = grid[1] * grid[2], grid[2]
    set_dim, set_place = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

    def place(k: int, *_: int) -> None:
        n = programs[k]
        set_place(n // width, n % width // depth, n % depth)

    interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx = (lambda *_: set_dim(*grid)), place
    try:
        with np.errstate(all="ignore"), allowed(tensors):
            fn[(len(programs),)](*tensors, *sizes)
    finally:
        interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx = set_dim, set_place
