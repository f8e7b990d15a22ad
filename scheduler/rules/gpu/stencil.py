"""Stencils on GPUs: depthwise convolutions, their gradients, pooling.

Each program makes a tile of results, in copies that are neighbours across its lanes, with taps written out: what
several windows read is loaded once into registers for all copies, and what other threads have read comes from the
first-level cache, so that memory is visited once. Of large windows a loop is left over the dimensions whose taps share
nothing between copies. Lanes run along the dimension that is contiguous. Where that is the innermost one of an image
the loads of neighbouring taps lie one element apart, so that threads take neighbours; where it is that of the channels,
a thread has 16 bytes of them. Only windows that may overhang are masked.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.nest.hints import APART, NUM_WARPS
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import (
    STENCIL_COPIES,
    STENCIL_FEWEST_LANES,
    STENCIL_MOST_LANES,
    STENCIL_SUMS,
    STENCIL_TERMS,
    STENCIL_WARPS,
)
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..cpu.common import merge_rows
from ..registry import Params, Rule, Value
from ..stencil import Slide, slide
from .common import GPUS, cut, fused, narrowest_bytes, next_power, programs, tile, typical
from .row import inline_elements


def _matches(nest: LoopNest, target: Target) -> bool:
    found = slide(nest)
    return found is not None and _lane(nest, found) is not None


def _lane(nest: LoopNest, found: Slide) -> sympy.Symbol | None:
    """The dimension of the lanes: that in which most results are contiguous."""
    shape = analyse(nest)
    writes = [a for a in shape.accesses if a.is_write]
    scores = {v: sum(a.buffer.dtype.itemsize for a in writes if a.step(v) == 1) for v, e in shape.rows if e != 1}
    best = max(scores, key=lambda v: scores[v], default=None)
    return best if best is not None and scores[best] else None


def _copied(found: Slide, lane: sympy.Symbol) -> sympy.Symbol | None:
    """The dimension of the copies: the innermost window's that lanes do not run along."""
    across = [w.along for w in found.windows if w.along != lane]
    return across[-1] if across else None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = slide(nest)
    assert found is not None
    lane = _lane(nest, found)
    assert lane is not None
    extents = dict(analyse(nest).rows)
    along = any(w.along == lane for w in found.windows)
    # Where taps lie one element apart, loads of a thread's neighbours would be no wider for lying together.
    each = 2 if along else max(16 // narrowest_bytes(analyse(nest)), 1)
    lanes = _lanes(typical(nest, extents[lane]))
    warps = max(STENCIL_WARPS * 32 // target.warp, 1)
    rows = max(warps * target.warp * each // lanes, 1)
    copies = _copies(nest, found, lane, rows, each)
    while copies > 1 and _programs(nest, lane, lanes, rows * copies) < 2 * target.cores:
        copies //= 2
    while rows > 1 and _programs(nest, lane, lanes, rows * copies) < target.cores:
        rows //= 2
    warps = max(min(warps, rows * lanes // target.warp), 1)
    return {
        "copies": tuple(dict.fromkeys((copies, max(copies // 2, 1), min(copies * 2, STENCIL_COPIES)))),
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, 1), rows * 2))),
        "lanes": (lanes,),
        "warps": tuple(dict.fromkeys((warps, warps * 2))),
    }


def _lanes(extent: int) -> int:
    """Lanes along a dimension: a power of two that leaves few of them idle."""
    if extent <= STENCIL_FEWEST_LANES:
        return next_power(extent)
    sizes = [STENCIL_FEWEST_LANES]
    while sizes[-1] < STENCIL_MOST_LANES:
        sizes.append(2 * sizes[-1])
    return min(reversed(sizes), key=lambda n: -(-extent // n) * n)


def _copies(nest: LoopNest, found: Slide, lane: sympy.Symbol, rows: int, each: int) -> int:
    """Copies of a result: as many as make a loaded element serve many windows, and leave no tail."""
    var = _copied(found, lane)
    if var is None:
        return 1
    extents = {a.var: a.extent for b in analyse(nest).reductions for a in b.axes}
    reach, step = next((int(extents[w.tap]), w.step) for w in found.windows if w.along == var)
    size = typical(nest, extents[var])

    def cost(count: int) -> float:
        pieces = -(-size // count)
        read = min(float(step) * (count - 1) + reach, count * reach) / count
        # Where rows of a tile have channels of their own, each has filters of its own.
        apart = 1.1 if pieces % rows else 1.0
        return float(pieces * count / size * (read + reach) * apart)

    most = min(STENCIL_COPIES, max(STENCIL_SUMS // each, 1), max(STENCIL_TERMS // reach, 1), size)
    return min(range(1, most + 1), key=lambda n: (cost(n), n))


def _in_order(found: Slide, copied: sympy.Symbol | None) -> list[sympy.Symbol]:
    """The taps, the one along which copies share what they read innermost, so that it stays in registers shortest."""
    shared = [w.tap for w in found.windows if w.along == copied]
    return [t for t in found.taps if t not in shared] + shared


def _programs(nest: LoopNest, lane: sympy.Symbol, lanes: int, rows: int) -> int:
    extents = analyse(nest).rows
    others = typical(nest, sympy.Mul(*(e for v, e in extents if v != lane)))
    return -(-others // rows) * -(-typical(nest, dict(extents)[lane]) // lanes)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = slide(schedule.nest)
    assert found is not None
    lane = _lane(schedule.nest, found)
    assert lane is not None
    copied = _copied(found, lane)
    inline_elements(schedule)
    copies, rows, lanes = (int(params[k]) for k in ("copies", "rows", "lanes"))
    outer = 0
    for name in schedule.get_blocks():
        block = schedule.block(name)
        loops = {a.var: str(b.name) for a, b in zip(block.axes, block.bindings, strict=True)}
        rest = [loops[v] for v in found.rows if v not in (lane, copied)]
        copy = None
        if copied is not None:
            over, copy = schedule.split(loops[copied], [None, copies]) if copies > 1 else (loops[copied], None)
            rest.append(over)
        inside = [lp for lp in (*(loops[t] for t in _in_order(found, copied) if t in loops), copy) if lp is not None]
        schedule.reorder(*rest, loops[lane], *inside)
        terms = 1
        for lp in reversed(inside):
            terms *= int(schedule.extent(lp))
            if terms > STENCIL_TERMS:
                break
            schedule.unroll(lp)
            schedule.annotate(lp, APART, True)
        outer = len(rest)
    merge_rows(schedule, outer + 1)
    *shared, column = schedule.get_loops(schedule.get_blocks()[0])[: outer + 1]
    columns, across = cut(schedule, column, lanes)
    row, several = fused(schedule, shared), None
    if row is not None and rows > 1:
        row, several = cut(schedule, row, rows)
    order = [lp for lp in (row, columns, several, across) if lp is not None]
    if len(order) > 1:
        schedule.reorder(*order)
    programs(schedule, (row, columns))
    for lane_loop in (several, across):
        if lane_loop is not None:
            tile(schedule, lane_loop)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


GPU_STENCIL = Rule("gpu_stencil", GPUS, _matches, _parameters, _apply)
