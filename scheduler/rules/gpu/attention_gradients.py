"""The backward of attention on GPUs: a program for a tile of queries, or of keys, a loop over tiles of the others, and
sums of theirs in registers.

Scores and what else is as large as they (gradients of weights) are made of products a tile at a time, as in the
forward; with the log-sum-exp of rows at hand no statistics are carried. What is a query here may be a key of the model:
the gradients of keys and values are sums over queries. Source: Dao et al. 2022, algorithm 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.product import bare, factors
from ....ir.nest.hints import FULL_TILES, NUM_STAGES, NUM_WARPS, OPERANDS, TRANSPOSED
from ....ir.nest.loops import LoopKind, LoopNest, Update, blocks
from ....ir.target import Target
from ...cost.attention import LEAST_WIDTH, WIDEST
from ...cost.gpu_kernels import ATTENTION_WARPS, FULL_TILES_FROM, GRADIENT_SUMS, LEFT_OUT_ROWS, LONG_HEADS, PAIR_SUMS
from ...error import ScheduleError
from ...primitives.loops.powers_of_two import has_exponential
from ...schedule.schedule import Schedule
from ..cpu.attention import Roles, roles
from ..cpu.common import values
from ..registry import Capability, Params, Rule, Value
from .attention import copy_queries, extents_of, tile_lanes, tile_programs
from .common import GPUS, clamp_power, cut, next_power, steps_in_flight, tile, typical
from .fit import AttentionTile, by_threads, fitting_tile, one_load, read_across

STAGES = (2, 1, 3)


def _matches(nest: LoopNest, target: Target) -> bool:
    found = roles(nest)
    if found is None or found.online or found.totals or any(len(own) != 1 for own in found.widths):
        return False
    by_name, extents = {b.name: b for b, _ in blocks(nest)}, extents_of(nest)
    depths = [extents[v] for v in found.width]
    for name in (*found.products, *found.states):
        block = by_name[name]
        (update,) = block.body
        if values(update)[0].dtype is not DType.FLOAT32:  # type: ignore[arg-type]
            return False
        if name in found.products:
            inside = [a.extent for a in block.axes if a.var not in {*found.rows, found.keys}]
            if len(inside) != 1:
                return False
            depths += inside
    for name in found.prologues:
        inside = [a.extent for a in by_name[name].axes if a.var not in found.rows]
        if any(not e.is_Integer or int(e) > WIDEST for e in inside):
            return False
    return all(e.is_Integer and LEAST_WIDTH <= int(e) <= WIDEST for e in depths)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = roles(nest)
    assert found is not None
    extents = extents_of(nest)
    queries, keys = typical(nest, extents[found.queries]), typical(nest, extents[found.keys])
    half = all(_half(nest, target, found, name) is not None for name in found.states)
    width = sum(int(extents[v]) for own in found.widths for v in own)
    # One product before one sum holds no more than the forward's program does.
    single = half and len(found.products) == len(found.states) == 1 and width <= WIDEST // 2
    heads = typical(nest, sympy.Mul(*(extents[v] for v in found.rows if v != found.queries)))
    most, wide = (64, 64) if half else (32, 32)
    if single and heads * -(-queries // (2 * most)) >= target.cores:
        most *= 2
    most_warps = ATTENTION_WARPS * 32 // target.warp
    # Threads that multiply by themselves have heads whole in registers; and where the next step comes through those,
    # two sums are beside two products.
    slow = by_threads(target, half) and width >= LONG_HEADS * len(found.widths)
    # Where copies make a program wait, what they bring is in registers too.
    crowded = by_threads(target, half) and not target.machine.has_async_copies
    if slow and crowded:
        most //= 2
    if slow or (target.machine.through_registers and half and len(found.widths) > 1):
        wide //= 2

    def warps_of(rows: int) -> int:
        least = most_warps if slow or crowded else max(rows * 2 // target.warp, 4) if single else 4
        return clamp_power(rows * width // (GRADIENT_SUMS * target.warp), least, most_warps)

    # Two groups of warps have rows of their own each: of the same rows each would have half of the columns, and read
    # all of the other operand again. As many scores are shorter steps.
    twice = heads * -(-queries // (2 * most)) >= target.cores and 2 * most * width <= PAIR_SUMS * most_warps * 32
    if half and target.has_wgmma and twice and warps_of(most) * 32 > 2 * most:
        most, wide = 2 * most, wide // 2
    stages = steps_in_flight(target, STAGES)
    first = AttentionTile(clamp_power(queries, LEAST_WIDTH, most), clamp_power(keys, LEAST_WIDTH, wide), 0, stages[0])
    fits = fitting_tile(nest, target, found, first, half, warps_of)
    rows, columns = fits.queries, fits.keys
    return {
        "queries": tuple(dict.fromkeys((rows, min(rows * 2, 128), max(rows // 2, LEAST_WIDTH)))),
        "keys": tuple(dict.fromkeys((columns, max(columns // 2, LEAST_WIDTH), min(columns * 2, 128)))),
        "warps": tuple(dict.fromkeys((fits.warps, 4, 8))),
        "stages": tuple(dict.fromkeys((fits.stages, *stages))),
        **one_load(nest, target, found, fits, half),
    }


def _half(nest: LoopNest, target: Target, found: Roles, state: str) -> DType | None:
    """The half type of what a sum weighs, in which the tensor cores take the weights too; None where it is wider, or of
    a type that those do not multiply."""
    (update,) = next(b for b, _ in blocks(nest) if b.name == state).body
    assert isinstance(update, Update)
    kinds = {bare(f).dtype for f in factors(update.values[0])}
    return next((k for k in kinds if k.is_half and target.multiplies(k)), None)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = roles(schedule.nest)
    assert found is not None
    halves = {name: _half(schedule.nest, target, found, name) for name in found.states}
    copies = copy_queries(schedule, found)
    inner = tile_programs(schedule, found, int(params["queries"]), int(params["keys"]))
    for name in copies:
        schedule.compute_at(name, schedule.get_loops(found.state)[0])
    known = set(schedule.get_blocks())
    begins = set()
    for name in found.states if schedule.extent(inner) != 1 else ():
        try:
            begins.add(schedule.decompose_reduction(name, inner, skip=True))
        except ScheduleError:
            begins.add(schedule.decompose_reduction(name, inner))
    for name in schedule.get_blocks():
        if name in known or name in begins:
            tile_lanes(schedule, name, found, copies)
        else:
            _left_out(schedule, name)
    for name in found.edits:
        if any(has_exponential(v) for s in schedule.block(name).body for v in values(s)):
            # Of weights below 2**-126 nothing is left where they are rounded to a half type beside others.
            schedule.powers_of_two(name, "exp2_approx" if all(halves.values()) else "exp2")
    for name in (*found.products, *found.states):
        schedule.tensorize(name, "dot")
        kind = halves.get(name)
        if kind is not None:
            schedule.annotate(name, OPERANDS, kind.value)
    for name in read_across(schedule.nest, found) if params.get("one_load") else ():
        schedule.annotate("", TRANSPOSED.key(name), True)
    schedule.annotate(inner, NUM_STAGES, int(params["stages"]))
    # Threads that multiply by themselves have no registers for what two loops keep.
    matrices = not by_threads(target, all(halves.values()))
    if matrices and schedule.nest.symbols.hint(schedule.extent(inner)) >= FULL_TILES_FROM:
        schedule.annotate(inner, FULL_TILES, True)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))
    schedule.annotate("", NUM_STAGES, int(params["stages"]))


def _left_out(schedule: Schedule, block: str) -> None:
    """What tiles that are left out would add: a few numbers of a row, many rows at a time."""
    *rows, over = (lp for lp in schedule.get_loops(block) if schedule.loop(lp).kind is LoopKind.SERIAL)
    for lp in rows:
        tile(schedule, cut(schedule, lp, next_power(int(schedule.extent(lp))))[1])
    extent, most = schedule.extent(over), LEAST_WIDTH if rows else LEFT_OUT_ROWS
    size = min(next_power(max(int(extent), LEAST_WIDTH)), most) if extent.is_Integer else most
    tile(schedule, cut(schedule, over, size)[1])


GPU_ATTENTION_GRADIENTS = Rule(
    "gpu_attention_gradients", GPUS, _matches, _parameters, _apply, can=frozenset({Capability.WEIGHTED_SUMS})
)
