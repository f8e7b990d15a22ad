"""Row reductions on GPUs: rows in registers where they fit, several to a program where they are short, loops beyond."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.expr.value import free_symbols
from ....ir.nest.hints import EARLY, EVICT, NUM_WARPS, RESIDENT
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import MOST_THREADS, MOST_WARPS, ROW_SHORT, WIDE_TILE
from ...cost.recompute import rows_for_one
from ...cost.rows import comes_back, held_bytes, held_elements, rows_together, warps_of_rows
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Params, Rule, Value
from .common import (
    GPUS,
    clamp_power,
    cut,
    fused,
    has_scan,
    inner_loops,
    live_bytes,
    live_rows,
    next_power,
    programs,
    row_depth,
    tile,
    typical,
    warps_for,
)


def _is_looped(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    return (shape.has_reduction or bool(shape.inner)) and not has_scan(nest)


def _row(shape: NestShape) -> sympy.Expr:
    return sympy.Mul(*(e for _, e in shape.inner))


def _is_persistent(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    row = _row(shape)
    return shape.has_reduction and bool(row.is_Integer) and _is_held(shape, int(row), target)


def _is_held(shape: NestShape, row: int, target: Target) -> bool:
    """Whether the registers of a program hold all that is kept of a row of so many elements."""
    size = next_power(row)
    held = held_elements(target.machine)
    packed = 2 * size <= held and size * live_bytes(shape) <= held_bytes(target.machine)
    return packed or size * live_rows(shape) <= held


def _persistent_parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    size = next_power(int(_row(shape)))
    count = typical(nest, sympy.Mul(*(e for _, e in shape.rows)))
    rows = 1
    if row_for_all(shape):
        rows = rows_for_one(target.machine, count)
    elif size <= ROW_SHORT:
        # Several rows a program, as long as every processor has work.
        rows = clamp_power(max(min(2048 // size, count // (2 * target.cores)), 1), 1, 64)
    least = 4 if size * rows >= 1024 else 1
    held = size * rows * (1 if row_for_all(shape) else live_rows(shape))
    warps = warps_for(target, held, 32, least, MOST_WARPS)
    together = 0 if row_for_all(shape) else rows_together(target.machine, held)
    if together:
        warps = warps_of_rows(target.machine, together)
    found: dict[str, tuple[Value, ...]] = {
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, 1), rows * 2 if size * rows <= 4096 else rows))),
        "warps": tuple(dict.fromkeys((warps, min(warps * 2, MOST_WARPS), max(warps // 2, 1)))),
    }
    return found | {"resident": (together, 0)} if together > 1 else found


def _persistent(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    depth = row_programs(schedule, shape, int(params["rows"]))
    size = next_power(int(_row(shape)))
    for inner in inner_loops(schedule, depth, merge=False):
        _, within = cut(schedule, inner, size)
        tile(schedule, within)
    for name in row_for_all(shape):
        schedule.annotate("", EARLY.key(name), True)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))
    if params.get("resident"):
        schedule.annotate("", RESIDENT, int(params["resident"]))


def row_for_all(shape: NestShape) -> list[str]:
    """Where a reduction of one row comes first that is the same for all rows, as that of a norm in front of a product
    with a vector: the parameters of which programs read a row. They are asked for at once, and are there when that
    reduction is."""
    rows = {v for v, _ in shape.rows}
    alone = [not any(free_symbols(ld) & rows for ld in b.reads) for b in shape.reductions]
    if shape.row_count == 1 or not alone or not alone[0] or all(alone):
        return []
    inner = {v for v, _ in shape.inner}
    moving = (a for a in shape.accesses if not a.is_write and not a.is_gather and any(a.step(v) != 0 for v in inner))
    return list(dict.fromkeys(a.buffer.name for a in moving))


def _looped_parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    if stay_in_cache(nest, target):
        warps = whole_warps(target)
        return {"block": (WIDE_TILE, 2 * WIDE_TILE), "rows": (1,), "warps": (warps, warps // 2)}
    size = clamp_power(typical(nest, _row(shape)), 32, 2048)
    rows = 1
    if size <= ROW_SHORT // 2:
        count = typical(nest, sympy.Mul(*(e for _, e in shape.rows)))
        rows = clamp_power(max(min(1024 // size, count // (2 * target.cores)), 1), 1, 32)
    warps = warps_for(target, size * rows, 8, 2, 8)
    return {"block": tuple(dict.fromkeys((size, min(size * 2, 8192), max(size // 2, 32)))), "rows": (rows,),
            "warps": tuple(dict.fromkeys((warps, min(warps * 2, MOST_WARPS))))}  # fmt: skip


def _looped(schedule: Schedule, target: Target, params: Params) -> None:
    """One visit a stage: what a stage makes for each element is computed again by the stages that read it."""
    nest = schedule.nest
    shape = analyse(nest)
    inline_elements(schedule)
    depth = row_programs(schedule, shape, int(params["rows"]))
    for inner in inner_loops(schedule, depth, merge=True):
        _, within = cut(schedule, inner, int(params["block"]))
        tile(schedule, within)
    if stay_in_cache(nest, target):
        keep_near(schedule, row_inputs(shape), depth)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


def inline_elements(schedule: Schedule) -> None:
    """Inline every point-wise stage whose result stays inside: a register tile does not outlive its loop."""
    for name in schedule.get_blocks():
        try:
            schedule.compute_inline(name)
        except ScheduleError:
            continue


def row_programs(schedule: Schedule, shape: NestShape, rows: int) -> int:
    """One program for ``rows`` rows; how many loops now stand around every stage's inner loops."""
    depth = row_depth(schedule, len(shape.rows))
    row = fused(schedule, schedule.get_loops(schedule.get_blocks()[0])[:depth])
    if row is None:
        return 0
    over, within = cut(schedule, row, rows) if rows > 1 else (row, None)
    programs(schedule, (over,))
    if within is not None:
        tile(schedule, within)
    return sum(lp is not None for lp in (over, within))


# --- rows that registers do not hold, and that are visited again ------------------------------------------------------
#
# Such a row comes from memory at each visit, unless all rows that are under way fit into the cache that multiprocessors
# share. A program of many threads keeps others off its multiprocessor, and asks memory for enough by itself.


def stay_in_cache(nest: LoopNest, target: Target) -> bool:
    """Whether rows that registers do not hold are visited again, and one a multiprocessor fits into the second
    cache."""
    shape = analyse(nest)
    row = typical(nest, _row(shape))
    if _is_held(shape, row, target) or not live_bytes(shape):
        return False
    return comes_back(target.machine, row * sum(row_inputs(shape).values()))


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


GPU_ROW_PERSISTENT = Rule("gpu_row_persistent", GPUS, _is_persistent, _persistent_parameters, _persistent)
GPU_ROW_LOOPED = Rule("gpu_row_looped", GPUS, _is_looped, _looped_parameters, _looped)
