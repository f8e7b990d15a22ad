"""A GPU kernel over a table as a callable: addresses and sizes go to the device when they change, and only then.

What is on the device is a record that never changes: a call with other numbers makes another one and puts it in the
place of the last, so that threads take what is there or make their own. A stream that meets a record of another one
waits for its copy, once.

A capture is replayed long after, and what it launches must find its table then. One of ours (``capture.py``) has rooms
for its tables, which are filled when it is done. Of a user's own capture (``torch.cuda.graph``) nobody tells how
long it lives; there the table is written by launches of the capture itself, which hold the numbers as their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codegen.kernel import ALIGNMENT, INDEX_MAX, KernelSource
from ...ir.target import Target
from ..triton.compile import compile_triton
from .capture import Capture, current_capture
from .driver import Driver
from .launch import Compile, GpuKernel
from .table_memory import Array, GpuMemory, TableMemory


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table of rows of ``numbers``, and the programs for their ``sizes``: ``count`` of them.

    ``mark`` is behind the copies, on the stream that asked for them; ``joined`` are the streams that know of it.
    """

    numbers: tuple[int, ...]
    rows: int
    sizes: bytes
    count: int
    aligned: tuple[bool, ...]
    table: torch.Tensor | None
    programs: torch.Tensor | None
    far: bool = False
    mark: Any = None
    joined: set[int] = field(default_factory=set)

    @property
    def memory(self) -> list[torch.Tensor]:
        return [t for t in (self.table, self.programs) if t is not None]


