"""Reductions across contiguous columns on CPUs: lanes over columns, rows one after the other.

A team over column blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.expr.value import free_symbols, is_value, loads
from ....ir.nest.hints import CASCADE, CHAIN, HOLD
from ....ir.nest.loops import Block, LoopNest, Update
from ....ir.target import Target
from ...cost.cpu_kernels import COLUMN_ROWS_HELD, TRANSPOSED_TILE
from ...schedule.schedule import Schedule
from ..analysis import NestShape, analyse, reads_results
from ..registry import Params, Rule, Value
from .common import (
    best_vector,
    choose_width,
    cut_rows,
    inline_cheap,
    is_long,
    merge_inner,
    merge_rows,
    parallel_roots,
    run_length,
    tile_lanes,
)
from .concat import part_width


def _matches(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    return shape.has_reduction and bool(shape.rows) and shape.rows[-1][0] == best_vector(shape)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    shape = analyse(nest)
    partials = _partials(shape, target)
    if _gathers(shape):
        # Where the elements of a column lie, and what they weigh, is in registers while its reduction runs.
        return {"unroll": (2, 1), "turns": (1, 16), "partials": partials}
    if _is_outer(shape):
        # What a column reads is in registers while its reduction runs, and so are its accumulators.
        return {"unroll": (2, 1, 4, 8), "turns": (1, 16), "partials": partials}
    # Vectors of a row in turns read memory as a stream; the columns' accumulators stay in the first-level cache.
    return {"unroll": (8, 4, 2), "turns": (16, 1), "partials": partials}


def _gathers(shape: NestShape) -> bool:
    """Whether data say for each column which elements it reads, the same way along the whole reduction."""
    column, inner = shape.rows[-1][0], {v for v, _ in shape.inner}
    values = [v for b in shape.reductions for s in b.body if isinstance(s, Update) for v in s.values]
    indices = [i for v in values for ld in loads(v) for i in ld.indices if is_value(i)]
    found = [free_symbols(i) for i in indices]
    return any(column in s for s in found) and all(inner.isdisjoint(s) for s in found)


def _is_outer(shape: NestShape) -> bool:
    """Whether each element is made of what belongs to its column and what belongs to its place along the reduction, as
    pairs of two lists are: no access moves along both."""
    column, inner = shape.rows[-1][0], [v for v, _ in shape.inner]
    return not any(a.step(column) != 0 and any(a.step(v) != 0 for v in inner) for a in shape.accesses)


def _partials(shape: NestShape, target: Target) -> tuple[int, ...]:
    """Into how many pieces to cut the rows: more than one where the columns alone do not occupy the team."""
    if target.cores == 1 or shape.inner_count < 64 * target.cores:
        return (1,)
    return (target.cores, 1)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    unroll, partials = (int(params["unroll"]), int(params["turns"])), int(params["partials"])
    rows = len(shape.rows)
    inline_cheap(schedule)
    one_visit = not reads_results(shape)
    inner = {v for v, _ in shape.inner}
    if partials > 1:
        cut = [p for b in shape.reductions if (p := cut_rows(schedule, b.name, rows, partials)) is not None]
        if not one_visit or not cut:
            for block in schedule.get_blocks():
                lanes_inside(schedule, [block], rows + (block in cut), target, unroll)
        else:
            elements = [b.name for b in shape.blocks if not b.is_reduction]
            cut += [name for name in elements if _cut_elements(schedule, name, rows, partials)]
            merge_rows(schedule, rows + 1, cut)
            merge_inner(schedule, rows + 1, cut)
            for together in sharing(schedule, rows + 1):
                lanes_inside(schedule, together, rows + (together[0] in cut), target, unroll)
    elif one_visit:
        # What the reduction reads is made on the way, and leaves on the way. What is made of results comes after it.
        visiting = [b.name for b in shape.blocks if any(a.var in inner for a in b.axes)]
        visiting = [b for b in schedule.get_blocks() if b in visiting]
        merge_rows(schedule, rows, visiting)
        merge_inner(schedule, rows, visiting)
        for together in sharing(schedule, rows):
            lanes_inside(schedule, together, rows, target, unroll)
        merge_rows(schedule, rows)
    else:
        turned = _turned(shape)
        for block in schedule.get_blocks():
            leaves_in_rows = not turned.isdisjoint(w.buffer for w in schedule.block(block).writes)
            lanes_inside(schedule, [block], rows, target, unroll, tile_lanes(shape, target) if leaves_in_rows else 0)
        merge_rows(schedule, rows)
        merge_inner(schedule, rows)
    parallel_roots(schedule, target)


def _cut_elements(schedule: Schedule, block: str, rows: int, partials: int) -> bool:
    """The loops of a stage over elements in the pieces of the reductions that read it."""
    loops = schedule.get_loops(block)
    if len(loops) <= rows:
        return False
    piece, rest = schedule.split(loops[rows], [partials, None])
    schedule.reorder(piece, *loops[:rows], rest)
    return True


def sharing(schedule: Schedule, depth: int) -> list[list[str]]:
    """Blocks by the innermost loop that they share; those of other shapes by themselves."""
    groups: dict[str, list[str]] = {}
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        groups.setdefault(loops[-1] if loops else block, []).append(block)
    return [g for g in groups.values() if schedule.get_loops(g[0])]


def _turned(shape: NestShape) -> set[str]:
    """What is written row by row of what is computed a column a lane: such as channels that come last again."""
    (column, _), inner = shape.rows[-1], [v for v, _ in shape.inner]
    return {
        a.buffer.name
        for a in shape.accesses
        if a.is_write and inner and a.step(inner[-1]) == 1 and a.step(column) not in (0, 1, None)
    }


def lanes_inside(
    schedule: Schedule, together: list[str], rows: int, target: Target, unroll: tuple[int, int], tile: int = 0
) -> None:
    """Split the last row loop by the width of the vectors and move its lanes inside the loops over elements.

    With ``tile`` so many elements of some columns at a time are a tile, which the emitter transposes in registers.
    """
    loops = schedule.get_loops(together[0])
    if not 0 < rows <= len(loops):
        return
    column = loops[rows - 1]
    extent = schedule.extent(column)
    width = part_width(schedule, column, choose_width(target, schedule.nest, extent, unroll[0]), target)
    if width == 1:
        return
    lanes = [column]
    outer = loops[: rows - 1]
    if extent != width:
        turns = _turns(-(-schedule.nest.symbols.hint(extent) // width), unroll[1])
        blocks_of, *lanes = schedule.split(column, [None, turns, width] if turns > 1 else [None, width])
        outer = [*outer, blocks_of]
    inner = loops[rows:]
    if inner and tile:
        *rest, last = inner
        *around, wide = lanes
        if width > TRANSPOSED_TILE:
            part, wide = schedule.split(wide, [None, TRANSPOSED_TILE])
            around.append(part)
        elements, element = schedule.split(last, [None, tile])
        schedule.reorder(*outer, *around, *rest, elements, wide, element)
        schedule.unroll(wide)
        schedule.vectorize(element)
        return
    if inner:
        *rest, run = inner
        is_sum_of_sums = is_long(schedule, run, 1)
        if is_sum_of_sums:
            outside, run = schedule.split(run, [None, run_length(schedule, run, 1)])
            rest.append(outside)
        many = schedule.nest.symbols.hint(schedule.extent(run)) >= 4 * COLUMN_ROWS_HELD
        if many and len(lanes) > 1 and all(_is_wide(schedule.block(b)) for b in together):
            run, held = schedule.split(run, [None, COLUMN_ROWS_HELD])
            lanes.insert(-1, held)
            schedule.unroll(held)
            schedule.annotate(held, CHAIN, True)
            schedule.annotate(held, HOLD, True)
        if is_sum_of_sums:
            schedule.annotate(run, CASCADE, True)
        inner = [*rest, run]
    if inner:
        schedule.reorder(*outer, *inner, *lanes)
    schedule.vectorize(lanes[-1])


def _is_wide(block: Block) -> bool:
    """Whether a block keeps several accumulators a column, so that loading and storing them is most of the work."""
    return any(isinstance(s, Update) and len(s.values) > 1 for s in block.body)


def _turns(vectors: int, most: int) -> int:
    """How many vectors of a row a block takes: no more than ``most``, in blocks that are about the same."""
    blocks = -(-max(vectors, 1) // most)
    return -(-max(vectors, 1) // blocks)


CPU_COLUMN_REDUCTION = Rule("cpu_column_reduction", ("cpu",), _matches, _parameters, _apply)
