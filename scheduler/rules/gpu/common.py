"""Steps that the GPU rules share: rows brought together, loops cut into tiles, programs and warps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress

import sympy

from ....ir.expr.value import Load
from ....ir.nest.loops import Access, LoopKind, LoopNest, blocks
from ....ir.target import Target
from ...cost.flight import USUAL_REGISTERS, steps_under_way
from ...cost.gpu_kernels import LOAD_BYTES
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import NestShape
from ..cpu.common import merge_inner, merge_rows

GPUS = ("cuda", "hip")


def next_power(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def clamp_power(value: int, low: int, high: int) -> int:
    """The power of two next above ``value`` within bounds that are powers of two."""
    return min(max(next_power(value), low), high)


def typical(nest: LoopNest, extent: sympy.Expr) -> int:
    """A typical value of a loop's extent, at least 1."""
    return max(nest.symbols.hint(extent), 1)


def steps_in_flight(target: Target, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Of the numbers of steps that a loop over tiles may have in flight those that differ on a target."""
    return wanted if target.machine.stages > 1 else (1,)


def tile_size(nest: LoopNest, extent: sympy.Expr, limit: int, least: int = 128) -> int:
    """A power of two for a tile over a loop: the whole of a short loop, else the largest that leaves no tail, else
    ``limit``."""
    if next_power(typical(nest, extent)) <= limit and extent.is_Integer and _is_power(int(extent)):
        return int(extent)
    divisor = nest.symbols.divisor(extent)
    size = limit
    while size >= least:
        if divisor % size == 0:
            return size
        size //= 2
    return min(next_power(typical(nest, extent)), limit)


def _is_power(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def row_depth(schedule: Schedule, rows: int) -> int:
    """Put the stages under one set of row loops and say how many loops deep all of them now share."""
    merge_rows(schedule, rows)
    return shared_depth(schedule, rows)


def shared_depth(schedule: Schedule, most: int) -> int:
    """How many loops stand around all stages, up to ``most``."""
    chains = [schedule.get_loops(b) for b in schedule.get_blocks()]
    depth = 0
    while depth < most and all(len(c) > depth and c[depth] == chains[0][depth] for c in chains):
        depth += 1
    return depth


def inner_loops(schedule: Schedule, depth: int, *, merge: bool) -> list[str]:
    """The loops over the elements of a row, one for each stage that has any; with ``merge``, stages that may run in
    one visit share theirs, so that the later ones find the tiles of the earlier."""
    for block in schedule.get_blocks():
        fused(schedule, schedule.get_loops(block)[depth:])
    if merge:
        merge_inner(schedule, depth)
    chains = [schedule.get_loops(b) for b in schedule.get_blocks()]
    return list(dict.fromkeys(c[depth] for c in chains if len(c) > depth))


def fused(schedule: Schedule, loops: Sequence[str]) -> str | None:
    """The loops as one; None where there are none."""
    if not loops:
        return None
    return loops[0] if len(loops) == 1 else schedule.fuse(*loops)


def cut(schedule: Schedule, loop: str, size: int) -> tuple[str | None, str]:
    """A loop over tiles and the loop inside a tile of ``size``; no loop over tiles where one tile is enough."""
    extent = schedule.extent(loop)
    if extent == size:
        return None, loop
    if extent.is_Integer and int(extent) < size:
        outer, inner = schedule.split(loop, [1, size])
    else:
        outer, inner = schedule.split(loop, [None, size])
    return outer, inner


def programs(schedule: Schedule, loops: Sequence[str | None]) -> None:
    """Bind nested loops to program ids, all in one dimension of the grid: the other two hold 65535 programs at most."""
    real = [lp for lp in loops if lp is not None]
    together = fused(schedule, real)
    if together is not None:
        schedule.bind(together, "blockIdx.x")


def tile(schedule: Schedule, loop: str) -> None:
    """Make a loop an axis of the program's tile."""
    if schedule.loop(loop).kind is LoopKind.SERIAL:
        schedule.bind(loop, "threadIdx.x")


def read_ahead(schedule: Schedule, loop: str | None, stages: int) -> None:
    """Have as many steps of a loop under way, where it has any and nothing in it writes what it reads."""
    if loop is None or stages < 2:
        return
    with suppress(ScheduleError):
        schedule.pipeline(loop, stages)


def steps_to_try(target: Target, usual: int) -> tuple[int, ...]:
    """The usual number of steps under way, one, and three, as far as a target has so many."""
    return tuple(dict.fromkeys(min(k, target.machine.stages) for k in (usual, 1, 3)))


def steps_of_reads(
    shape: NestShape, target: Target, along: Collection[sympy.Symbol], elements: int, warps: int, count: int
) -> int:
    """The steps under way of a loop over tiles of so many ``elements``, of which some arrays have a place of their own
    for each: those that move along all axes ``along``. ``count`` programs of so many ``warps`` are launched."""
    read = {a.buffer for a in shape.accesses if not a.is_write and all(a.step(v) != 0 for v in along)}
    machine = target.machine
    resident = usual_programs(target, warps)
    nbytes = elements * sum(b.dtype.itemsize for b in read)
    return steps_under_way(machine, nbytes, len(read), count, resident)


def usual_programs(target: Target, warps: int) -> int:
    """The programs of so many warps that a multiprocessor holds, by the registers that a thread usually has."""
    return max(target.machine.registers // (USUAL_REGISTERS * warps * target.warp), 1)


def narrowest_bytes(shape: NestShape) -> int:
    """Bytes of the narrowest element of which the kernel reads or writes many."""
    sizes = [a.buffer.dtype.itemsize for a in shape.accesses if any(s not in (0,) for _, s in a.steps)]
    return min(sizes, default=4)


def neighbours(shape: NestShape, along: Collection[sympy.Symbol]) -> int:
    """Elements that a lane loads at once along some axes: as many as all that lies across them begins at multiples
    of."""
    near = LOAD_BYTES // narrowest_bytes(shape)
    across = [v for v, _ in (*shape.rows, *shape.inner) if v not in along]
    for a in shape.accesses:
        if any(a.step(v) == 1 for v in along):
            for step in map(a.step, across):
                if step is not None and step != 0:
                    near = math.gcd(near, shape.nest.symbols.divisor(step))
    return near


def column_like(shape: NestShape) -> bool:
    """Whether what a reduction visits lies together across its rows rather than along them."""
    inner = [v for v, _ in shape.inner]
    if not shape.has_reduction or not shape.rows:
        return False
    moving = [a for a in shape.accesses if any(a.step(v) != 0 for v in inner)]
    # What has a place for every element weighs so much more than what has one for a row or a column.
    moving = [a for a in moving if any(a.step(v) != 0 for v, _ in shape.rows)] or moving
    size = {a.buffer.name: a.buffer.dtype.itemsize for a in moving}
    along = sum(size[a.buffer.name] for a in moving if any(a.step(v) == 1 for v, e in shape.inner if e != 1))
    across = sum(size[a.buffer.name] for a in moving if a.step(shape.rows[-1][0]) == 1)
    return across > along


def has_scan(nest: LoopNest) -> bool:
    """Whether a stage scans: what it gives for elements is there in the visit that makes it."""
    return any(b.is_scan for b, _ in blocks(nest))


def live_rows(shape: NestShape) -> int:
    """The most tensors of which a whole row is held at once: read or made in one stage, and read again in a later
    one."""
    return max(map(len, _live(shape)), default=0) or 1


def live_bytes(shape: NestShape) -> int:
    """Bytes, for each element of a row, of the tensors of which whole rows are held at once."""
    return max((sum(shape.nest.buffer(name).dtype.itemsize for name in names) for names in _live(shape)), default=0)


def _live(shape: NestShape) -> list[list[str]]:
    """The tensors of which a whole row is held behind each stage."""
    inner = {v for v, _ in shape.inner}
    local = {b.name for b in shape.nest.locals}
    spans: dict[str, tuple[int, int]] = {}
    for k, block in enumerate(shape.blocks):
        outputs = {w.buffer for w in block.writes if w.buffer not in local}
        sites: list[Load | Access] = [*block.reads, *block.writes]
        for site in sites:
            moves = any(i.free_symbols & inner for i in site.indices if isinstance(i, sympy.Expr))
            if moves and site.buffer not in outputs:
                first, _ = spans.get(site.buffer, (k, k))
                spans[site.buffer] = (first, k)
    return [[name for name, (a, b) in spans.items() if a <= k < b] for k in range(len(shape.blocks))]


def warps_for(target: Target, elements: int, each: int, low: int = 1, high: int = 16) -> int:
    """Warps so that a thread has about ``each`` of a tile's elements; fewer where a warp is wider."""
    scale = max(target.warp // 32, 1)
    return max(clamp_power(elements // (each * 32), low, high) // scale, 1)
