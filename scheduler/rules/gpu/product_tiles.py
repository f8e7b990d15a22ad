"""Tiles of contractions on GPUs: which of the table fit a target's registers and shared memory, which is expected to
be fastest, and whether its programs last over several tiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import CeilDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.value import loads
from ....ir.nest.loops import LoopNest, blocks
from ....ir.target import Target
from ...cost.gpu_kernels import PARTS_REGISTERS, PRODUCT_HEAVY, PRODUCT_HELD, PRODUCT_RESERVED
from ...cost.products.gpu_tiles import (
    FEW_RESULTS,
    GROUP_ROWS,
    LASTING_WORTH,
    LEAST,
    PLAIN_SHAPES,
    SHAPES,
    TileShape,
    resident_programs,
    stages_of,
    tile_time,
)
from ...error import ScheduleError
from ..contraction import Axes, ContractionNest, bytes_per_step, extent, joined_axis, part_axes, run_of
from ..cpu.common import cost
from ..registry import Value
from .common import next_power, typical
from .copies import described_operands, lasting_programs


def is_turned(nest: LoopNest, c: ContractionNest) -> bool:
    """Whether the columns become the rows of the tensor cores: where those are too few to fill a warp group, or where
    the right operand is computed, for the left one alone may come from registers."""
    if c.needs_row:
        return False
    rows, columns = (typical(nest, extent(a)) for a in (c.rows, c.columns))
    if min(rows, columns) < GROUP_ROWS:
        return columns > rows
    computed = [(not p.left.is_plain, not p.right.is_plain) for p in c.products]
    return all(right and not left for left, right in computed)


def roles(nest: LoopNest, c: ContractionNest) -> tuple[Axes, Axes]:
    """The axes of the first and of the second dimension of the tile."""
    return (c.columns, c.rows) if is_turned(nest, c) else (c.rows, c.columns)


def _has_groups(target: Target, c: ContractionNest) -> bool:
    """Whether the tensor cores want the rows of four warps at once."""
    return target.has_group_products and target.multiplies(c.dtype())


def epilogue_cost(nest: LoopNest, c: ContractionNest) -> int:
    """Operations on an element of the result."""
    return max((cost(b) for b, _ in blocks(nest) if b.name in c.after), default=0)


def fitting(nest: LoopNest, target: Target, c: ContractionNest) -> list[TileShape]:
    """The shapes of tiles for a contraction, the one expected to be fastest first; steps and stages fit the shared
    memory."""
    first, second = roles(nest, c)
    sizes = typical(nest, extent(first)), typical(nest, extent(second))
    batch, depth = typical(nest, extent(c.batch)), typical(nest, extent(c.summed))
    table: tuple[TileShape, ...] = SHAPES if target.multiplies(c.dtype()) else PLAIN_SHAPES
    if c.needs_row and (row := max(next_power(sizes[1]), LEAST)) not in (s.columns for s in table):
        table = (_with_columns(table[0], row),)
    scored: list[tuple[float, int, TileShape]] = []
    for k, shape in enumerate(table):
        if c.needs_row and next_power(sizes[1]) != shape.columns and shape.columns != max(next_power(sizes[1]), LEAST):
            continue
        if any(s > max(next_power(n), LEAST) for s, n in zip((shape.rows, shape.columns), sizes, strict=True)):
            continue
        if any(c.tile_of(side) not in (None, s) for side, s in ((first, shape.rows), (second, shape.columns))):
            continue
        # Several products keep a tile of results each, and mathematics on a tile wants registers of its own.
        if held_results(c, shape) > most_results(nest, target, c):
            continue
        if _has_groups(target, c) and not _suits_groups(c, shape, sizes[0]):
            continue
        fitted = _fit(nest, target, c, shape)
        if fitted is None:
            continue
        count = batch * -(-sizes[0] // shape.rows) * -(-sizes[1] // shape.columns)
        waves = -(-count // target.cores)
        scored.append((waves * shape.rows * shape.columns * depth / shape.rate, k, fitted))
    return [s for _, _, s in sorted(scored, key=lambda s: s[:2])]


def _suits_groups(c: ContractionNest, shape: TileShape, rows: int) -> bool:
    """Whether a shape suits tensor cores that multiply the rows of four warps at once: it has as many. Not so where
    words have several parts and columns are few: each part is a product by itself, made so that all warps wait for it,
    and has little to multiply. Fewer rows are multiplied by each warp, which does not wait. It has room for the parts
    of one matrix: two that share an operand would be in memory."""
    if part_axes(c) and shape.columns <= LEAST and len(c.products) == 1:
        return shape.rows < GROUP_ROWS
    return shape.rows >= min(GROUP_ROWS, next_power(rows))


def with_room(target: Target, c: ContractionNest, shape: TileShape) -> int:
    """How many programs a multiprocessor is to hold, so that threads have room for the parts of words; 0 where a word
    has one, or several products have the room that the assembler gives them."""
    if not part_axes(c) or len(c.products) > 1 or shape.rows * shape.columns > FEW_RESULTS:
        return 0
    return target.machine.registers // (PARTS_REGISTERS * shape.warps * 32)


def held_results(c: ContractionNest, shape: TileShape) -> int:
    """Elements of results that a thread has in registers."""
    return len(c.products) * shape.rows * shape.columns // (shape.warps * 32)


def most_results(nest: LoopNest, target: Target, c: ContractionNest) -> int:
    """How many of them it has room for: half of them where mathematics on all of them at once follows."""
    heavy = epilogue_cost(nest, c) >= PRODUCT_HEAVY and not _has_column_parts(nest, target, c)
    return PRODUCT_HELD // 2 if heavy else PRODUCT_HELD


def column_parts(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> tuple[int, ...]:
    """In how many parts of the columns what follows may be done, the default first: two where a thread's results take
    half of its registers, so that what is made of them does not take the other half. Nothing where there is one way."""
    if not _has_column_parts(nest, target, c):
        return ()
    return (2, 1, 4) if held_results(c, shape) >= PRODUCT_HELD else (1, 2, 4)


def _has_column_parts(nest: LoopNest, target: Target, c: ContractionNest) -> bool:
    """Whether results come in parts of their columns: neighbours are a thread's own where warps multiply in groups, and
    nothing that follows wants all columns."""
    return _has_groups(target, c) and not c.needs_row and not c.tiles and run_of(nest, c) is None


def _with_columns(shape: TileShape, columns: int) -> TileShape:
    """A shape of as many results with other columns."""
    return replace(shape, rows=max(shape.rows * shape.columns // columns, LEAST), columns=columns)


def beside_results(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> TileShape:
    """The shape with fewer stages, where the next tile is on its way while results are written, which pass through
    shared memory. Raises ScheduleError."""
    fitted = _fit(nest, target, c, shape, _held_results(nest, shape))
    if fitted is None or fitted.step != shape.step:
        raise ScheduleError("gpu_contraction", "shared memory does not hold results beside the next operands")
    return fitted


def _fit(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape, kept: int = 0) -> TileShape | None:
    """The shape with steps and stages that fit the shared memory of a program, beside ``kept`` bytes of it."""
    depth = max(next_power(typical(nest, extent(c.summed))), LEAST)
    # Rows of one-byte operands are as long in bytes.
    step = min(shape.step * (2 if c.dtype() is DType.INT8 else 1), depth)
    while step >= LEAST:
        fitted = replace(shape, step=step)
        beside = _held_once(c, fitted) + kept
        each = _held_each(nest, c, fitted) * parts_at_once(nest, target, c, fitted)
        stages = stages_of(target.machine, shape, each, beside, len(c.products))
        if stages >= min(target.machine.stages, 2) or (stages == 1 and step == LEAST):
            return replace(fitted, stages=stages)
        step //= 2
    return None


def _held_each(nest: LoopNest, c: ContractionNest, shape: TileShape) -> int:
    """Bytes of shared memory of a step."""
    first, second = roles(nest, c)
    tiles = dict.fromkeys((v for v, _ in first), 0) | dict.fromkeys((v for v, _ in second), 0)
    tiles |= {v: 1 for v, _ in (*first, *second, *c.summed)}
    # Fused axes share a tile: the whole of it along one of them is the most that a load has.
    tiles |= {first[-1][0]: shape.rows, second[-1][0]: shape.columns, c.summed[-1][0]: shape.step}
    return bytes_per_step(nest, c, tiles)


def parts_at_once(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> int:
    """How many parts of a joined operand a step has tiles of: all, where descriptors copy all that is read and two such
    steps fit beside results; else one, and parts have loops one behind the other."""
    found = joined_axis(c)
    if found is None or not target.multiplies(c.dtype()) or not _all_described(c, described_operands(nest, target, c)):
        return 1
    _, parts = found
    held = 2 * parts * _held_each(nest, c, shape) + _held_once(c, shape) + _held_results(nest, shape)
    return parts if held <= target.machine.block_shared else 1


def _held_once(c: ContractionNest, shape: TileShape) -> int:
    """Bytes of shared memory that a program has beside those of its steps."""
    computed = sum(not p.right.is_plain or not p.left.is_plain for p in c.products)
    return PRODUCT_RESERVED + computed * shape.columns * shape.step * 4


def _held_results(nest: LoopNest, shape: TileShape) -> int:
    """Bytes of shared memory through which results pass, half of them at a time."""
    return shape.rows * shape.columns * max(nest.buffer(name).dtype.itemsize for name in nest.outputs) // 2


def copying(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> Mapping[str, tuple[Value, ...]]:
    """How operands may be copied (by descriptors) and tiles dealt out (to programs that last); the default first.

    Programs last, and read by descriptors, where all operands are memory as it is and descriptors are made once for so
    much work that they cost nothing. What operands are computed from would be copied a few bytes at a time in between.
    """
    names = described_operands(nest, target, c)
    found: dict[str, tuple[Value, ...]] = {}
    default = False
    if target.machine.has_async_copies and lasting(nest, target, c, shape) is not None:
        default = _all_described(c, names) and target.multiplies(c.dtype())
        default = default and _is_worth_lasting(nest, target, c, shape)
        # Loops that stand one behind the other are not flattened with the one over tiles.
        default = default and (joined_axis(c) is None or parts_at_once(nest, target, c, shape) > 1)
        found["persistent"] = (default, not default)
    if names:
        found["descriptors"] = (default, not default)
        found["specialized"] = (False, True)
    return found


def _all_described(c: ContractionNest, names: Collection[str]) -> bool:
    """Whether descriptors tell all that products read."""
    sides = [side for p in c.products for side in (p.left, p.right)]
    return all(s.is_plain and ld.buffer in names for s in sides for f in s.factors for ld in loads(f))


def lasting(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> int | None:
    """How many programs last over the tiles of a shape; None where each tile has its own: where one round is enough,
    in runs of steps, and where blocks reduce over tiles of which the last has a tail, since what guards the elements of
    a tail is then no guard of the reduction's."""
    resident = _resident(nest, target, c, shape)
    sides = zip(roles(nest, c), (shape.rows, shape.columns), strict=True)
    if any(c.tile_of(side) is not None and not nest.symbols.is_divisible(extent(side), size) for side, size in sides):
        return None
    if run_of(nest, c) is not None or typical(nest, count_tiles(nest, c, shape)) <= resident:
        return None
    return lasting_programs(count_tiles(nest, c, shape), resident)


def _resident(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> int:
    """Programs of a target that run at a time."""
    each = _held_each(nest, c, shape) * parts_at_once(nest, target, c, shape)
    shared = shape.stages * each + _held_once(c, shape) + _held_results(nest, shape)
    return target.cores * max(resident_programs(target.machine, shape, shared, len(c.products)), 1)


def _is_worth_lasting(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> bool:
    try:
        if beside_results(nest, target, c, shape).stages < 2:
            return False
    except ScheduleError:
        return False
    rounds = typical(nest, count_tiles(nest, c, shape)) / _resident(nest, target, c, shape)
    each = tile_time(target.machine, shape, typical(nest, extent(c.summed))) * len(c.products)
    return rounds * each >= LASTING_WORTH


def count_tiles(nest: LoopNest, c: ContractionNest, shape: TileShape) -> sympy.Expr:
    """How many tiles the results are."""
    first, second = roles(nest, c)
    return extent(c.batch) * CeilDiv(extent(first), shape.rows) * CeilDiv(extent(second), shape.columns)
