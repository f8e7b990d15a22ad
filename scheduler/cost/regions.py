"""When regions of a symbolic size are worth a program each, and which regions are looked at."""

from __future__ import annotations

from ...ir.machine import Machine

# The time of a graph has to fall by that share in a region, for predictions are wrong by about as much, and by so many
# nanoseconds a call, on CPUs and on GPUs: a program of its own takes a third of a second to compile, and who calls it
# ten thousand times has that back.
LEAST_SHARE, LEAST_SAVED, LEAST_SAVED_GPU = 0.08, 20e3, 5e3
# Programs of one graph at most: each is compiled, and each takes part in no other's caches of instructions.
MOST_VARIANTS = 4
# Sizes at which rules and decisions begin to differ, beside one row, a vector: more than few rows, as decoding has them
# and as one pass over a weight multiplies, and rows that occupy a machine.
FEW, MANY = 17, 256
CUTS = (FEW, MANY)


def least_saved(machine: Machine) -> float:
    """Nanoseconds a call that a program of its own has to spare."""
    return LEAST_SAVED_GPU if machine.is_gpu else LEAST_SAVED


def is_short(time: float, machine: Machine) -> bool:
    """Whether a graph that takes so many nanoseconds at typical sizes of a region is not planned for it: little could
    be saved."""
    return time < 2 * least_saved(machine)


def pays(own: float, other: float, least: float) -> bool:
    """Whether a program that takes ``own`` nanoseconds is worth compiling beside one that takes ``other``, and has to
    spare at ``least`` so many."""
    return other - own >= least and other - own >= LEAST_SHARE * other
