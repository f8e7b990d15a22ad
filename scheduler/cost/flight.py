"""How many steps of a loop over memory a GPU's program has under way, so that memory is busy."""

from __future__ import annotations

import math

from ...ir.machine import Machine

# The most steps that are worth their shared memory, and the share of it that a loop which only reads may take: what it
# leaves is the first cache's.
MOST_STEPS, SHARED = 4, 0.75
# Registers of a thread of such a loop, as a rule: they bound the programs on a multiprocessor.
USUAL_REGISTERS = 64


def bytes_wanted(machine: Machine) -> float:
    """Bytes of loads that a multiprocessor has under way while all of them keep the memory busy: what comes in the
    time that it takes under load (Little's law)."""
    if machine.pipes is None or not machine.clock:
        return 0.0
    return machine.bandwidth * machine.pipes.loaded_latency / machine.clock / machine.cores


def steps_under_way(machine: Machine, nbytes: int, arrays: int, programs: int, resident: int) -> int:
    """The steps that a loop has in flight, each of which reads ``nbytes`` of ``arrays``; 1 where its loads are not
    copied ahead of their use.

    ``programs`` are those of the launch, of which a multiprocessor holds ``resident`` at most. What is read of one
    array is under way together before any of it is used; of several it is not. Only copies to shared memory that go on
    by themselves are worth it.
    """
    if not machine.has_async_copies or nbytes <= 0:
        return 1
    held = min(max(programs / machine.cores, 1.0), resident)
    wanted = bytes_wanted(machine)
    if arrays == 1 and nbytes * held >= wanted:
        return 1
    steps = 1 + max(math.ceil(wanted / (nbytes * held)), 2)
    room = int(min(SHARED * machine.shared / held, machine.block_shared) // nbytes)
    return max(min(steps, MOST_STEPS, room), 1)
