"""How many rows a library multiplies at a time where kernels go on with them, and what that gains.

A block of results is read again from a cache. In exchange the library brings its right operand in order for each block
anew, which takes it as long as some rows of products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.machine import Machine
from .contraction_cpu import NEW_PAST, PAGED

# Measured on Zen 5 with MKL, 768 to 4096 terms: blocks of 128 rows take 8 % longer than all rows, of 256 rows 4 %, of
# 512 rows 3 %.
LOST_ROWS = 10.0
# Rows of a block. Second-level caches that a block may take: past the first, the third level has it.
SIZES = (512, 256, 128, 64, 32)
CACHES = 4
# Blocks for each core at least, so that none waits long for another.
SHARES = 4


def rows_of_block(rows: int, row_bytes: int, machine: Machine) -> int:
    """The rows of a block, of so many rows in all that take ``row_bytes`` of scratch each."""
    for size in SIZES:
        if size * row_bytes <= CACHES * machine.l2_bytes and (
            machine.cores == 1 or rows >= size * machine.cores * SHARES
        ):
            return size
    return SIZES[-1]


@dataclass(frozen=True, slots=True)
class Between:
    """A result of ``bytes`` that one call of a group makes and others read, ``reads`` times; ``kept`` where it is also
    needed as a whole."""

    bytes: int
    reads: int
    kept: bool


def gain_of_blocks(block: int, flops: Iterable[float], between: Iterable[Between], machine: Machine) -> float:
    """Nanoseconds that a group gains by running in blocks of so many rows."""
    gained = 0.0
    for b in between:
        if b.bytes <= machine.l2_bytes * machine.cores:
            continue  # it is in a cache as it is
        visits = b.reads + (not b.kept)
        gained += visits * b.bytes / machine.bandwidth
        gained += b.bytes * PAGED if b.bytes > NEW_PAST and not b.kept else 0.0
    return gained - sum(flops) / machine.matmul * LOST_ROWS / block


__all__ = ["Between", "gain_of_blocks", "rows_of_block"]
