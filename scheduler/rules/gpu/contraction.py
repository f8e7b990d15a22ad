"""Contractions on GPUs: one program for a tile of results, the tensor cores fed by a pipelined loop over the summed
axis, everything that follows on the tile while it is in registers.

Programs run in an order in which those that share operands run together, so that the operands stay in the L2 cache.
Sources: CUTLASS's threadblock swizzle; the matmul tutorial of Triton; Tillet et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import symbol
from ....ir.nest.hints import (
    COLUMN_PARTS,
    DESCRIPTOR,
    FLATTEN,
    INPUT_PRECISION,
    NUM_STAGES,
    NUM_WARPS,
    RESIDENT,
    WARP_SPECIALIZE,
)
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import PRODUCT_GROUP, PRODUCT_WHOLE_ROW, WARP_GROUP
from ...cost.products.gpu_tiles import LEAST, TileShape
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..contraction import Axes, ContractionNest, extent, find_contraction, reads_packed, reads_words, run_of
from ..cpu.common import merge_rows
from ..registry import Capability, Params, Rule, Scarce, Value
from .common import GPUS, cut, fused, programs, tile, typical
from .copies import described_operands
from .product_tiles import (
    beside_results,
    column_parts,
    copying,
    fitting,
    held_results,
    lasting,
    most_results,
    parts_at_once,
    roles,
    with_room,
)
from .steps import loops_of, steps_of

# Shapes of which tuning tries other numbers of warps and stages.
VARIED = 2


def _matches(nest: LoopNest, target: Target) -> bool:
    c = find_contraction(nest)
    if c is None:
        return False
    rows, columns, summed = (typical(nest, extent(a)) for a in (c.rows, c.columns, c.summed))
    if min(rows, columns) < 2 or max(rows, columns) < LEAST or summed < LEAST:
        return False
    if c.dtype() is DType.INT8 and not target.multiplies(DType.INT8):  # single threads multiply no tiles of bytes
        return False
    if c.needs_row and (c.tiles or not (extent(c.columns).is_Integer and columns <= PRODUCT_WHOLE_ROW)):
        return False
    return bool(fitting(nest, target, c))


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    c = find_contraction(nest)
    assert c is not None
    shapes = fitting(nest, target, c)
    # The best ones in other ways too: fewer steps in flight, as many threads again or half of them.
    around = [v for s in shapes[:VARIED] for v in _variants(nest, target, c, s)]
    texts = tuple(dict.fromkeys(map(shape_text, (*shapes[:6], *around))))
    found: dict[str, tuple[Value, ...]] = {"tile": texts, "group": (PRODUCT_GROUP, 1, 4, 16)}
    if parts := column_parts(nest, target, c, shapes[0]):
        found["column_parts"] = parts
    if not c.needs_row:
        found |= copying(nest, target, c, shapes[0])
    return found


def _variants(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> list[TileShape]:
    """A shape with another number of stages or of warps, as far as its results fit the registers."""
    most = most_results(nest, target, c)
    warps = [w for w in (shape.warps * 2, shape.warps // 2) if 4 <= w <= 8]
    warps = [w for w in warps if held_results(c, replace(shape, warps=w)) <= most]
    return [
        *(replace(shape, stages=k) for k in range(shape.stages - 1, 1, -1)),
        *(replace(shape, warps=w) for w in warps),
    ]


def _lighter(values: Mapping[str, tuple[Value, ...]], scarce: Scarce) -> Iterator[Params]:
    """The other shapes that have smaller tiles in flight, or fewer results a thread; the best ones first."""

    default = {k: v[0] for k, v in values.items()}
    first, *others = values["tile"]
    return ({**default, "tile": text} for text in others if weight_of(text, scarce) < weight_of(first, scarce))


def weight_of(text: Value, scarce: Scarce) -> float:
    """How much a shape takes of what is scarce."""
    s = parse_shape(str(text))
    return (s.rows + s.columns) * s.step * s.stages if scarce is Scarce.SHARED else s.rows * s.columns / s.warps


def shape_text(s: TileShape) -> str:
    """A shape as a parameter of a rule."""
    return f"{s.rows}x{s.columns}x{s.step}/{s.warps}/{s.stages}"


def parse_shape(text: str) -> TileShape:
    """The shape that a parameter says."""
    sizes, warps, stages = text.split("/")
    rows, columns, step = map(int, sizes.split("x"))
    return TileShape(rows, columns, step, int(warps), int(stages), 1.0)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    c = find_contraction(schedule.nest)
    assert c is not None
    shape, first, second = parse_shape(str(params["tile"])), *roles(schedule.nest, c)
    run = run_of(schedule.nest, c)
    specialized, lasts = bool(params.get("specialized")), bool(params.get("persistent"))
    if specialized and (shape.warps != WARP_GROUP or not params.get("descriptors")):
        raise ScheduleError("gpu_contraction", "warps are given parts of four-warp programs with descriptors alone")
    count = lasting(schedule.nest, target, c, shape) if lasts else None
    if count is not None and not specialized:
        shape = beside_results(schedule.nest, target, c, shape)
    for name in c.before:
        schedule.compute_inline(name)
    for p in c.products if run is not None else ():  # sums that begin apart stay in registers until a tile ends
        schedule.cache_write(p.name, schedule.block(p.name).writes[0].buffer)
    tiled = bring_together(schedule, c, (*c.batch, *first, *second))
    product = c.products[0].name
    loops = loops_of(schedule, product) | tiled
    over, within = tile_loops(schedule, loops, first, shape.rows, tiled)
    if c.needs_row:
        _whole_rows(schedule, c, outer_depth=_depth(schedule, within), size=shape.columns)
        order = [loops[v] for v, _ in c.batch] + [lp for lp in (over,) if lp is not None]
        programs(schedule, order)
        tile(schedule, within)
    else:
        across, lane = tile_loops(schedule, loops, second, shape.columns, tiled)
        batch = [loops[v] for v, _ in c.batch if run is None or v != run.tile]
        inside = (within, lane) if run is None or run.tile is None else (loops[run.tile], within, lane)
        order = _order_programs(schedule, batch, over, across, inside, int(params["group"]))
        _bind_programs(schedule, order, count, flat=not specialized)
        for lp in (within, lane):
            tile(schedule, lp)
    words, packed = (target.unpacks_operands and holds(schedule.nest, c) for holds in (reads_words, reads_packed))
    together = parts_at_once(schedule.nest, target, c, shape) > 1
    step = steps_of(schedule, c, shape, run, words, packed, together)
    if specialized and step is not None:
        schedule.annotate(step, WARP_SPECIALIZE, True)
    if params.get("descriptors"):
        for name in described_operands(schedule.nest, target, c):
            schedule.annotate("", DESCRIPTOR.key(name), True)
    if (parts := int(params.get("column_parts", 1))) > 1:
        schedule.annotate("", COLUMN_PARTS, parts)
    for p in c.products:
        schedule.tensorize(p.name, "dot")
        if c.dtype() is DType.FLOAT32 and target.multiplies(DType.FLOAT32):
            schedule.annotate(p.name, INPUT_PRECISION, "tf32")
    schedule.annotate("", NUM_WARPS, max(shape.warps * 32 // target.warp, 1))
    schedule.annotate("", NUM_STAGES, shape.stages)
    if packed and (resident := with_room(target, c, shape)):
        schedule.annotate("", RESIDENT, resident)


def _depth(schedule: Schedule, loop: str) -> int:
    block = next(b for b in schedule.get_blocks() if loop in schedule.get_loops(b))
    return schedule.get_loops(block).index(loop) + 1


def bring_together(schedule: Schedule, c: ContractionNest, order: Axes) -> dict[sympy.Symbol, str]:
    """Every block's loops over results in one order, and as many of them shared as dependences allow.

    Where blocks reduce over tiles of the results, the loop over those is cut into them: the axis and its two loops in
    the first block, the loop over tiles under the axis and the one inside a tile under ``_lane`` of it.
    """
    last, size = next(((t.axes[-1][0], t.size) for t in c.tiles.values()), (None, 0))
    found: dict[sympy.Symbol, str] = {}
    for name in schedule.get_blocks():
        loops = loops_of(schedule, name)
        pair: tuple[str, str] | None = None
        if name in c.tiles:
            whole, pair = c.tiles[name].loops(loops)
            loops |= whole
        elif last in loops:
            pair = tuple(schedule.split(loops[last], [None, size]))  # type: ignore[assignment]
        if last is not None and pair is not None:
            loops[last], loops[_lane(last)] = pair
            found = found or {last: pair[0], _lane(last): pair[1]}
        wanted = [loops[w] for v, _ in order for w in (v, _lane(v)) if w in loops]
        if len(wanted) > 1:
            schedule.reorder(*wanted)
    merge_rows(schedule, len(order) + bool(found))
    return found


def _lane(axis: sympy.Symbol) -> sympy.Symbol:
    """The name of the loop inside a tile of an axis."""
    return symbol(f"{axis.name}_lane")


def tile_loops(
    schedule: Schedule, loops: Mapping[sympy.Symbol, str], axes: Axes, size: int, tiled: Mapping[sympy.Symbol, str]
) -> tuple[str | None, str]:
    """The loop over tiles along some axes, if there are several, and the one inside a tile."""
    *_, last = (v for v, _ in axes)
    over = fused(schedule, [loops[v] for v, _ in axes])
    assert over is not None
    return (over, loops[_lane(last)]) if last in tiled else cut(schedule, over, size)


def _whole_rows(schedule: Schedule, c: ContractionNest, outer_depth: int, size: int) -> None:
    """A program holds all columns of its rows, whether loops over them are shared or not."""
    columns = {v for v, _ in c.columns}
    seen: set[str] = set()
    for name in schedule.get_blocks():
        loops = loops_of(schedule, name)
        mine = [lp for v, lp in loops.items() if v in columns and lp not in seen]
        if not mine:
            continue
        whole = fused(schedule, mine)
        assert whole is not None
        _, lane = cut(schedule, whole, size)
        seen.update((*mine, whole, lane))
        tile(schedule, lane)


def _order_programs(
    schedule: Schedule, batch: list[str], over: str | None, across: str | None, inside: tuple[str, ...], group: int
) -> list[str]:
    """The loops over programs, in groups: a few tiles along one way, and all along the other before the next few."""
    around: list[str] = [*batch]
    small: str | None = None
    if over is not None and across is not None:
        # Whichever way has a number of tiles that divides well.
        sizes = {loop: _divisor(schedule, loop, group) if group > 1 else 1 for loop in (over, across)}
        for loop in sorted(sizes, key=lambda lp: max(sizes[lp] / group, group / sizes[lp])):
            size = sizes[loop]
            if size > 1:
                big, small = schedule.split(loop, [None, size]) if schedule.extent(loop) != size else (None, loop)
                other = across if loop == over else over
                around += [lp for lp in (big, other) if lp is not None] + [small]
                break
    if small is None:
        around += [lp for lp in (over, across) if lp is not None]
    schedule.reorder(*around, *inside)
    return around


def _bind_programs(schedule: Schedule, order: list[str], count: int | None, flat: bool) -> None:
    """A program for each tile, or ``count`` of them that last over several, which follow one another by that number, so
    that programs at one time have neighbouring tiles."""
    together = fused(schedule, order)
    if together is None:
        return
    if count is not None:
        several, together = schedule.split(together, [None, count])
        schedule.reorder(together, several)
        if flat:
            schedule.annotate(several, FLATTEN, True)
    schedule.bind(together, "blockIdx.x")


def _divisor(schedule: Schedule, loop: str, group: int) -> int:
    """The number next to ``group``, below twice it, that divides the loop's iterations; 1 where none does."""
    extent, table = schedule.extent(loop), schedule.nest.symbols
    near = sorted(range(2, 2 * group), key=lambda size: max(size / group, group / size))
    return next((size for size in near if table.is_divisible(extent, size)), 1)


GPU_CONTRACTION = Rule(
    "gpu_contraction", GPUS, _matches, _parameters, _apply, _lighter, can=frozenset({Capability.TILE_REDUCTIONS})
)
