"""A GPU kernel over a table as a callable: addresses and sizes go to the device when they change, and only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..codegen.kernel import KernelSource
from ..ir.target import Target
from .gpu import ALIGNMENT, compile_triton
from .gpu_driver import Driver
from .gpu_launch import Compile, GpuKernel

Upload = Callable[[np.ndarray[Any, Any], int], torch.Tensor]


def upload(array: np.ndarray[Any, Any], device: int) -> torch.Tensor:
    """A copy of an array on a GPU."""
    return torch.from_numpy(array).to(torch.device("cuda", device))


@dataclass(slots=True)
class _Rows:
    """What was launched last on a device: the table for these numbers, and the programs for these grids."""

    numbers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: int = 0
    aligned: tuple[bool, ...] = ()
    table: torch.Tensor | None = None
    programs: torch.Tensor | None = None
    count: int = 0


@dataclass(slots=True)
class _State:
    by_device: dict[int, _Rows] = field(default_factory=dict)


class GpuTableKernel:
    """``kernel(rows, tensors, sizes)`` launches once for all rows: their tensors and sizes one after the other."""

    def __init__(
        self,
        source: KernelSource,
        target: Target,
        compile: Compile = compile_triton,
        driver: Driver | None = None,
        stream: Callable[[int], int] | None = None,
        upload: Upload = upload,
    ) -> None:
        self.source = source
        self._kernel = GpuKernel(source, target, compile, driver, stream)
        self._upload = upload
        self._state = _State()

    def __call__(self, rows: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
        """Launch; nothing where no row has any program."""
        device = tensors[0].get_device()
        known = self._state.by_device.setdefault(device, _Rows())
        addresses = tuple(t.data_ptr() for t in tensors)
        given = tuple(sizes)
        if known.programs is None or known.rows != rows or known.sizes != given:
            self._plan(known, rows, given, device)
        if known.count == 0:
            return
        if known.table is None or known.numbers != addresses:
            self._fill(known, rows, addresses, given, device)
        assert known.table is not None and known.programs is not None
        self._kernel.launch(
            device, known.aligned, (known.count, 1, 1), (known.table.data_ptr(), known.programs.data_ptr())
        )

    def _plan(self, known: _Rows, rows: int, sizes: tuple[int, ...], device: int) -> None:
        """The program of every block of every row."""
        width = len(self.source.symbols)
        parts = []
        for k in range(rows):
            x, y, z = self._kernel.grid(*sizes[k * width : (k + 1) * width])
            block = np.arange(x * y * z, dtype=np.int32)
            place = np.empty((block.size, 4), np.int32)
            place[:, 0], place[:, 1], place[:, 2], place[:, 3] = k, block % x, block // x % y, block // (x * y)
            parts.append(place)
        programs = np.concatenate(parts) if parts else np.empty((0, 4), np.int32)
        known.rows, known.sizes, known.count, known.table = rows, sizes, len(programs), None
        known.programs = self._upload(programs, device)

    def _fill(self, known: _Rows, rows: int, addresses: tuple[int, ...], sizes: tuple[int, ...], device: int) -> None:
        columns = np.array(addresses, np.uint64).reshape(rows, -1)
        relaxable = [b.align == 0 or b.align % ALIGNMENT == 0 for b in self.source.params]
        aligned = bool(((columns % ALIGNMENT == 0) | ~np.array(relaxable)).all())
        known.aligned = tuple(r and aligned for r in relaxable)
        table = np.concatenate((columns.view(np.int64), np.array(sizes, np.int64).reshape(rows, -1)), axis=1)
        known.table, known.numbers = self._upload(np.ascontiguousarray(table), device), addresses
