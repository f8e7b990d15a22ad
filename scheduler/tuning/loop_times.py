"""How long a scheduled nest takes at its typical sizes, by its loops: an estimate that tells schedules of one nest
apart where sizes differ, and is no prediction of a time."""

from __future__ import annotations

import math

from ...ir.nest.loops import BLOCK_KINDS, LoopKind, LoopNest
from ...ir.target import Target
from .measures import BlockWork, measured

# Nanoseconds that a step of a GPU's program waits for memory where too few programs are there to fill the time.
WAIT = 600.0


def loops_time(nest: LoopNest, target: Target) -> float:
    """Nanoseconds: a launch, and the longer of computing and of what comes from beyond the caches.

    Iterations past the ends of the domain count, as tiles that hang over have them, and lanes that a register has not;
    cores and multiprocessors that have nothing to do do not help.
    """
    machine, found = target.machine, measured(nest)
    issued = moved = 0.0
    share, waits = 1.0, 0
    for work in found.works:
        issued += work.iterations * work.cost / _at_once(work, target)
        share = min(share, _busy(work, target))
        waits = max(waits, math.prod(work.extents[lp.var.name] for lp in work.path if lp.kind is LoopKind.SERIAL))
    # What is fetched again after it has been used is the caches'.
    moved = sum(found.touched(frozenset(v for w in found.works for v in w.extents)).values())
    if target.is_gpu:
        # A program whose steps wait for one another takes as long however few programs there are.
        waited = waits * WAIT if share < 1.0 else 0.0
        return machine.launch + max(max(issued / machine.issued, moved / machine.bandwidth) / share, waited)
    rate = machine.float32 / target.lanes(4)
    return machine.launch + max(issued / rate, moved / machine.bandwidth) / (max(target.cores, 1) * share)


def _at_once(work: BlockWork, target: Target) -> float:
    """Iterations of a block that one instruction does: lanes, as far as a register has them. A GPU's instructions are
    counted by lanes, and those of its tensor cores do many."""
    if target.is_gpu:
        dots = work.over and any(lp.kind is LoopKind.THREAD_X and lp.var.name in work.over for lp in work.path)
        return target.machine.matmul / target.machine.float32 if dots else 1.0
    lanes = max(work.lanes, 1)
    return lanes / math.ceil(lanes / target.lanes(4))


def _busy(work: BlockWork, target: Target) -> float:
    """The share of a machine's cores that a block's loops keep at work."""
    kinds = BLOCK_KINDS if target.is_gpu else (LoopKind.PARALLEL,)
    programs = math.prod(work.extents[lp.var.name] for lp in work.path if lp.kind in kinds)
    cores = max(target.cores, 1)
    return min(1.0, max(programs, 1) / cores)
