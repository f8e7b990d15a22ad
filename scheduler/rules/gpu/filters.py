"""Sums over all windows for each of their taps, on GPUs: the gradient of a depthwise convolution's filters.

Each program visits its images once and keeps a sum for every tap. Lanes run along what is contiguous: over the places
of an image, or over channels, of which a thread has 16 bytes. Neighbours across the lanes are written out, so that what
several of their windows read is loaded once. Where registers do not hold the sums of all taps, those that share nothing
between neighbours are programs of their own, which run at the same time and find images in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.hints import APART, NUM_WARPS
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import FILTER_COPIES, FILTER_MOST_LANES, FILTER_SUMS, FILTER_TERMS, FILTER_WARPS
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..cpu.common import merge_rows
from ..registry import Params, Rule, Value
from ..stencil import Filters, filters
from .common import GPUS, cut, fused, narrowest_bytes, next_power, programs, tile, typical


def _matches(nest: LoopNest, target: Target) -> bool:
    return filters(nest) is not None


def _channel(nest: LoopNest, found: Filters) -> sympy.Symbol | None:
    """The dimension of the results along which most of what is read is contiguous; None where it is along the sum."""
    reads = [a for a in analyse(nest).accesses if not a.is_write]
    steps = {v: sum(a.buffer.dtype.itemsize for a in reads if a.step(v) == 1) for v in (*found.rows, *found.over)}
    best = max(steps, key=lambda v: steps[v])
    return best if best in found.rows and steps[best] else None


def _copied(found: Filters, channel: sympy.Symbol | None) -> sympy.Symbol | None:
    """The axis of the sum whose neighbours are written out: the innermost along which no lanes run."""
    across = [w.along for w in found.windows]
    across = across if channel is not None else across[:-1]
    return across[-1] if across else None


def _kept(nest: LoopNest, found: Filters, copied: sympy.Symbol | None, each: int) -> list[sympy.Symbol]:
    """The taps of which a program has all sums, that which neighbours share innermost."""
    extents = _extents(nest)
    shared = [w.tap for w in found.windows if w.along == copied]
    taps = [t for t in found.taps if t not in shared] + shared
    while len(taps) > 1 and sympy.Mul(*(extents[t] for t in taps)) * each > FILTER_SUMS:
        taps = taps[1:]
    return taps


def _each(nest: LoopNest, channel: sympy.Symbol | None) -> int:
    """Elements of a thread: neighbours along an image are no wider for lying together, as taps move loads by one."""
    return 2 if channel is None else max(16 // narrowest_bytes(analyse(nest)), 1)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = filters(nest)
    assert found is not None
    channel, extents = _channel(nest, found), _extents(nest)
    copied, each = _copied(found, channel), _each(nest, channel)
    taps = int(sympy.Mul(*(extents[t] for t in _kept(nest, found, copied, each))))
    lanes = 1 if channel is None else min(next_power(typical(nest, extents[channel])), FILTER_MOST_LANES)
    warps = max(FILTER_WARPS * 32 // target.warp, 1)
    size = typical(nest, extents[copied]) if copied is not None else 1
    few = [n for n in range(1, FILTER_COPIES + 1) if n * taps <= FILTER_TERMS and n <= size]
    copies = min(few, key=lambda n: (-(-size // n) * (n + 2), -n)) if few else 1
    places = max(warps * target.warp * each // lanes, 1)
    return {
        "copies": tuple(dict.fromkeys((copies, 1, 2))),
        "places": tuple(dict.fromkeys((places, max(places // 2, 1)))),
        "lanes": (lanes,),
        "warps": tuple(dict.fromkeys((warps, warps * 2))),
    }


def _extents(nest: LoopNest) -> dict[sympy.Symbol, sympy.Expr]:
    return {a.var: a.extent for b in analyse(nest).blocks for a in b.axes}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = filters(schedule.nest)
    assert found is not None
    channel = _channel(schedule.nest, found)
    copied = _copied(found, channel)
    copies, places, lanes = (int(params[k]) for k in ("copies", "places", "lanes"))
    kept = _kept(schedule.nest, found, copied, _each(schedule.nest, channel))
    outer = [v for v in (*found.rows, *found.taps) if v not in kept and v != channel]
    visit: list[str] = []
    for name in schedule.get_blocks():
        block = schedule.block(name)
        loops = {a.var: str(b.name) for a, b in zip(block.axes, block.bindings, strict=True)}
        rows = [loops[v] for v in (*outer, channel) if v is not None]
        over = [loops[v] for v in found.over if name == found.name]
        inside = [loops[t] for t in kept]
        if over and copied is not None and copies > 1:
            piece, copy = schedule.split(loops[copied], [None, copies])
            over[over.index(loops[copied])] = piece
            inside.append(copy)
        if len(rows) + len(over) + len(inside) > 1:
            schedule.reorder(*rows, *over, *inside)
        for lp in inside:
            schedule.unroll(lp)
            schedule.annotate(lp, APART, True)
        visit = visit or over
    depth = len(outer) + (channel is not None)
    merge_rows(schedule, depth)
    shared = schedule.get_loops(found.name)[:depth]
    column, lane = cut(schedule, shared[-1], lanes) if channel is not None else (None, None)
    together = fused(schedule, visit)
    assert together is not None
    _, place = cut(schedule, together, places)
    if lane is not None:
        tile(schedule, lane)
    tile(schedule, place)
    programs(schedule, (*shared[: len(outer)], column))
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


GPU_FILTERS = Rule("gpu_filters", GPUS, _matches, _parameters, _apply)
