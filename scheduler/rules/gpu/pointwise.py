"""Point-wise nests on GPUs: a flat tile where memory is flat, rows of tiles where it is not, square tiles for
transposes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.ops import DRAWN_TOGETHER
from ....ir.expr.value import Call, walk
from ....ir.nest.hints import NUM_WARPS, PEEL
from ....ir.nest.loops import LoopNest, Store
from ....ir.target import Target
from ...cost.flight import USUAL_REGISTERS, bytes_wanted
from ...cost.gpu_kernels import LOAD_BYTES, POINTWISE_THREADS
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..cpu.common import merge_rows
from ..registry import Params, Rule, Value
from .common import (
    GPUS,
    clamp_power,
    cut,
    fused,
    narrowest_bytes,
    neighbours,
    programs,
    row_depth,
    shared_depth,
    tile,
    tile_size,
    typical,
)


def _is_pointwise(nest: LoopNest, target: Target) -> bool:
    return not analyse(nest).has_reduction


def _depth(schedule: Schedule, shape: NestShape) -> int:
    """Put the stages under one set of loops over the domain, and say how many of them all stages now share.

    What is made once for a row is made again at each of its elements, as a value of fewer lanes.
    """
    domain = len(shape.rows) + len(shape.inner)
    deep = [b for b in schedule.get_blocks() if len(schedule.get_loops(b)) == domain]
    merge_rows(schedule, domain, deep)
    for name in reversed([b for b in schedule.get_blocks() if b not in deep] if deep else []):
        with suppress(ScheduleError):
            schedule.compute_at(name, schedule.get_loops(deep[0])[-1])
    return shared_depth(schedule, domain)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    # 16 bytes of the narrowest type a thread, in 4 warps.
    default = clamp_power(LOAD_BYTES // _element_bytes(shape) * POINTWISE_THREADS, 256, 2048)
    small = typical(nest, sympy.Mul(*(e for _, e in (*shape.rows, *shape.inner)))) < default * target.cores
    if small:
        default = max(default // 2, 256)
    warps = (4, 8, 2)
    if not small and _asks_little(shape, target, default // POINTWISE_THREADS):
        default, warps = default * 2, (8, 4, 16)
    sizes = dict.fromkeys((default, default * 2, max(default // 2, 128)))
    return {"block": tuple(sizes), "warps": tuple(max(w * 32 // target.warp, 1) for w in warps)}


def _element_bytes(shape: NestShape) -> int:
    """Bytes of the elements of which a thread has 16 bytes: the narrowest.

    Of random numbers that go to several arrays, a mask beside the result, a byte counts as two: results of half types
    then have the same lanes as the mask, or a compiler draws the numbers for the lanes of each.
    """
    nbytes = narrowest_bytes(shape)
    written = {a.buffer.name for a in shape.accesses if a.is_write}
    return max(nbytes, DType.BFLOAT16.itemsize) if len(written) > 1 and _draws(shape) else nbytes


def _draws(shape: NestShape) -> bool:
    """Whether elements are made of random numbers."""
    values = (s.value for b in shape.blocks for s in b.body if isinstance(s, Store))
    return any(isinstance(e, Call) and e.fn in DRAWN_TOGETHER for v in values for e in walk(v))


def _asks_little(shape: NestShape, target: Target, each: int) -> bool:
    """Whether so many elements of a thread are too few bytes of loads under way.

    Rows that begin anywhere are loaded an element at a time. Each has an address in registers, so that fewer programs
    are resident, and what a program computes once for all of its elements takes the more of its time.
    """
    along = [v for v, _ in shape.rows][-1:]
    read = {a.buffer for a in shape.accesses if not a.is_write and all(a.step(v) == 1 for v in along)}
    if not along or not read or neighbours(shape, along) * min(b.dtype.itemsize for b in read) >= LOAD_BYTES:
        return False
    resident = target.machine.registers // USUAL_REGISTERS
    return each * sum(b.dtype.itemsize for b in read) * resident < bytes_wanted(target.machine)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    block, warps = int(params["block"]), int(params["warps"])
    shape = analyse(schedule.nest)
    depth = _depth(schedule, shape)
    loops = schedule.get_loops(schedule.get_blocks()[0])[:depth]
    if depth < max(len(schedule.get_loops(b)) for b in schedule.get_blocks()):
        raise ScheduleError("gpu_pointwise", "a result of a row is no part of what its elements need", schedule.nest)
    if loops:
        outer, inner = loops[:-1], loops[-1]
        # Rows beside them make up for few columns. A flat tile stays as it is: its tail is peeled.
        columns = tile_size(schedule.nest, schedule.extent(inner), block, 128 if outer else block)
        rows_of, rows = None, None
        together = fused(schedule, outer)
        if together is not None:
            rows_of, rows = together, None
            if block // columns > 1:
                count = clamp_power(typical(schedule.nest, schedule.extent(together)), 1, block // columns)
                rows_of, rows = cut(schedule, together, count) if count > 1 else (together, None)
        columns_of, column = cut(schedule, inner, columns)
        order = [lp for lp in (rows_of, columns_of, rows, column) if lp is not None]
        if len(order) > 1:
            schedule.reorder(*order)
        programs(schedule, (rows_of, columns_of))
        for lp in (rows, column):
            if lp is not None:
                tile(schedule, lp)
        if not outer:
            schedule.annotate("", PEEL, True)
    schedule.annotate("", NUM_WARPS, warps)


def _is_transpose(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    if not shape.needs_transpose or shape.inner:
        return False
    chosen = _unit(shape)
    if not all(any(a.step(v) == 1 and a.step(w) != 0 for a in shape.accesses) for v, w in (chosen, chosen[::-1])):
        return False  # a vector that is broadcast along the other dimension needs no exchange of lanes
    return all(typical(nest, e) >= 16 for v, e in shape.rows if v in chosen)


def _unit(shape: NestShape) -> list[sympy.Symbol]:
    """The two dimensions along which accesses are contiguous, the one of more bytes last."""
    found = [v for v, e in shape.rows if e != 1 and shape.contiguous(v)]
    return sorted(found, key=shape.contiguous)[-2:]


def _transpose_parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    tiles = (64, 32) if narrowest_bytes(shape) <= 2 else (32, 64)
    return {"tile": tiles, "warps": tuple(w * 32 // target.warp for w in ((8, 4) if tiles[0] == 64 else (4, 8)))}


def _transpose(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    size, warps = int(params["tile"]), int(params["warps"])
    name = schedule.get_blocks()[0]
    depth = row_depth(schedule, len(shape.rows))
    loops = dict(zip([v for v, _ in shape.rows], schedule.get_loops(name)[:depth], strict=True))
    chosen = _unit(shape)
    others = [lp for v, lp in loops.items() if v not in chosen]
    tiles_of, inner = [], []
    for v in chosen:
        over, within = cut(schedule, loops[v], size)
        tiles_of.append(over)
        inner.append(within)
    order = [lp for lp in (*others, *tiles_of, *inner) if lp is not None]
    schedule.reorder(*order)
    programs(schedule, (*others, *tiles_of))
    for lp in inner:
        tile(schedule, lp)
    schedule.annotate("", NUM_WARPS, warps)


GPU_TRANSPOSE = Rule("gpu_transpose", GPUS, _is_transpose, _transpose_parameters, _transpose)
GPU_POINTWISE = Rule("gpu_pointwise", GPUS, _is_pointwise, _parameters, _apply)
