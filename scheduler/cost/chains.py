"""Whether a GPU multiplies functions of a product's results by another matrix as those results are made.

Then no matrix of them is written and read again, and one launch is left. In exchange both products run at the rate of
our loops with two products a step, below that of a library's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir.machine import Machine
from .products.contraction_gpu import WORTH
from .products.gpu_tiles import GROUP_ROWS, reach

# What a loop with several products a step reaches of the library's rate, in tiles of so many rows.
STREAMED, ROWS = 0.5, GROUP_ROWS
# Rows and columns of a tile whose scores are left out together, when none is seen; at so many places along each side.
TILE, PLACES = 64, 16
# Of the L2 cache, what scores may take and be found there again.
KEPT = 0.5


@dataclass(frozen=True, slots=True)
class ChainSize:
    """Typical sizes of products over the same scores: ``width`` sums the widths of all of them, those that scores are
    summed over and those of values; ``scores`` are how many matrices of scores there are, of ``itemsize`` bytes an
    element."""

    batch: int
    rows: int
    columns: int
    width: int
    scores: int
    itemsize: int
    seen: float = 1.0


def seen_share(rows: int, columns: int, is_empty: Callable[[int, int, int, int], bool]) -> float:
    """The share of tiles in which not every score is left out. ``is_empty`` says so of a tile by its first and its last
    row and column; it is asked about tiles that stand evenly apart."""
    firsts = [sorted({TILE * (k * -(-n // TILE) // PLACES) for k in range(PLACES)}) for n in (rows, columns)]
    tiles = [(r, min(r + TILE, rows) - 1, c, min(c + TILE, columns) - 1) for r in firsts[0] for c in firsts[1]]
    return sum(not is_empty(*t) for t in tiles) / len(tiles)


def decide_chain_gpu(size: ChainSize, machine: Machine) -> tuple[bool, str]:
    """Whether one kernel is clearly faster than a library's products with kernels between, and why."""
    ours, library = chain_times(size, machine)
    matrix = size.batch * size.rows * size.columns * size.itemsize
    told = f"{ours / 1e3:.1f} us in one kernel, {library / 1e3:.1f} us with {matrix >> 10} KiB of scores in memory"
    return ours < library * (1 - WORTH), told


def chain_times(size: ChainSize, machine: Machine) -> tuple[float, float]:
    """Nanoseconds of one kernel, and of a library's products with kernels between."""
    points = size.batch * size.rows * size.columns
    flops = 2.0 * points * size.width
    programs = size.batch * -(-size.rows // ROWS)
    waves = -(-programs // machine.cores)
    full = programs / (waves * machine.cores)
    ours = flops * size.seen / (machine.matmul * STREAMED * full)
    matrix = points * size.itemsize
    # One that fits the L2 cache is read from there.
    faster = reach(machine) if matrix * size.scores <= KEPT * machine.l2_bytes else 1.0
    moved = 2 * matrix * size.scores / (machine.bandwidth * faster)
    library = flops / machine.matmul + moved + machine.launch * size.scores
    return ours, library


__all__ = ["ChainSize", "chain_times", "decide_chain_gpu", "seen_share"]
