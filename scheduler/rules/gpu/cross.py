"""Reductions along rows and across them in one visit, on GPUs: a program for a piece of the rows, which it takes one or
a few at a time, whole, in registers, with the sums of all columns beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from ....ir.expr.dtypes import DType
from ....ir.nest.hints import NARROW_ROWS, NUM_WARPS
from ....ir.nest.loops import AxisKind, Block, LoopNest, Update
from ....ir.target import Target
from ...cost.gpu_kernels import CROSS_SHORT, LOAD_BYTES, MOST_WARPS, ROW_EXCHANGED
from ...cost.rows import ADDRESSES, held_words, keeps_narrow, long_row, longest_row, registers
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse
from ..registry import Params, Rule, Value
from .common import (
    GPUS,
    clamp_power,
    cut,
    fused,
    inner_loops,
    next_power,
    programs,
    read_ahead,
    steps_of_reads,
    steps_to_try,
    tile,
    typical,
    warps_for,
)

# The least parts of a row that is visited part by part: what is made of one is spent before the next is made.
PARTS = 4


def _row(shape: NestShape) -> sympy.Expr:
    return sympy.Mul(*(e for _, e in shape.inner))


def _matches(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    row = _row(shape)
    return (
        bool(shape.cross)
        and all(_pieces(shape, b)[0] for b in shape.cross)
        and bool(row.is_Integer)
        and next_power(int(row)) <= longest_row(target.machine)
    )


def _words(shape: NestShape) -> float:
    """Registers for each element of a row: its sums, and what is read along it."""
    inner = {v for v, _ in shape.inner}
    sums = sum(len(s.values) for b in shape.cross for s in b.body if isinstance(s, Update))
    read = {a.buffer for a in shape.accesses if not a.is_write and any(a.step(v) != 0 for v in inner)}
    return sums + sum(b.dtype.itemsize for b in read) / 4


def _is_narrow(shape: NestShape, target: Target) -> bool:
    """Whether visits of a row begin from what was loaded, as no registers are left for what is made of it."""
    row = next_power(int(_row(shape)))
    states = sum(len(s.values) for b in shape.blocks for s in b.body if isinstance(s, Update))
    reads = {a.buffer for a in shape.accesses if not a.is_write and a.buffer.numel != _row(shape)}
    moving = [b for b in reads if any(a.step(v) != 0 for a in shape.accesses if a.buffer is b for v, _ in shape.inner)]
    words = states + sum(b.dtype.itemsize for b in moving) / 4
    machine = target.machine
    return row > long_row(machine) and row * words > held_words(machine) and keeps_narrow(b.dtype for b in moving)


def _pieces(shape: NestShape, block: Block) -> tuple[list[sympy.Symbol], list[sympy.Symbol]]:
    """The axes of a reduction over rows that tell the piece, and those inside a piece."""
    inner = {v for v, _ in shape.inner}
    kept = [a.var for a in block.axes if a.kind is AxisKind.SPATIAL and a.var not in inner]
    return kept, [a.var for a in block.axes if a.kind is AxisKind.REDUCTION]


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    size = next_power(int(_row(shape)))
    rows = 1
    if size < CROSS_SHORT:
        own = [a.extent for a in shape.cross[0].axes if a.kind is AxisKind.REDUCTION]
        rows = clamp_power(min(CROSS_SHORT // size, typical(nest, sympy.Mul(*own))), 1, 32)
    warps = warps_for(target, size * rows, 16, 4, MOST_WARPS)
    if size * rows * _words(shape) / (warps * target.warp) + ADDRESSES >= registers(target.machine) // (
        warps * target.warp
    ):
        # A thread of fewer has more registers: less is spent twice on addresses.
        warps = max(warps // 2, 4)
    found: dict[str, tuple[Value, ...]] = {
        "rows": tuple(dict.fromkeys((rows, max(rows // 2, 1), rows * 2 if size * rows < CROSS_SHORT else rows))),
        "warps": tuple(dict.fromkeys((warps, min(warps * 2, MOST_WARPS), max(warps // 2, 1)))),
        "stages": steps_to_try(target, _stages(shape, target, size * rows, warps)),
    }
    return found | {"parts": _parts(target, size, warps)} if _is_narrow(shape, target) else found


def _parts(target: Target, size: int, warps: int) -> tuple[int, ...]:
    """In how many parts a row is visited, the default first: of a part a thread has what it loads at once, and one
    number of each of its sums."""
    own = max(size * DType.BFLOAT16.itemsize // (warps * target.warp * LOAD_BYTES), PARTS)
    # Where rows come through registers, larger parts have more loads under way.
    first = own if target.machine.has_async_copies else PARTS
    return tuple(dict.fromkeys((first, PARTS, 2 * PARTS)))


def _stages(shape: NestShape, target: Target, elements: int, warps: int) -> int:
    """Steps over rows that are under way; one where sums leave no registers for the addresses of others."""
    machine = target.machine
    if _is_narrow(shape, target):
        # The next row is on its way while registers hold one.
        room = machine.block_shared - ROW_EXCHANGED
        return 2 if machine.has_async_copies and _copied(shape) * elements <= room else 1
    if elements * _words(shape) / (warps * target.warp) + 2 * ADDRESSES > machine.thread_registers:
        return 1
    kept, _ = _pieces(shape, shape.cross[0])
    count = math.prod(typical(shape.nest, a.extent) for a in shape.cross[0].axes if a.var in kept)
    return steps_of_reads(shape, target, [v for v, _ in (*shape.rows, *shape.inner)], elements, warps, count)


def _copied(shape: NestShape) -> int:
    """Bytes of shared memory for each element of a row whose visits are told apart: what has a place for each element
    is copied once, what all rows have in common by each visit."""
    inner, rows = ({v for v, _ in axes} for axes in (shape.inner, shape.rows))
    visit_of, found = dict[str, int](), dict[tuple[str, int], int]()
    for b in shape.blocks:
        visit = max((visit_of.get(ld.buffer, 0) for ld in b.reads), default=0)
        later = b.is_reduction and not shape.is_cross(b)
        visit_of |= {w.buffer: visit + later for w in b.writes}
        for a in shape.accesses:
            if a.block == b.name and not a.is_write and any(a.step(v) != 0 for v in inner):
                own = any(a.step(v) != 0 for v in rows)
                found[a.buffer.name, 0 if own else visit] = a.buffer.dtype.itemsize
    return sum(found.values())


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    size = next_power(int(_row(shape)))
    cross = {b.name: b for b in shape.cross}
    pieces, own = _pieces(shape, shape.cross[0])
    extents = {a.var: a.extent for a in shape.cross[0].axes}
    for name in schedule.get_blocks():
        loops = schedule.get_loops(name)
        if name in cross:
            of = dict(zip((a.var for a in cross[name].axes), loops, strict=True))
            schedule.reorder(*(of[v] for v in (*pieces, *own)), *(of[v] for v, _ in shape.inner))
        elif len(pieces) + len(own) > len(shape.rows):
            # The last row dimension that tells the piece tells the place in the piece, too.
            schedule.split(loops[len(pieces) - 1], [extents[pieces[-1]], None])
    depth = len(pieces) + len(own)
    first, *others = schedule.get_blocks()
    for level in range(depth):
        for name in others:
            here, there = schedule.get_loops(first)[level], schedule.get_loops(name)[level]
            if here != there:
                schedule.merge(here, there)
    loops = schedule.get_loops(first)[:depth]
    row = fused(schedule, loops[len(pieces) :])
    programs(schedule, loops[: len(pieces)])
    assert row is not None
    over, within = cut(schedule, row, int(params["rows"])) if int(params["rows"]) > 1 else (row, None)
    if within is not None:
        tile(schedule, within)
    depth = 1 + sum(lp is not None for lp in (over, within))
    narrow = _is_narrow(shape, target)
    for elements in inner_loops(schedule, depth, merge=narrow):
        parts, lanes = cut(schedule, elements, size // int(params["parts"]) if narrow else size)
        tile(schedule, lanes)
        if narrow and parts is not None:
            schedule.unroll(parts)
    if narrow:
        schedule.annotate("", NARROW_ROWS, True)
    read_ahead(schedule, over, int(params["stages"]))
    schedule.annotate("", NUM_WARPS, int(params["warps"]))


GPU_CROSS_REDUCTION = Rule("gpu_cross_reduction", GPUS, _matches, _parameters, _apply)
