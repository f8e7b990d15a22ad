"""A GPU kernel over a table as a callable: addresses and sizes go to the device when they change, and only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from ..codegen.kernel import ALIGNMENT, INDEX_MAX, KernelSource
from ..ir.target import Target
from .capture import Capture, current_capture
from .gpu import compile_triton
from .gpu_driver import Driver
from .gpu_launch import Compile, GpuKernel

Array: TypeAlias = np.ndarray[Any, Any]
Upload = Callable[[Array, int], torch.Tensor]


def upload(array: Array, device: int) -> torch.Tensor:
    """A copy of an array on a GPU."""
    return torch.from_numpy(array).to(torch.device("cuda", device))


def room(array: Array, device: int) -> torch.Tensor:
    """Memory on a GPU for an array, not initialised."""
    return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=torch.device("cuda", device))


@dataclass(slots=True)
class _Rows:
    """What was launched last on a device: the table for these numbers, and the programs for these grids."""

    numbers: tuple[int, ...] = ()
    sizes: bytes = b""
    rows: int = 0
    aligned: tuple[bool, ...] = ()
    far: bool = False
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
        room: Upload = room,
    ) -> None:
        self.source = source
        self._kernel = GpuKernel(source, target, compile, driver, stream)
        self._upload, self._room = upload, room
        self._state = _State()

    def __call__(self, rows: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
        """Launch; nothing where no row has any program."""
        each, width = len(tensors) // rows, len(self.source.symbols)
        numbers: list[int] = []
        for k in range(rows):
            numbers += [t.data_ptr() for t in tensors[k * each : (k + 1) * each]]
            numbers += sizes[k * width : (k + 1) * width]
        self.at(tensors[0].get_device(), rows, *numbers)

    def at(self, device: int, rows: int, *numbers: int) -> None:
        """Launch on a device, over the addresses of a row's tensors and its sizes, then those of the next row."""
        capture = current_capture()
        # A capture has a table of its own, which no other call may change.
        known = _Rows() if capture is not None else self._state.by_device.setdefault(device, _Rows())
        if known.programs is None or known.rows != rows or known.numbers != numbers:
            table = np.array(numbers, np.int64).reshape(rows, -1)
            sizes = np.ascontiguousarray(table[:, len(self.source.params) :])
            if known.programs is None or known.rows != rows or known.sizes != sizes.tobytes():
                programs = self._plan(sizes)
                known.rows, known.sizes, known.count, known.table = rows, sizes.tobytes(), len(programs), None
                known.far = any(self._kernel.reach(*row) > INDEX_MAX for row in sizes.tolist())
                known.programs = self._put(programs, device, capture)
            if known.count:
                known.aligned = self._aligned(table)
                known.table = self._put(table, device, capture)
            known.numbers = numbers
        if known.count == 0:
            return
        assert known.table is not None and known.programs is not None
        self._kernel.launch(
            device, known.aligned, (known.count, 1, 1), (known.table.data_ptr(), known.programs.data_ptr()), known.far
        )

    def _put(self, array: Array, device: int, capture: Capture | None) -> torch.Tensor:
        """An array on the device; what is captured gets its memory at once, and the content at the end."""
        if capture is None:
            return self._upload(array, device)
        memory = self._room(array, device)
        capture.later(lambda: memory.copy_(torch.from_numpy(array)), memory)
        return memory

    def _plan(self, sizes: Array) -> Array:
        """The program of every block of every row."""
        parts = []
        for k, row in enumerate(sizes.tolist()):
            x, y, z = self._kernel.grid(*row)
            block = np.arange(x * y * z, dtype=np.int32)
            place = np.empty((block.size, 4), np.int32)
            place[:, 0], place[:, 1], place[:, 2], place[:, 3] = k, block % x, block // x % y, block // (x * y)
            parts.append(place)
        return np.concatenate(parts) if parts else np.empty((0, 4), np.int32)

    def _aligned(self, table: Array) -> tuple[bool, ...]:
        """Which pointers are aligned in all rows, or none where one that could be is not."""
        relaxable = [b.align == 0 or b.align % ALIGNMENT == 0 for b in self.source.params]
        columns = table[:, : len(relaxable)]
        aligned = bool(((columns % ALIGNMENT == 0) | ~np.array(relaxable)).all())
        return tuple(r and aligned for r in relaxable)
