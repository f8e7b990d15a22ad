"""When regions of a symbolic size are worth a program each, and which regions are looked at."""

from __future__ import annotations

# The time of a graph has to fall by that share in a region, and by so many nanoseconds a call: a program of its own
# takes a third of a second to compile, and who calls it ten thousand times has that back.
LEAST_SHARE, LEAST_SAVED = 0.03, 20e3
# A graph that takes less than that at typical sizes of a region is not planned for it: little could be saved.
LEAST_TIME = 2 * LEAST_SAVED
# Programs of one graph at most: each is compiled, and each takes part in no other's caches of instructions.
MOST_VARIANTS = 4
# Sizes at which rules and decisions begin to differ, beside one row, a vector: more than few rows, as decoding has them
# and as one pass over a weight multiplies, and rows that occupy a machine.
FEW, MANY = 16, 256
CUTS = (FEW, MANY)


def pays(own: float, other: float) -> bool:
    """Whether a program that takes ``own`` nanoseconds is worth compiling beside one that takes ``other``."""
    return other - own >= LEAST_SAVED and other - own >= LEAST_SHARE * other
