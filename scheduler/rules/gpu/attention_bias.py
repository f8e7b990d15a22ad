"""The gradient of an attention's bias on GPUs: a program for a tile of scores, and a loop over what shares the bias.

The tile's products (scores, gradients of probabilities) are made again for each part of the batch; what is summed stays
in registers and is written once, so neither a matrix of all gradients nor an atomic operation is needed. On CPUs the
sum is one more reader of the tiles that the gradients of keys and values take up; here that would be a visit of the
result's memory for each part of the batch, which costs more than the products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.product import bare, factors
from ....ir.expr.role import Role
from ....ir.expr.value import Load, is_value, loads
from ....ir.nest.hints import NUM_STAGES, NUM_WARPS
from ....ir.nest.loops import AxisKind, Block, LoopNest, Update, blocks
from ....ir.target import Target
from ...cost.attention import LEAST_WIDTH, WIDEST
from ...cost.gpu_kernels import BIAS_SCORES, LONG_HEADS
from ...cost.products.gpu_tiles import GROUP_ROWS
from ...schedule.schedule import Schedule
from ..cpu.common import merge_paths, values
from ..registry import Params, Rule, Value
from .attention import extents_of
from .common import GPUS, clamp_power, cut, fused, next_power, steps_in_flight, tile, typical
from .fit import by_threads, moved_bytes, smaller_sides

# Steps in flight.
STAGES = (2, 1, 3)


@dataclass(frozen=True, slots=True)
class _BlockRoles:
    """Blocks by what they do: ``products`` make scores, ``edits`` are point-wise on them, ``total`` sums over ``over``.

    ``axes`` are those of the result, of which the last two are the sides of a tile; ``results`` come after the sum.
    """

    products: tuple[str, ...]
    edits: tuple[str, ...]
    total: str
    results: tuple[str, ...]
    axes: tuple[sympy.Symbol, ...]
    over: tuple[sympy.Symbol, ...]


def _roles(nest: LoopNest) -> _BlockRoles | None:
    found = [b for b, _ in blocks(nest)]
    if any(b.predicate or not all(e.is_Symbol for e in b.bindings) for b in found):
        return None
    totals = [b for b in found if b.role is Role.WEIGHT_TOTAL]
    roles = (Role.SCORE, Role.WEIGHT, Role.WEIGHT_TOTAL, Role.RESULT)
    if len(totals) != 1 or any(b.role not in roles for b in found):
        return None
    (total,) = totals
    axes = tuple(a.var for a in total.axes_of(AxisKind.SPATIAL))
    over = tuple(a.var for a in total.axes_of(AxisKind.REDUCTION))
    grid, sides = {*axes, *over}, axes[-2:]
    products, edits, after = (tuple(b for b in found if b.role is role) for role in roles if role is not roles[2])
    if len(sides) != 2 or not products or any({a.var for a in b.axes} != set(axes) for b in after):
        return None
    if any({a.var for a in b.axes if a.kind is AxisKind.SPATIAL} != grid for b in (*products, *edits)):
        return None
    if any(len(b.axes_of(AxisKind.REDUCTION)) != 1 or not _has_sides(b, sides) for b in products):
        return None
    first, second, last = (tuple(b.name for b in part) for part in (products, edits, after))
    return _BlockRoles(first, second, total.name, last, axes, over)


def _has_sides(block: Block, sides: tuple[sympy.Symbol, ...]) -> bool:
    """Whether a product has an operand along each side of a tile."""
    (update,) = block.body
    assert isinstance(update, Update)
    met = [{*sides} & _moves(ld) for ld in loads(update.values[0])]
    return all(len(m) < 2 for m in met) and {s for m in met for s in m} == {*sides}


def _moves(load: Load) -> set[sympy.Symbol]:
    return {s for i in load.indices if not is_value(i) for s in i.free_symbols}


def _matches(nest: LoopNest, target: Target) -> bool:
    found = _roles(nest)
    if found is None:
        return False
    by_name = {b.name: b for b, _ in blocks(nest)}
    for name in found.products:
        (depth,) = (a.extent for a in by_name[name].axes_of(AxisKind.REDUCTION))
        (update,) = by_name[name].body
        if not depth.is_Integer or not LEAST_WIDTH <= int(depth) <= WIDEST:
            return False
        if values(update)[0].dtype is not DType.FLOAT32:  # type: ignore[arg-type]
            return False
    return True


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = _roles(nest)
    assert found is not None
    extents = extents_of(nest)
    # Threads that multiply by themselves have the heads of both products whole in registers.
    heads = sum(map(next_power, _depths(nest, found).values()))
    half = _halves(nest, target, found)
    slow = by_threads(target, half) and heads >= LONG_HEADS
    most = (32, 32) if slow else (64, 64)
    # Single warps have operands in registers: of twice the rows a thread has as many scores, and reads less for each.
    copies = target.machine.has_async_copies and not target.machine.matrix_float32
    if half and copies and not target.has_group_products:
        shape = [typical(nest, extents[v]) for v in found.axes]
        if math.prod(shape[:-2]) * -(-shape[-2] // 128) * -(-shape[-1] // 64) >= target.cores:
            most = (128, 64)
    first = [clamp_power(typical(nest, extents[v]), LEAST_WIDTH, m) for v, m in zip(found.axes[-2:], most, strict=True)]
    sides, stages = _fitting(nest, target, found, first)
    warps = clamp_power(sides[0] * sides[1] // (BIAS_SCORES * target.warp), 8 if slow else 4, 8)
    return {
        "rows": tuple(dict.fromkeys((sides[0], min(sides[0] * 2, 128), max(sides[0] // 2, LEAST_WIDTH)))),
        "columns": tuple(dict.fromkeys((sides[1], min(sides[1] * 2, 128), max(sides[1] // 2, LEAST_WIDTH)))),
        "warps": tuple(dict.fromkeys((warps, 4, 8))),
        "stages": tuple(dict.fromkeys((stages, *steps_in_flight(target, STAGES)))),
    }


def _fitting(nest: LoopNest, target: Target, found: _BlockRoles, sides: Sequence[int]) -> tuple[tuple[int, int], int]:
    """The sides, or the largest smaller ones whose operands the shared memory holds, and the steps in flight."""
    whole = {v: next_power(max(n, LEAST_WIDTH)) for v, n in _depths(nest, found).items()} | dict.fromkeys(found.over, 1)
    half = _halves(nest, target, found)
    tiles = smaller_sides(*sides)
    for stages in dict.fromkeys((steps_in_flight(target, STAGES)[0], 1)):
        for rows, columns in tiles:
            sizes = {**whole, **dict(zip(found.axes[-2:], (rows, columns), strict=True))}
            groups = target.has_group_products and half and rows >= GROUP_ROWS
            edits = (*found.edits, found.total)
            if (
                moved_bytes(nest, target, sizes, found.over, found.products, edits, stages, groups)
                <= target.shared_bytes
            ):
                return (rows, columns), stages
    return tiles[-1], 1


def _depths(nest: LoopNest, found: _BlockRoles) -> dict[sympy.Symbol, int]:
    """What products sum over, by the axis."""
    own = (b for b, _ in blocks(nest) if b.name in found.products)
    return {a.var: int(a.extent) for b in own for a in b.axes_of(AxisKind.REDUCTION)}


def _halves(nest: LoopNest, target: Target, found: _BlockRoles) -> bool:
    """Whether tensor cores multiply the operands of all products in half types."""
    updates = (s for b, _ in blocks(nest) if b.name in found.products for s in b.body if isinstance(s, Update))
    kinds = {bare(f).dtype for s in updates for f in factors(s.values[0])}
    return all(k.is_half and target.multiplies(k) for k in kinds)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = _roles(schedule.nest)
    assert found is not None
    sizes = dict(zip(found.axes[-2:], (int(params["rows"]), int(params["columns"])), strict=True))
    inner = _programs(schedule, found, sizes)
    for name in schedule.get_blocks():
        _tile(schedule, name, sizes)
    for name in found.products:
        schedule.tensorize(name, "dot")
    schedule.annotate(inner, NUM_STAGES, int(params["stages"]))
    schedule.annotate("", NUM_WARPS, int(params["warps"]))
    schedule.annotate("", NUM_STAGES, int(params["stages"]))


def _moving(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    """The loops that an axis of a block moves with, outermost first."""
    b = schedule.block(block)
    names = {s.name for a, e in zip(b.axes, b.bindings, strict=True) if a.var == axis for s in e.free_symbols}
    return [lp for lp in schedule.get_loops(block) if lp in names]


def _programs(schedule: Schedule, found: _BlockRoles, sizes: Mapping[sympy.Symbol, int]) -> str:
    """All blocks in programs of one tile; those before the result in one loop over what is summed, its name."""
    heads: list[list[str]] = []
    for name in (*found.products, *found.edits, found.total, *found.results):
        outer = []
        for axis in found.axes:
            (loop,) = _moving(schedule, name, axis)
            outer.append(schedule.split(loop, [None, sizes[axis]])[0] if axis in sizes else loop)
        outer += [x for v in found.over for x in _moving(schedule, name, v)]
        schedule.reorder(*outer, *(x for x in schedule.get_loops(name) if x not in outer))
        heads.append(outer)
    first = merge_paths(schedule, heads)
    inner = first[len(found.axes) :]
    program = fused(schedule, first[: len(found.axes)])
    assert program is not None
    schedule.bind(program, "blockIdx.x")
    summed = fused(schedule, inner)
    assert summed is not None
    return summed


def _tile(schedule: Schedule, block: str, sizes: Mapping[sympy.Symbol, int]) -> None:
    """The loops of one block inside a tile: rows, columns, then what a product sums."""
    alone = [lp for lp in schedule.get_loops(block) if _holds_one(schedule, lp, block)]
    sides = [lp for v in sizes for lp in _moving(schedule, block, v) if lp in alone]
    order = [*sides, *(lp for lp in alone if lp not in sides)]
    if len(order) > 1:
        schedule.reorder(*order)
    for loop in order:
        _, lane = cut(schedule, loop, next_power(max(int(schedule.extent(loop)), LEAST_WIDTH)))
        tile(schedule, lane)


def _holds_one(schedule: Schedule, loop: str, block: str) -> bool:
    inside = [b for b in schedule.get_blocks() if loop in schedule.get_loops(b)]
    return inside == [block] and str(schedule.loop(loop).kind.value) == "serial"


GPU_ATTENTION_BIAS = Rule("gpu_attention_bias", GPUS, _matches, _parameters, _apply)
