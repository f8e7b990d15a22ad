"""What it costs to compute an element again where it is read, rather than to write it and read it back."""

from __future__ import annotations

from ...ir.machine import Machine

# Traffic must fall at least so far: what is computed again also costs instructions.
GAIN = 0.75
# Operations of a function from which it is not repeated for each of so many rows.
COSTLY, MANY = 4, 256


def is_costly_in_lanes(machine: Machine, flops: int) -> bool:
    """Whether lanes along what is made would spend more on computing it in each row than on visiting it: roots and
    quotients on a CPU, where no loop outside the lanes knows it."""
    return not machine.is_gpu and flops >= COSTLY
