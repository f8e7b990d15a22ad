"""Scans on GPUs: whole rows in registers where they fit, else a loop over tiles that carries each row's state.

Rows that are contiguous are one or several to a program; where neighbours lie across rows a program has some columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.expr.value import is_value
from ....ir.nest.hints import NUM_WARPS
from ....ir.nest.loops import Block, LoopNest, Scope, Update
from ....ir.target import Target
from ...cost.gpu_kernels import MOST_WARPS, SCAN_TILE
from ...cost.rows import scanned_elements
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Params, Rule, Value
from .common import (
    GPUS,
    clamp_power,
    column_like,
    cut,
    has_scan,
    inner_loops,
    live_rows,
    narrowest_bytes,
    next_power,
    programs,
    row_depth,
    tile,
    typical,
    warps_for,
)
from .row import inline_elements, row_programs


def _matches(nest: LoopNest, target: Target) -> bool:
    return has_scan(nest)


def _length(shape: NestShape) -> sympy.Expr:
    return sympy.Mul(*(e for _, e in shape.inner))


def _state_words(shape: NestShape) -> int:
    """Registers that the states of one element take."""
    updates = [s for b in shape.blocks if b.is_scan for s in b.body if isinstance(s, Update)]
    return sum(-(-v.dtype.itemsize // 4) for s in updates for v in s.values)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    length, count = _length(shape), typical(nest, sympy.Mul(*(e for _, e in shape.rows)))
    live, across = live_rows(shape), column_like(shape)
    # Columns side by side fill a sector of the cache; rows do as long as every processor has work.
    least = max(32 // narrowest_bytes(shape), 8) if across else 1
    size = next_power(typical(nest, length))
    whole = bool(length.is_Integer) and size * live * least <= scanned_elements(target.machine)
    tile_size = SCAN_TILE // clamp_power(_state_words(shape) // 2, 1, 8)
    block = size if whole else clamp_power(size, 16, 64 if across else min(tile_size, 1024))
    rows = clamp_power(max(min(tile_size // block, count // (2 * target.cores)), least), 1, 64)
    if across:
        rows = min(rows, clamp_power(typical(nest, shape.rows[-1][1]), 1, 64))
    warps = warps_for(target, block * rows * (live if whole else 1), 16, 4 if block * rows >= 1024 else 1, MOST_WARPS)
    blocks_of = (block,) if whole else (block, max(block // 2, 16))
    return {
        "whole": (whole,),
        "block": tuple(dict.fromkeys(blocks_of)),
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, least)))),
        "warps": tuple(dict.fromkeys((warps, max(warps // 2, 1), min(warps * 2, MOST_WARPS)))),
    }


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    whole = bool(params["whole"])
    if not whole:
        inline_elements(schedule)
    depth = _columns(schedule, shape, int(params["rows"])) if column_like(shape) else None
    if depth is None:
        depth = row_programs(schedule, shape, int(params["rows"]))
    inner_loops(schedule, depth, merge=False)
    if not whole:
        _share_visits(schedule, depth)
    for loop in inner_loops(schedule, depth, merge=not whole):
        _, within = cut(schedule, loop, int(params["block"]))
        tile(schedule, within)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


def _columns(schedule: Schedule, shape: NestShape, columns: int) -> int | None:
    """A program for some neighbours along the last dimension of the rows; how many loops stand around the elements.
    None where the stages do not share that loop."""
    depth = row_depth(schedule, len(shape.rows))
    loops = schedule.get_loops(schedule.get_blocks()[0])[:depth]
    if depth < len(shape.rows):
        return None
    over, within = cut(schedule, loops[-1], columns)
    programs(schedule, (*loops[:-1], over))
    tile(schedule, within)
    return 1 + bool(loops[:-1] or over is not None)


def _share_visits(schedule: Schedule, depth: int) -> None:
    """Bring what reads elements that stay inside under the loop that makes them: registers hold one tile. Raises
    ScheduleError where that cannot be."""
    local = {b.name for b in schedule.nest.locals if b.scope is Scope.LOCAL}
    for name in schedule.get_blocks():
        block = schedule.block(name)
        over = _elements(schedule, block, depth)
        made = {w.buffer for w in block.writes if w.buffer in local and _moves(w.indices, over)}
        for other in schedule.get_blocks():
            if other != name and made & {ld.buffer for ld in schedule.block(other).reads}:
                mine, theirs = schedule.get_loops(name)[depth], schedule.get_loops(other)[depth]
                if mine != theirs:
                    schedule.merge(mine, theirs)


def _elements(schedule: Schedule, block: Block, depth: int) -> set[sympy.Symbol]:
    loops = set(schedule.get_loops(block.name)[depth:])
    pairs = zip(block.axes, block.bindings, strict=True)
    return {a.var for a, b in pairs if loops & {s.name for s in b.free_symbols}}


def _moves(indices: tuple[object, ...], over: set[sympy.Symbol]) -> bool:
    return any(not is_value(i) and bool(i.free_symbols & over) for i in indices)  # type: ignore[attr-defined]


GPU_SCAN = Rule("gpu_scan", GPUS, _matches, _parameters, _apply)
