"""How many programs a machine wants, and in how many pieces work is done so that it has them."""

from __future__ import annotations

from ...ir.machine import Machine
from .products.gpu_tiles import reach

# A piece of a sum has at least so many elements, and fewer pieces than that are not worth a second kernel.
LEAST_PIECE, FEWEST_PIECES = 4096, 8
# A piece of rows has so many at least, or what it writes of its own is no small part of what it reads.
LEAST_ROWS = 16
# The least keys of a piece of those, of which pieces are multiples where keys vary in number; queries of a tile.
LEAST_KEYS, QUERIES = 256, 64
# Rows that occupy a CPU, of few cores, as far as reductions of at least so many elements are split over them.
CPU_ROWS, MANY_ELEMENTS = 64, 8192
# Results of a convolution's gradient of which channels that lie together share a program; what share of the bytes that
# pieces of a sum are read from their results may add.
CHANNELS, MORE = 32, 0.05


def fill(machine: Machine) -> int:
    """Programs that occupy a machine: one for each of its multiprocessors."""
    return machine.cores


def overlapping(machine: Machine) -> int:
    """Programs that occupy it well: two for each multiprocessor, so that one reads while the other reduces."""
    return 2 * machine.cores


def short_programs(machine: Machine) -> int:
    """Programs that occupy it where each is soon done: about four for each multiprocessor."""
    return 4 * machine.cores


def pieces_of_sum(machine: Machine, rows: int, elements: int) -> int:
    """In how many pieces reductions of ``elements`` to each of ``rows`` results are made; 1 for whole ones.

    Pieces that are short programs are a power of two in all, which divides most extents.
    """
    if rows > few_rows(machine):
        return 1
    programs = 1 << short_programs(machine).bit_length() - 1
    wanted = min(programs // max(rows, 1), elements // LEAST_PIECE)
    return wanted if wanted >= FEWEST_PIECES else 1


def pieces_of_rows(machine: Machine, count: int, alone: bool) -> int:
    """In how many pieces ``count`` rows are reduced over, each by a program that lasts; ``alone``: whose multiprocessor
    has no room for another one."""
    return max(min(fill(machine) if alone else overlapping(machine), count // LEAST_ROWS), 2)


def pieces_of_keys(machine: Machine, programs: int, keys: int) -> int:
    """In how many pieces each of so many ``programs`` of attention gets its ``keys``; 1 where they occupy it whole."""
    if programs >= fill(machine):
        return 1
    return max(min(-(-overlapping(machine) // programs), keys // LEAST_KEYS), 1)


def pieces_of_images(machine: Machine, programs: int, nbytes: int, results: int) -> int:
    """In how many pieces a gradient is summed over all images, ``results`` of 4 bytes a program of ``nbytes``."""
    return max(min(-(-short_programs(machine) // programs), int(MORE * nbytes / (results * 4))), 1)


def few_rows(machine: Machine) -> int:
    """Rows that occupy a machine: as many as a GPU's multiprocessors that together read as fast as the memory is, a
    power of two; two for each core of a CPU of many."""
    if not machine.is_gpu:
        return max(CPU_ROWS, overlapping(machine))
    return 1 << max(int(machine.cores / reach(machine)), 1).bit_length() - 1


def is_split(machine: Machine, rows: int, elements: int) -> bool:
    """Whether a reduction to few rows of many elements is split over programs or cores."""
    return rows < few_rows(machine) and elements >= MANY_ELEMENTS
