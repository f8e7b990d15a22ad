"""Products of a packed matrix with a vector on GPUs: a program for a tile of rows of the matrix, whose parts become a
half type in registers and go to the tensor cores, the vector in every column of the other operand.

The tensor cores are there for what they save: without them each element of the vector is converted, and each partial
sum added up across threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ....ir.nest.hints import NUM_STAGES, NUM_WARPS
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.gpu_kernels import PRODUCT_RESERVED
from ...cost.products.gpu_tiles import LEAST, VECTOR_TILES, TileShape, stages_of
from ...schedule.schedule import Schedule
from ..contraction import ContractionNest, bytes_per_step, extent, find_contraction, reads_packed, reads_words
from ..registry import Params, Rule, Scarce, Value
from .common import GPUS, next_power, programs, tile, typical
from .contraction import bring_together, parse_shape, shape_text, tile_loops, weight_of
from .steps import loops_of, steps_of


def _vector_product(nest: LoopNest, target: Target) -> ContractionNest | None:
    c = find_contraction(nest, vectors=True)
    if c is None or c.rows or c.needs_row or c.tiles or len(c.products) != 1 or not target.has_pairs:
        return None
    if min(typical(nest, extent(a)) for a in (c.columns, c.summed)) < LEAST:
        return None
    return c if c.dtype().is_half and reads_packed(nest, c) else None


def _matches(nest: LoopNest, target: Target) -> bool:
    return _vector_product(nest, target) is not None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    c = _vector_product(nest, target)
    assert c is not None
    count = typical(nest, extent(c.batch)) * typical(nest, extent(c.columns))
    # Every multiprocessor has to read.
    many = [s for s in VECTOR_TILES if count >= s.rows * target.cores] or [VECTOR_TILES[-1]]
    shapes = dict.fromkeys((*many, *VECTOR_TILES))
    return {"tile": tuple(shape_text(_fitted(nest, target, c, s)) for s in shapes)}


def _fitted(nest: LoopNest, target: Target, c: ContractionNest, shape: TileShape) -> TileShape:
    """The shape with a step no longer than the sum, and stages that fit the shared memory."""
    step = min(shape.step, max(next_power(typical(nest, extent(c.summed))), LEAST))
    axes = {v: 1 for v, _ in (*c.columns, *c.summed)}
    axes |= {c.columns[-1][0]: shape.rows, c.summed[-1][0]: step}
    each = bytes_per_step(nest, c, axes) + step * c.dtype().itemsize
    stages = max(stages_of(target.machine, shape, each, PRODUCT_RESERVED), 1)
    return TileShape(shape.rows, shape.columns, step, shape.warps, stages, shape.rate)


def _lighter(values: Mapping[str, tuple[Value, ...]], scarce: Scarce) -> Iterator[Params]:
    first, *others = values["tile"]
    return ({"tile": text} for text in others if weight_of(text, scarce) < weight_of(first, scarce))


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    c = _vector_product(schedule.nest, target)
    assert c is not None
    shape = parse_shape(str(params["tile"]))
    for name in c.before:
        schedule.compute_inline(name)
    tiled = bring_together(schedule, c, (*c.batch, *c.columns))
    product = c.products[0].name
    loops = loops_of(schedule, product)
    over, within = tile_loops(schedule, loops, c.columns, shape.rows, tiled)
    programs(schedule, [*(loops[v] for v, _ in c.batch), over])
    tile(schedule, within)
    steps_of(schedule, c, shape, words=reads_words(schedule.nest, c), packed=True)
    schedule.tensorize(product, "dot")
    schedule.annotate("", NUM_WARPS, shape.warps)
    schedule.annotate("", NUM_STAGES, shape.stages)


GPU_MATRIX_VECTOR = Rule("gpu_matrix_vector", GPUS, _matches, _parameters, _apply, _lighter)