class GpuTableKernel:
    """``kernel(rows, tensors, sizes)`` launches once for all rows: their tensors and sizes one after the other.

    Safe to call from several threads and on several streams, and inside of captures.
    """

    def __init__(
        self,
        source: KernelSource,
        target: Target,
        compile: Compile = compile_triton,
        driver: Driver | None = None,
        memory: TableMemory | None = None,
        *,
        checked: bool = False,
    ) -> None:
        """``memory`` stands for that of this machine's GPUs; ``checked`` is as for ``GpuKernel``."""
        self.source = source
        stream = None if memory is None else memory.stream
        self._kernel = GpuKernel(source, target, compile, driver, stream, checked=checked)
        self._memory: TableMemory = GpuMemory() if memory is None else memory
        self._relaxable = tuple(b.align == 0 or b.align % ALIGNMENT == 0 for b in source.params)
        self._records: dict[int, TableRecord] = {}

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
        if capture is not None:
            record = self._left_for_later(device, rows, numbers, capture)
        elif self._memory.capturing():
            record = self._written_by_launches(device, rows, numbers)
        else:
            record = self._uploaded(device, rows, numbers)
        if record.count:
            assert record.table is not None and record.programs is not None
            where = (record.table.data_ptr(), record.programs.data_ptr())
            self._kernel.launch(device, record.aligned, (record.count, 1, 1), where, record.far)

    def record(self, device: int) -> TableRecord | None:
        """What was launched last on a device, outside of captures."""
        return self._records.get(device)

    def _uploaded(self, device: int, rows: int, numbers: tuple[int, ...]) -> TableRecord:
        """The record of these numbers, that the current stream may use."""
        memory, stream = self._memory, self._memory.stream(device)
        known = self._records.get(device)
        if known is not None and stream not in known.joined:
            memory.join(known.memory, known.mark, device)
            known.joined.add(stream)
        if known is not None and known.rows == rows and known.numbers == numbers:
            return known
        table = np.array(numbers, np.int64).reshape(rows, -1)
        sizes = self._sizes(table)
        programs: torch.Tensor | None
        if known is not None and known.rows == rows and known.sizes == sizes.tobytes():
            count, programs, far = known.count, known.programs, known.far
        else:
            count, grids = self._grids(sizes)
            programs = memory.upload(_plan(grids), device) if count else None
            far = self._far(sizes)
        placed = memory.upload(table, device) if count else None
        made = TableRecord(
            numbers,
            rows,
            sizes.tobytes(),
            count,
            self._aligned(table),
            placed,
            programs,
            far,
            memory.mark(device),
            {stream},
        )
        self._records[device] = made
        return made

    def _left_for_later(self, device: int, rows: int, numbers: tuple[int, ...], capture: Capture) -> TableRecord:
        """Rooms of a capture's, which are filled at its end."""
        table = np.array(numbers, np.int64).reshape(rows, -1)
        sizes = self._sizes(table)
        count, grids = self._grids(sizes)
        if not count:
            return TableRecord(numbers, rows, b"", 0, (), None, None)

        def put(array: Array) -> torch.Tensor:
            content = torch.from_numpy(array)
            room = capture.room(partial(self._memory.room, array.shape, content.dtype, device))
            capture.later(lambda: room.copy_(content))
            return room

        placed, programs = put(table), put(_plan(grids))
        return TableRecord(numbers, rows, b"", count, self._aligned(table), placed, programs, self._far(sizes))

    def _written_by_launches(self, device: int, rows: int, numbers: tuple[int, ...]) -> TableRecord:
        """Memory that the current stream writes the table and the programs to: each number is the argument of a kernel,
        so that nothing is read from the host."""
        table = np.array(numbers, np.int64).reshape(rows, -1)
        sizes = self._sizes(table)
        count, grids = self._grids(sizes)
        if not count:
            return TableRecord(numbers, rows, b"", 0, (), None, None)
        placed = self._with_numbers(table, device)
        starts, x, y = self._with_numbers(_starts(grids), device).unbind()
        block = torch.arange(count, device=placed.device)
        row = torch.searchsorted(starts, block, right=True) - 1
        within, x, y = block - starts.take(row), x.take(row), y.take(row)
        down = within.div(x, rounding_mode="floor")
        places = (row, within.remainder(x), down.remainder(y), down.div(y, rounding_mode="floor"))
        programs = torch.stack(places, 1).to(torch.int32)
        return TableRecord(numbers, rows, b"", count, self._aligned(table), placed, programs, self._far(sizes))

    def _with_numbers(self, array: Array, device: int) -> torch.Tensor:
        room = self._memory.room(array.shape, torch.int64, device)
        room.zero_()
        torch._foreach_add_(list(room.view(-1).unbind()), array.reshape(-1).tolist())
        return room

    # --- rows -------------------------------------------------------------------------------------------------------

    def _sizes(self, table: Array) -> Array:
        return np.ascontiguousarray(table[:, len(self.source.params) :])

    def _grids(self, sizes: Array) -> tuple[int, list[tuple[int, int, int]]]:
        """How many programs all rows have, and the grid of each row."""
        grids: list[tuple[int, int, int]] = [self._kernel.grid(*row) for row in sizes.tolist()]
        return sum(x * y * z for x, y, z in grids), grids

    def _far(self, sizes: Array) -> bool:
        """Whether indices of any row reach beyond 32 bits."""
        return any(self._kernel.reach(*row) > INDEX_MAX for row in sizes.tolist())

    def _aligned(self, table: Array) -> tuple[bool, ...]:
        """Which pointers are aligned in all rows, or none where one that could be is not."""
        columns = table[:, : len(self._relaxable)]
        aligned = bool(((columns % ALIGNMENT == 0) | ~np.array(self._relaxable)).all())
        return tuple(r and aligned for r in self._relaxable)


def _plan(grids: Sequence[tuple[int, int, int]]) -> Array:
    """The program of every block of every row: the row, and its place in the row's grid."""
    parts = []
    for k, (x, y, z) in enumerate(grids):
        block = np.arange(x * y * z, dtype=np.int32)
        place = np.empty((block.size, 4), np.int32)
        place[:, 0], place[:, 1], place[:, 2], place[:, 3] = k, block % x, block // x % y, block // (x * y)
        parts.append(place)
    return np.concatenate(parts) if parts else np.empty((0, 4), np.int32)


def _starts(grids: Sequence[tuple[int, int, int]]) -> Array:
    """By row: how many programs are before it, and the first two extents of its grid."""
    counts = [x * y * z for x, y, z in grids]
    before = np.cumsum([0, *counts[:-1]])
    return np.array([before, [x for x, _, _ in grids], [y for _, y, _ in grids]], np.int64)
