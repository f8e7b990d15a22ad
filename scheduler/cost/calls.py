"""What calls of kernels cost beside their loops: launches, memory that waits, and lines of the cache.

The same on all machines but for lines: how what may wait, and what constants in place of sizes are worth, depend on a
machine's figures is not known.
"""

from __future__ import annotations

from ...ir.machine import Machine

# A function with scalars in it is taken apart where it is repeated, or at least so large.
LARGE_ELEMENTS = 1 << 15
# Results may wait for the last call of a table, or be made before their time, up to so many bytes together; for calls
# that stand close, only what the later ones read is bounded so.
MAX_WAITING_BYTES = 8 << 20
CLOSE = 6
# Calls with more bytes of results are worth a launch, and constants in place of sizes.
UNIFIED_BYTES = 32 << 20
# Calls that write the same points of several tensors are one for so many at most: addresses want registers.
MOST_JOINED = 4
# Different calls are one where each has so few bytes of results that a launch takes longer, and all of them together
# so many addresses, two registers of a thread each.
JOINED_BYTES, MOST_JOINED_ADDRESSES = 1 << 20, 24
# Loops of fewer iterations may be code without a loop where their number is known: such dimensions are no sizes. Of the
# addresses that a kernel is given, one in so many at least is read: others take a load and a store each.
LEAST_SHARED, MOST_UNREAD = 16, 8
# Functions that are worth one in place of all of them: a size costs a percent or two of a small kernel's time, each
# kernel less some 70 ms of compile time.
LEAST_FAMILY = 4


def shares_rows(machine: Machine) -> bool:
    """Whether a launch is worth more than a constant number of rows: threads of a CPU begin the next call at once."""
    return machine.is_gpu


def shares_code(machine: Machine) -> bool:
    """Whether functions that differ in sizes are compiled as one: Triton's compiler learns from constants what sizes do
    not tell it."""
    return not machine.is_gpu


# The order of the graph stays where another is not lower by so much.
WORTH = 0.99
# What is held at once may grow by so much for other ends, since some sizes are only typical ones.
MORE = 1.01

# Elements of a slice lie together for so many bytes at least: less than a line of the cache is written by several
# kernels, one after the other.
LEAST_RUN = 64
# Loops that run over dimensions as one before, and over the last of them after, still have so many bytes side by side.
WIDE_RUN = 4096
