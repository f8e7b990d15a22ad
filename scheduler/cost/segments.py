"""Whether rows that indices name are summed by atomic operations or by sorted segments, and in which pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...ir.expr.dtypes import DType
from ...ir.machine import Machine

# Kernels of torch's stable sort of one list: one where a block holds it, with a copy and a count; else a histogram, its
# sums and a pass for each of the four bytes of a place, with what they need. Source: ATen/native/cuda/Sort.cpp.
SHORT_LIST, SHORT_SORT, LONG_SORT = 4096, 3, 9
# Bytes that such a sort moves for each row of the list: places and positions, back and forth, byte by byte.
SORTED_BYTES = 4 * 2 * (4 + 8)
# Our kernels beside the sort: places, where segments begin, pieces of long segments, results.
SEGMENT_KERNELS = 4
# Bytes of a place's two ends, written once and read twice.
END_BYTES = 12
# Results of a program, and rows of each whose loads are under way at once, where places have several: more take
# registers, and most segments are short.
TILE, AT_ONCE = 1024, 2
# Segments of shorter lists are summed row by row; the bytes of a row below which nothing is gained.
LEAST_LIST, LEAST_ROW = 128, 64


@dataclass(frozen=True, slots=True)
class RowSums:
    """``rows`` of ``width`` elements each are added to places of a table of ``elements``, whose type is ``dtype``.
    ``is_read``: the table's old elements go on."""

    elements: int
    rows: int
    width: int
    dtype: DType
    is_read: bool = False

    @property
    def touched(self) -> int:
        """Elements of the table that some row is added to, where places are as likely as one another."""
        places = max(self.elements // max(self.width, 1), 1)
        return int(-self.elements * math.expm1(-self.rows / places))


def atomic_nanoseconds(machine: Machine, sums: RowSums) -> float:
    """The time of sums by atomic operations: a table of the type that is added in begins, rows are read, what they
    touch is read and written, and a narrower table is made of it."""
    wide, narrow = sums.dtype.compute.itemsize, sums.dtype.itemsize
    moved = sums.elements * wide + sums.rows * sums.width * narrow + 2 * sums.touched * wide
    moved += sums.elements * narrow if sums.is_read else 0
    moved += sums.elements * (wide + narrow) if narrow < wide else 0
    return (3 if narrow < wide else 2) * machine.launch + moved / machine.bandwidth


def segment_nanoseconds(machine: Machine, sums: RowSums) -> float:
    """The time of sums by sorted segments: rows are read, and each element of the table is written once."""
    itemsize, places = sums.dtype.itemsize, sums.elements // max(sums.width, 1)
    moved = (sums.elements * (1 + sums.is_read) + sums.rows * sums.width) * itemsize
    moved += places * END_BYTES + sums.rows * SORTED_BYTES
    sort = SHORT_SORT if sums.rows <= SHORT_LIST else LONG_SORT
    return (SEGMENT_KERNELS + sort) * machine.launch + moved / machine.bandwidth


def sorts(machine: Machine, sums: RowSums) -> bool:
    """Whether sorted segments are sooner done."""
    if sums.width * sums.dtype.itemsize < LEAST_ROW:
        return False
    return segment_nanoseconds(machine, sums) < atomic_nanoseconds(machine, sums)


def rows_at_once(places: int, rows: int) -> int:
    """Rows of a place that a step of its sum adds up, where ``rows`` go to so many ``places``.

    A step has the instructions of all its rows, whether there are as many or not: where most places have one row or
    none, a second one would double what nearly all programs do.
    """
    return AT_ONCE if rows > places else 1


def piece_of_list(rows: int) -> int | None:
    """Rows of a piece of a sorted list, a power of two. None where lists are short.

    A place sums up to twice as many rows one after the other, and then the pieces that are its own: fewest where a
    sixteenth of all rows go to one place, as those of a frequent word do.
    """
    if rows < LEAST_LIST:
        return None
    return 1 << max(math.isqrt(rows // 16).bit_length() - 1, 3)
