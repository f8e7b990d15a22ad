"""Online attention on GPUs: a program for a tile of queries, a pipelined loop over tiles of keys, two matrix products
and the running maxima and sums in registers.

The nest is that of the CPU's rule, and so are its steps up to the online softmax; the scores' and the values' products
become ``tl.dot``. Sources: Milakov and Gimelshein 2018; Dao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, is_value
from ....ir.nest.hints import DESCRIPTOR, FULL_TILES, NUM_STAGES, NUM_WARPS, OPERANDS, TRANSPOSED
from ....ir.nest.loops import LoopNest, Update, blocks
from ....ir.target import Target
from ...cost.attention import LEAST_WIDTH, WIDEST
from ...cost.gpu_kernels import COPIED_FROM, FULL_TILES_FROM
from ...cost.products.gpu_tiles import GROUP_ROWS, LASTING_WORTH
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..cpu.attention import Roles, roles, vector_of
from ..cpu.common import merge_paths, values
from ..registry import Capability, Params, Rule, Value
from .common import GPUS, clamp_power, cut, fused, next_power, steps_in_flight, tile, typical
from .copies import in_aligned_rows
from .fit import AttentionTile, by_threads, fitting_tile, held, one_load, read_across

# Steps in flight.
STAGES = (2, 3, 1)


def extents_of(nest: LoopNest) -> dict[sympy.Symbol, sympy.Expr]:
    return {a.var: a.extent for b, _ in blocks(nest) for a in b.axes}


def _depths(nest: LoopNest, found: Roles) -> list[sympy.Expr]:
    """The extents that stand whole in a tile: those of the values, and those that scores sum over."""
    extents = extents_of(nest)
    own = {*found.rows, found.keys}
    summed = [a.extent for b, _ in blocks(nest) if b.name in found.products for a in b.axes if a.var not in own]
    return [sympy.Mul(*(extents[v] for v in found.width)), *summed]


def _matches(nest: LoopNest, target: Target) -> bool:
    found = roles(nest)
    if found is None or not found.online or len(found.width) != 1:
        return False
    by_name = {b.name: b for b, _ in blocks(nest)}
    for name in found.products:
        if len([a for a in by_name[name].axes if a.var not in {*found.rows, found.keys}]) != 1:
            return False
        (update,) = by_name[name].body
        if not isinstance(values(update)[0], Call) or values(update)[0].dtype is not DType.FLOAT32:
            return False
    return all(e.is_Integer and LEAST_WIDTH <= int(e) <= WIDEST for e in _depths(nest, found))


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = roles(nest)
    assert found is not None
    extents = extents_of(nest)
    queries, keys = typical(nest, extents[found.queries]), typical(nest, extents[found.keys])
    heads = typical(nest, sympy.Mul(*(extents[v] for v in found.rows if v != found.queries)))
    half, widest = _half(nest, target, found) is not None, max(int(e) for e in _depths(nest, found))
    most, wide = (128, 64) if half and widest <= 128 else (64, 64 if half else 32)
    if not half or heads * -(-queries // most) < target.cores:
        most = 64 if half else 32
    stages = steps_in_flight(target, STAGES)
    first = AttentionTile(clamp_power(queries, LEAST_WIDTH, most), clamp_power(keys, LEAST_WIDTH, wide), 0, stages[0])
    tile = fitting_tile(nest, target, found, first, half, lambda rows: min(max(rows // 16, 4), 8) * 32 // target.warp)
    return {
        "queries": tuple(dict.fromkeys((tile.queries, max(tile.queries // 2, LEAST_WIDTH)))),
        "keys": tuple(dict.fromkeys((tile.keys, max(tile.keys // 2, LEAST_WIDTH)))),
        "warps": (tile.warps, tile.warps * 2),
        "stages": tuple(dict.fromkeys((tile.stages, *stages))),
        **one_load(nest, target, found, tile, half),
        **_copying(nest, target, found, tile, half, keys),
    }


def _copying(
    nest: LoopNest, target: Target, found: Roles, tile: AttentionTile, half: bool, keys: int
) -> dict[str, tuple[Value, ...]]:
    """Whether keys and values are copied by descriptors, the default first; nothing where none can be.

    Threads that copy nothing hold no addresses. It is the default where groups of warps multiply and a thread's sums
    leave no room for those, all of those tiles can be copied so, and a program multiplies for so long that making
    descriptors costs nothing. Of narrower heads each tile costs more instructions so, and saves nothing.
    """
    described, all_are = described_tiles(nest, target, found)
    if not half or not described:
        return {}
    operations = 2 * tile.queries * keys * sum(int(e) for e in _depths(nest, found))
    worth = operations >= LASTING_WORTH * target.machine.matmul / target.cores
    crowded = held(nest, target, found, tile) >= COPIED_FROM
    default = all_are and worth and crowded and target.has_wgmma and tile.queries >= GROUP_ROWS
    return {"descriptors": (default, not default)}


def described_tiles(nest: LoopNest, target: Target, found: Roles) -> tuple[tuple[str, ...], bool]:
    """The arrays whose tiles of keys the tensor memory accelerator may copy, and whether those are all that products
    read along the keys. Which loads of them are of whole tiles, the emitter sees."""
    if not target.has_tma:
        return (), False
    by_name = {b.name: b for b, _ in blocks(nest)}
    named: dict[str, bool] = {}
    for block in (by_name[name] for name in (*found.products, *found.states)):
        features = {a.var for a in block.axes if a.var not in {*found.rows, found.keys}}
        for ld in block.reads:
            moving = {s for i in ld.indices if not is_value(i) for s in i.free_symbols}
            if found.keys in moving and moving & features:
                named[ld.buffer] = named.get(ld.buffer, True) and in_aligned_rows(nest, ld, features)
    return tuple(name for name, fits in named.items() if fits), all(named.values())


def _half(nest: LoopNest, target: Target, found: Roles) -> DType | None:
    """The half type of the values, in which the tensor cores take the weights too; None where they are wider, or of a
    type that those do not multiply."""
    state = next(b for b, _ in blocks(nest) if b.name == found.state)
    (update,) = state.body
    assert isinstance(update, Update)
    vector = vector_of(update.values[-1], found.width, found.rows)
    if isinstance(vector, Cast) and vector.value.dtype.is_half and vector.dtype is DType.FLOAT32:
        return vector.value.dtype if target.multiplies(vector.value.dtype) else None
    return None


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = roles(schedule.nest)
    assert found is not None
    half = _half(schedule.nest, target, found)
    once = read_across(schedule.nest, found) if params.get("one_load") else ()
    described = described_tiles(schedule.nest, target, found)[0] if params.get("descriptors") else ()
    copies = copy_queries(schedule, found)
    inner = tile_programs(schedule, found, int(params["queries"]), int(params["keys"]))
    for name in copies:
        schedule.compute_at(name, schedule.get_loops(found.state)[0])
    steps = _steps(schedule, found, inner, "exp2" if half is None else "exp2_approx")
    product = steps[7]
    for name in schedule.get_blocks():
        tile_lanes(schedule, name, found, copies)
    for name in (*found.products, product):
        schedule.tensorize(name, "dot")
    if half is not None:
        schedule.annotate(product, OPERANDS, half.value)
    for name in once:
        schedule.annotate("", TRANSPOSED.key(name), True)
    for name in described:
        schedule.annotate("", DESCRIPTOR.key(name), True)
    schedule.annotate(inner, NUM_STAGES, int(params["stages"]))
    # Threads that multiply by themselves have no registers for what two loops keep.
    matrices = not by_threads(target, half is not None)
    if matrices and schedule.nest.symbols.hint(schedule.extent(inner)) >= FULL_TILES_FROM:
        schedule.annotate(inner, FULL_TILES, True)
    schedule.annotate("", NUM_WARPS, int(params["warps"]))
    schedule.annotate("", NUM_STAGES, int(params["stages"]))


def _steps(schedule: Schedule, found: Roles, inner: str, power: str) -> tuple[str, ...]:
    """The steps of the online softmax, in powers of two and without the tiles that positions prove empty where rows of
    nothing allow it."""
    forms = (
        [(True, power), (False, power), (False, "exp")]
        if schedule.extent(inner) != 1
        else [(False, power), (False, "exp")]
    )
    for skip, exponential in forms[:-1]:
        try:
            return schedule.decompose_online(found.state, inner, skip, exponential)
        except ScheduleError:
            pass
    return schedule.decompose_online(found.state, inner)


def copy_queries(schedule: Schedule, found: Roles) -> dict[str, int]:
    """Copies of what a product reads for a whole tile of queries: they are loaded once, before the loop over keys.

    By name, which of its axes goes along the queries.
    """
    inputs = {p.name for p in schedule.nest.params} - set(schedule.nest.outputs)
    copies = {}
    for name in found.products:
        own = {a.var: a for a in schedule.block(name).axes}
        for buffer in dict.fromkeys(ld.buffer for ld in schedule.block(name).reads):
            sites = [ld for ld in schedule.block(name).reads if ld.buffer == buffer]
            plain = all(i in own or (not is_value(i) and not i.free_symbols) for ld in sites for i in ld.indices)
            moving = {i for ld in sites for i in ld.indices}
            if buffer in inputs and plain and found.queries in moving and found.keys not in moving:
                copies[schedule.cache_read(name, buffer)] = sites[0].indices.index(found.queries)
    return copies


def _moving(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    """The loops that an axis of a block moves with, outermost first."""
    b = schedule.block(block)
    names = {s.name for a, e in zip(b.axes, b.bindings, strict=True) if a.var == axis for s in e.free_symbols}
    return [lp for lp in schedule.get_loops(block) if lp in names]


def tile_programs(schedule: Schedule, found: Roles, queries: int, keys: int) -> str:
    """All blocks in programs of one tile of queries; those that see keys in one loop over tiles of them, its name."""
    order = [v for v in found.rows if v != found.queries]
    heads: list[list[str]] = []
    for name in (*found.prologues, *found.products, *found.edits, *found.states, *found.results):
        (row,) = _moving(schedule, name, found.queries)
        head, _ = schedule.split(row, [None, queries])
        outer = [*(x for v in order for x in _moving(schedule, name, v)), head]
        column = _moving(schedule, name, found.keys)
        if column:
            outer.append(schedule.split(column[0], [None, keys])[0])
        schedule.reorder(*outer, *(x for x in schedule.get_loops(name) if x not in outer))
        heads.append(outer)
    first = merge_paths(schedule, heads)
    program = fused(schedule, first[: len(order) + 1])
    assert program is not None
    schedule.bind(program, "blockIdx.x")
    return first[len(order) + 1]


def tile_lanes(schedule: Schedule, block: str, found: Roles, copies: Mapping[str, int]) -> None:
    """The loops of one block inside a tile: rows first, then one axis of columns, then what is summed."""
    alone = [lp for lp in schedule.get_loops(block) if _holds_one(schedule, lp, block)]
    rows = [lp for lp in _moving(schedule, block, found.queries) if lp in alone]
    if block in copies:  # its axes are those of the buffer, of which other rows are one place
        along = schedule.block(block).axes[copies[block]].var
        rows = [lp for lp in _moving(schedule, block, along) if lp in alone]
        alone = [lp for lp in alone if lp in rows or schedule.extent(lp) != 1]
    wide = [lp for v in found.width for lp in _moving(schedule, block, v) if lp in alone]
    others = [lp for lp in alone if lp not in (*rows, *wide)]
    order = [*rows, *wide, *others]
    if len(order) > 1:
        schedule.reorder(*order)
    for lp in order:
        size = next_power(max(int(schedule.extent(lp)), LEAST_WIDTH))
        _, lane = cut(schedule, lp, size)
        tile(schedule, lane)


def _holds_one(schedule: Schedule, loop: str, block: str) -> bool:
    return [b for b in schedule.get_blocks() if loop in schedule.get_loops(b)] == [block] and str(
        schedule.loop(loop).kind.value
    ) == "serial"


GPU_ATTENTION = Rule(
    "gpu_attention", GPUS, _matches, _parameters, _apply, can=frozenset({Capability.ATTENTION, Capability.FIRST_ROWS})
)
