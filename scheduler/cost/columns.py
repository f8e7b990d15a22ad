"""How columns are shared out among a GPU's programs: what a program reads of a row, and in how many pieces rows are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...ir.machine import Machine
from .programs import LEAST_ROWS, overlapping, short_programs

# Bytes that memory and caches move at a time: a sector, and a line, which memory gives as fast as it can.
SECTOR, LINE = 32, 128
# The share of the memory's rate that a loop reaches which finds the place of each element by a quotient.
CROSSING = 0.5
# The most columns of a program.
MOST_COLUMNS = 128


def segment_share(contiguous: int) -> float:
    """The share of the memory's rate that accesses of so many contiguous bytes reach: half of it in sectors that lie
    alone, three quarters in pairs of them, all of it in lines."""
    return min(max(math.log2(max(contiguous, 1)) / 4 - 0.75, 0.0625), 1.0)


def columns_of(machine: Machine, results: Sequence[int], itemsize: int) -> int:
    """Columns of a program, a power of two, where ``results`` are the extents of all columns, the last contiguous: what
    reads fastest, of lines at most, and of more where programs are left all the same."""
    *others, last = results
    widest = min(1 << max(last - 1, 0).bit_length(), MOST_COLUMNS)
    least = min(max(SECTOR // itemsize, 8), widest)

    def rate(columns: int) -> tuple[float, int]:
        return _rate(machine, -(-last // columns) * math.prod(others), columns * itemsize), columns

    return max(_powers(least, widest), key=rate)


def pieces_of_columns(
    machine: Machine, results: Sequence[int], rows: int, nbytes: int, states: int, itemsize: int
) -> int:
    """In how many pieces columns of ``rows`` elements of ``itemsize`` bytes are reduced; 1 whole.

    ``results`` are the extents of all columns, the last contiguous. ``nbytes`` is what is read and written in all, and
    ``states`` the bytes that a column keeps of a piece. A second kernel has to be worth its launch.
    """
    *others, last = results
    programs = -(-last // min(max(LINE // itemsize, 1), MOST_COLUMNS)) * math.prod(others)
    wanted = min(short_programs(machine) // programs, rows // LEAST_ROWS)
    if wanted < 2:
        return 1
    columns = columns_of(machine, results, itemsize)
    whole = nbytes / _rate(machine, -(-last // columns) * math.prod(others), columns * itemsize)
    more = 2 * wanted * states * math.prod(results)
    split = (nbytes + more) / _rate(machine, wanted * programs, min(last * itemsize, LINE))
    return wanted if split + machine.launch < whole else 1


def pieces_of_parts(machine: Machine, results: int, parts: int, nbytes: int, states: int) -> int:
    """In how many pieces rows are reduced, each of ``parts`` that lie apart in memory: one a part, or 1 whole, where
    the steps of a program cross from one part to the next. The rest is as of ``pieces_of_columns``."""
    if parts < 2:
        return 1
    whole = nbytes / (_rate(machine, results, LINE) * CROSSING)
    split = (nbytes + 2 * parts * states * results) / _rate(machine, results * parts, LINE)
    return parts if split + machine.launch < whole else 1


def _rate(machine: Machine, programs: int, contiguous: int) -> float:
    """Bytes a nanosecond that so many programs read, as far as they occupy the machine."""
    return machine.bandwidth * min(programs / overlapping(machine), 1.0) * segment_share(contiguous)


def _powers(low: int, high: int) -> Iterable[int]:
    return (1 << k for k in range(low.bit_length() - 1, high.bit_length()))
