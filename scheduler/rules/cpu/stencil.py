"""Stencils on CPUs: depthwise convolutions, their gradients, pooling.

What the windows read is first copied, border and all, into a scratch that stays in the cache: whatever is computed of
an element is computed once for all windows that cover it, and the sums meet no border. Then a block of results is
summed in registers, every tap written out: lanes along the contiguous dimension, and neighbours across it (rows above
each other where lanes lie along a row, places of a row where lanes are channels) that share what they load.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.hints import CHAIN
from ....ir.nest.loops import LoopNest, Update
from ....ir.target import Target
from ...cost.cpu_kernels import stencil_scratch, stencil_sums
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from ..stencil import Stencil, stencil
from .common import choose_width, merge_rows, parallel_roots


def _matches(nest: LoopNest, target: Target) -> bool:
    found = stencil(nest)
    return found is not None and _lane(nest, found) is not None


def _lane(nest: LoopNest, found: Stencil) -> sympy.Symbol | None:
    """The dimension of the lanes: that in which most results are contiguous."""
    writes = [a for a in analyse(nest).accesses if a.is_write]
    candidates = (*found.along[-1:], *found.others)
    scores = {v: sum(a.buffer.dtype.itemsize for a in writes if a.step(v) == 1) for v in candidates}
    best = max(candidates, key=lambda v: scores[v])
    return best if scores[best] else None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = stencil(nest)
    assert found is not None
    if _lane(nest, found) not in found.along:
        return {"block": (4, 2, 6, 8, 1), "wide": (2, 1)}
    return {"block": stencil_sums(target.machine), "wide": (1,)}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = stencil(schedule.nest)
    assert found is not None
    lane = _lane(schedule.nest, found)
    assert lane is not None
    block, wide = int(params["block"]), int(params["wide"])
    width = _width(schedule, found, target, lane, wide)
    across = lane not in found.along
    channels = [v for v in found.others if v != lane]
    *slow, last = found.along
    strip = _strip(schedule, found, target, width if across else 1)
    depth = 0
    for name in schedule.get_blocks():
        loops = _loops(schedule, name)
        outer = [loops[v] for v in (*channels, *slow[:-1])]
        tiles: list[str] = []
        if slow:
            piece, rows = schedule.split(loops[slow[-1]], [None, strip])
            outer.append(piece)
            tiles.append(rows)
        if across:
            piece, lanes = _tile(schedule, loops[lane], width)
            outer.append(piece)
            tile, inside = _tile(schedule, loops[last], block)
            tiles.append(tile)
        else:
            inside = ""
            if tiles:
                tiles[0], inside = _tile(schedule, tiles[0], block)
            tile, lanes = _tile(schedule, loops[last], width)
            tiles.append(tile)
        taps = [loops[t] for t in found.taps if t in loops]
        inner = [lp for lp in (inside, lanes) if lp]
        schedule.reorder(*outer, *tiles, *taps, *inner)
        for tap in taps:
            schedule.unroll(tap)
            schedule.annotate(tap, CHAIN, True)
        if inside:
            schedule.unroll(inside)
        if lanes:
            schedule.vectorize(lanes)
        depth = len(outer)
        around = depth + len(tiles)
    merge_rows(schedule, around)
    if depth and (found.overlap > 1 or not across):
        _scratch(schedule, found, target, depth, width, lane)
    parallel_roots(schedule, target)


def _scratch(schedule: Schedule, found: Stencil, target: Target, depth: int, width: int, lane: sympy.Symbol) -> None:
    """The copy of what the windows read, where the outer loops need it, with lanes of its own."""
    moved = {s for ld in schedule.block(found.name).reads if ld.buffer == found.buffer for i in ld.indices
             for s in i.free_symbols}  # fmt: skip
    order = [v for v in (*found.others, *found.along) if v in moved and v != lane]
    order += [lane] if lane in moved else []
    made = schedule.cache_window(found.name, found.buffer, [v.name for v in order])
    schedule.compute_at(made, schedule.get_loops(found.name)[depth - 1])
    loop = schedule.get_loops(made)[-1]
    extent = schedule.extent(loop)
    lanes = width if extent == width else choose_width(target, schedule.nest, extent, 1, _size(schedule, found))
    if lanes > 1:
        schedule.vectorize(loop if extent == lanes else schedule.split(loop, [None, lanes])[1])


def _strip(schedule: Schedule, found: Stencil, target: Target, lanes: int) -> int:
    """Rows of results for which the scratch is filled at a time: all, or as many as its size allows; no fewer than
    what the windows reach beyond them."""
    if len(found.along) < 2:
        return 1
    nest = schedule.nest
    loops = _loops(schedule, found.name)
    hint = nest.symbols.hint
    sizes = [hint(schedule.extent(loops[v])) * step for v, step in zip(found.along, found.steps, strict=True)]
    taps = [hint(schedule.extent(loops[t])) for t in found.taps]
    row = lanes * _size(schedule, found) * (sizes[-1] + taps[-1])
    step, reach = found.steps[-2], taps[-2]
    rows = max((stencil_scratch(target.machine) // max(row, 1) - reach) // step, 2 * reach, 4)
    extent = schedule.extent(loops[found.along[-2]])
    return int(extent) if extent.is_Integer and int(extent) <= rows else rows - rows % 4


def _loops(schedule: Schedule, name: str) -> dict[sympy.Symbol, str]:
    """The loop of each axis of a block."""
    block = schedule.block(name)
    return {a.var: str(b.name) for a, b in zip(block.axes, block.bindings, strict=True)}


def _tile(schedule: Schedule, loop: str, size: int) -> tuple[str, str]:
    """A loop in pieces of ``size``: the loop over pieces and the one inside a piece ("": a piece is one iteration)."""
    extent = schedule.extent(loop)
    if size == 1:
        return loop, ""
    outer, inner = schedule.split(loop, [1, None] if extent.is_Integer and int(extent) <= size else [None, size])
    return outer, inner


def _size(schedule: Schedule, found: Stencil) -> int:
    """Bytes of a lane: those of what is summed. Guards compare indices, which are no lanes."""
    (update,) = schedule.block(found.name).body
    assert isinstance(update, Update)
    return update.values[0].dtype.itemsize


def _width(schedule: Schedule, found: Stencil, target: Target, lane: sympy.Symbol, wide: int) -> int:
    extent = schedule.extent(_loops(schedule, found.name)[lane])
    return choose_width(target, schedule.nest, extent, wide, _size(schedule, found))


CPU_STENCIL = Rule("cpu_stencil", ("cpu",), _matches, _parameters, _apply)
