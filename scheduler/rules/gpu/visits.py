"""Long rows that a program visits more than once: few at a time, so that later visits find them in the second cache.

A row that registers do not hold comes from memory at each visit, unless all rows that are under way fit into the cache
that multiprocessors share. A program of many threads keeps others off its multiprocessor, and asks memory for enough by
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.hints import EVICT
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import MOST_THREADS
from ...cost.rows import held_elements
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from .common import live_bytes, typical


def stay_in_cache(nest: LoopNest, target: Target) -> bool:
    """Whether rows that registers do not hold are visited again, and one a multiprocessor fits into the second
    cache."""
    shape = analyse(nest)
    row = typical(nest, sympy.Mul(*(e for _, e in shape.inner)))
    if row <= held_elements(target.machine) or not live_bytes(shape):
        return False
    return target.cores * row * sum(row_inputs(shape).values()) <= target.machine.l2_bytes


def row_inputs(shape: NestShape) -> Mapping[str, int]:
    """The bytes of an element of each input that has rows of its own for all programs."""
    rows, inner = ([v for v, _ in axes] for axes in (shape.rows, shape.inner))
    reads = [a for a in shape.accesses if not a.is_write and any(a.step(v) != 0 for v in rows)]
    return {a.buffer.name: a.buffer.dtype.itemsize for a in reads if any(a.step(v) != 0 for v in inner)}


def whole_warps(target: Target) -> int:
    """Warps of a program that has a multiprocessor to itself, as soon as its threads take more than a few registers."""
    return MOST_THREADS // target.warp


def keep_near(schedule: Schedule, inputs: Mapping[str, int], depth: int) -> None:
    """Let caches keep what is read of ``inputs`` in several of the loops that stand in ``depth`` others until the last
    of those."""
    visits: dict[str, dict[str, list[str]]] = {}
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        for load in schedule.block(block).reads:
            if len(loops) > depth and load.buffer in inputs:
                visits.setdefault(load.buffer, {}).setdefault(loops[depth], []).append(block)
    for buffer, by_loop in visits.items():
        *before, last = (dict.fromkeys(found) for found in by_loop.values())
        for block in {b: None for found in before for b in found}:
            schedule.annotate(block, EVICT.key(buffer), "evict_last")
        for block in last if before else ():
            schedule.annotate(block, EVICT.key(buffer), "evict_first")
