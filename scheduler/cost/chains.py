"""Whether a GPU multiplies functions of a product's results by another matrix as those results are made.

Then no matrix of them is written and read again, and one launch is left. In exchange both products run at the rate of
our loops with two products a step, below that of a library's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.machine import Machine
from .contraction_gpu import WORTH
from .gpu_tiles import GROUP_ROWS, reach

# What a loop with several products a step reaches of the library's rate, in tiles of so many rows.
STREAMED, ROWS = 0.5, GROUP_ROWS
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


def decide_chain_gpu(size: ChainSize, machine: Machine) -> tuple[bool, str]:
    """Whether one kernel is clearly faster than a library's products with kernels between, and why."""
    points = size.batch * size.rows * size.columns
    flops = 2.0 * points * size.width
    programs = size.batch * -(-size.rows // ROWS)
    waves = -(-programs // machine.cores)
    full = programs / (waves * machine.cores)
    ours = flops / (machine.matmul * STREAMED * full)
    matrix = points * size.itemsize
    # One that fits the L2 cache is read from there.
    faster = reach(machine) if matrix * size.scores <= KEPT * machine.l2_bytes else 1.0
    moved = 2 * matrix * size.scores / (machine.bandwidth * faster)
    library = flops / machine.matmul + moved + machine.launch * size.scores
    told = f"{ours / 1e3:.1f} us in one kernel, {library / 1e3:.1f} us with {matrix >> 10} KiB of scores in memory"
    return ours < library * (1 - WORTH), told


__all__ = ["ChainSize", "decide_chain_gpu"]
