"""Loops and blocks: counting loops, lanes, unrolled copies, and predicates peeled into a last, masked part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import expanded
from ...ir.expr.value import symbol
from ...ir.nest.hints import CASCADE, HOLD, PREFETCH, PREFETCH_STORES, Hint
from ...ir.nest.loops import Block, Bound, Loop, LoopKind, Node, Store, Update, map_nodes, walk_nodes
from ..kernel import EmitError
from .dots import dot_tile, emit_dot
from .gemm import emit_gemm, gemm_tile
from .memory.access import bound_mask, store
from .memory.index import in_loops, scalar_index, split_linear
from .memory.interleaved import weaves
from .memory.limits import Remainder, blocks_inside, iterations_above, limited, remainder, smax, smin, steady
from .memory.scatter import checked
from .memory.values import evaluate
from .reductions import reductions
from .reductions.accumulators import Accumulator, Reduced
from .reductions.empty import without_elements
from .text.builder import Val
from .text.context import Context, Mask, conjunction
from .text.control import branch, runtime_loop

I64, BOOL = DType.INT64, DType.BOOL
# Called for a parallel loop: writes the team's function and the call of it. None inside one.
Region = Callable[[Context, Loop], None]


@dataclass(slots=True)
class Nest:
    """What is known of the whole nest: reductions by block, and what to do at a parallel loop."""

    reductions: dict[str, Reduced]
    region: Region | None = None


def emit_nodes(ctx: Context, nest: Nest, nodes: tuple[Node, ...]) -> None:
    """Loops and blocks in order."""
    for node in nodes:
        if isinstance(node, Block):
            _block(ctx, nest, node)
        else:
            _loop(ctx, nest, node)


def _loop(ctx: Context, nest: Nest, loop: Loop) -> None:
    if loop.kind.value.startswith(("blockIdx", "threadIdx")):
        raise EmitError(f"{ctx.nest.name}: loop {loop.var} is bound to {loop.kind.value}, which a CPU does not have")
    if loop.kind is LoopKind.PARALLEL and nest.region is not None:
        if _starting(nest, loop) or ctx.accumulators:
            raise EmitError(
                f"{ctx.nest.name}: the reduction over or around the parallel loop {loop.var} would race; "
                "rfactor it first"
            )
        nest.region(ctx, loop)
        return
    if (tile := gemm_tile(loop)) is not None:
        emit_gemm(ctx, *tile)
        return
    if (dots := dot_tile(loop)) is not None:
        emit_dot(ctx, dots)
        return
    copies = ctx.copies.get(loop.var)
    high = Val(str(copies), I64) if copies is not None else scalar_index(ctx, in_loops(ctx, loop.extent))
    run_loop(ctx, nest, loop, Val("0", I64), high)


def run_loop(ctx: Context, nest: Nest, loop: Loop, low: Val, high: Val) -> None:
    """One loop over ``low <= var < high`` with the reductions that start at it."""
    started = []
    for reduced in _starting(nest, loop):
        accumulators = reductions.begin(ctx, reduced, loop)
        if accumulators is None:  # the first iteration begins the targets in memory; there may be none
            emit_nodes(ctx, nest, without_elements(ctx, reduced, loop))
        started += accumulators or []
    cascades = [c for r in _noted(nest, loop, CASCADE) for c in reductions.begin_cascade(ctx, r, loop)]
    started += [inner for _, inner in cascades]
    holds = [h for r in _noted(nest, loop, HOLD) for h in reductions.hold(ctx, r, loop)]
    ctx.extents[loop.var] = loop.extent
    around = ctx.ahead, ctx.ahead_of_stores
    ahead, of_stores = PREFETCH.found(loop), PREFETCH_STORES.found(loop)
    ctx.ahead = ctx.ahead if ahead is None else ahead
    ctx.ahead_of_stores = ctx.ahead_of_stores if of_stores is None else of_stores
    match loop.kind:
        case LoopKind.VECTORIZED if ctx.vector is None:
            _lanes(ctx, nest, loop)
        case LoopKind.VECTORIZED | LoopKind.UNROLLED:
            _unrolled(ctx, nest, loop)
        case _:
            started = _counted(ctx, nest, loop, low, high, started)
    del ctx.extents[loop.var]
    ctx.ahead, ctx.ahead_of_stores = around
    for taken, held, at in holds:
        reductions.release(ctx, taken, held, at)
    inner = len(started) - len(cascades)
    for acc in started[:inner]:
        reductions.finish(ctx, acc)
    for (outer, _), acc in zip(cascades, started[inner:], strict=True):
        reductions.finish_cascade(ctx, outer, acc)


def _noted(nest: Nest, loop: Loop, hint: Hint[bool]) -> list[Reduced]:
    """The reductions that go on outside of a loop with such a hint.

    ``cascade``: they sum this loop by itself before they add it to what is outside; shorter sums, smaller errors.
    ``hold``: they keep in registers what this loop updates, where it is one of many.
    """
    if not hint.of(loop):
        return []
    found = (nest.reductions[n.name] for n in blocks_inside(loop) if n.name in nest.reductions)
    return [r for r in found if loop.var in r.vars and r.outermost is not None and r.outermost.var != loop.var]


def _starting(nest: Nest, loop: Loop) -> list[Reduced]:
    names = [n.name for n, _ in walk_nodes(loop.body) if isinstance(n, Block)]
    found = (nest.reductions[n] for n in names if n in nest.reductions)
    return [r for r in found if r.outermost is not None and r.outermost.var == loop.var]


def _constant_extent(ctx: Context, loop: Loop) -> int:
    if not loop.extent.is_Integer:
        raise EmitError(
            f"{ctx.nest.name}: the {loop.kind.value} loop {loop.var} has the extent {loop.extent}; "
            "split it by a constant first"
        )
    return int(loop.extent)


def _lanes(ctx: Context, nest: Nest, loop: Loop) -> None:
    extent = _constant_extent(ctx, loop)
    native = ctx.target.lanes(4)
    if extent == 1:
        _unrolled(ctx, nest, loop)
    elif (live := _known_lanes(ctx, loop)) is not None:
        _part_lanes(ctx, nest, loop, live, native)
    elif extent > native and extent % native == 0 and (masks := _lane_masks(ctx, loop)) and _may_narrow(ctx, loop):
        _narrow_lanes(ctx, nest, loop, native, masks)
    else:
        _vector(ctx, nest, loop, extent)


def _vector(ctx: Context, nest: Nest, loop: Loop, lanes: int) -> None:
    ctx.vector = (loop.var, lanes)
    ctx.values = {}
    emit_nodes(ctx, nest, loop.body)
    ctx.vector = None
    ctx.values = {}


def _lane_masks(ctx: Context, loop: Loop) -> set[Bound]:
    """The predicates inside that mask lanes here."""
    return {
        bound
        for block in blocks_inside(loop)
        for bound in block.predicate
        if bound not in ctx.assumed and loop.var in bound.lhs.free_symbols | bound.rhs.free_symbols
    }


def _may_narrow(ctx: Context, loop: Loop) -> bool:
    """Accumulators of blocks inside have the lanes of one register, or there are none."""
    names = {b.name for b in blocks_inside(loop)}
    live = [a for (name, _), a in ctx.accumulators.items() if name in names]
    return all(isinstance(a, Accumulator) and _fits(a, ctx.target.lanes(4)) for a in live)


def _fits(acc: Accumulator, lanes: int) -> bool:
    # A scan along its lanes has one state, whatever their number.
    return acc.lanes == lanes or (acc.runs_on and acc.across is not None)


def _known_lanes(ctx: Context, loop: Loop) -> int | None:
    """How many of the first lanes are live where that is known here: the tail of a loop of constant length."""
    inside = blocks_inside(loop)
    masks = _lane_masks(ctx, loop)
    if not masks or any(b.is_reduction or not masks <= set(b.predicate) for b in inside):
        return None
    here = {var: sympy.Integer(int(v.name)) for var, v in ctx.indices.items() if v.is_literal}
    live = int(loop.extent)
    for bound in masks:
        parts = split_linear(expanded((bound.rhs - bound.lhs).xreplace(here)), loop.var)
        if parts is None or parts[1] != -1 or not parts[0].is_Integer:
            return None
        live = min(live, int(parts[0]))
    return max(live, 0)


def _part_lanes(ctx: Context, nest: Nest, loop: Loop, live: int, native: int) -> None:
    """So many lanes and no mask: whole registers first, then what is left of one. Masked stores cost far more."""
    assumed = ctx.assumed
    ctx.assumed = assumed | _lane_masks(ctx, loop)
    whole = live // native * native
    for first, lanes in ((0, whole), (whole, live - whole)):
        if lanes == 0:
            continue
        lane = symbol(f"{loop.var.name}_lane")
        body, moved = _rebound(ctx, loop, first + lane)
        before = ctx.assumed
        ctx.assumed = before | moved
        part = Loop(lane, sympy.Integer(lanes), body, LoopKind.VECTORIZED)
        ctx.extents[lane] = part.extent
        if lanes == 1:
            _unrolled(ctx, nest, part)
        else:
            _vector(ctx, nest, part, lanes)
        ctx.assumed = before
        del ctx.extents[lane]
    ctx.assumed = assumed


def _rebound(ctx: Context, loop: Loop, value: sympy.Expr) -> tuple[tuple[Node, ...], frozenset[Bound]]:
    """The body of a loop with another value in its variable's place, and what is assumed, in the new variables."""
    mapping = {loop.var: value}

    def moved(bound: Bound) -> Bound:
        return Bound(expanded(bound.lhs.xreplace(mapping)), expanded(bound.rhs.xreplace(mapping)))

    def rebound(node: Node) -> Node | None:
        if not isinstance(node, Block):
            return None
        return replace(
            node,
            bindings=tuple(expanded(e.xreplace(mapping)) for e in node.bindings),
            predicate=tuple(map(moved, node.predicate)),
        )

    return map_nodes(loop.body, rebound), frozenset(map(moved, ctx.assumed))


def _narrow_lanes(ctx: Context, nest: Nest, loop: Loop, native: int, masks: set[Bound]) -> None:
    """A masked part one register at a time: as quick for the few elements that are left, and a fraction of the code."""
    piece, lane = symbol(f"{loop.var.name}_piece"), symbol(f"{loop.var.name}_lane")
    body, moved = _rebound(ctx, loop, piece * native + lane)
    narrow = Loop(lane, sympy.Integer(native), body, LoopKind.VECTORIZED)
    pieces = Loop(piece, sympy.Integer(int(loop.extent) // native), (narrow,))
    high = Val(str(pieces.extent), I64)
    if len(masks) == 1:
        (bound,) = masks
        parts = split_linear(expanded(bound.rhs - bound.lhs), loop.var)
        if parts is not None and parts[1] == -1:  # only as many as have a live lane
            high = smin(ctx, high, iterations_above(ctx, parts[0], native))
    assumed = ctx.assumed
    ctx.assumed = assumed | moved
    ctx.extents |= {piece: pieces.extent, lane: narrow.extent}
    if any(isinstance(s, Store) for block in blocks_inside(pieces) for s in block.body):
        _peeled(ctx, nest, pieces, Val("0", I64), high, [])  # masked stores cost far more than others
    else:
        _range(ctx, nest, pieces, Val("0", I64), high)
    ctx.assumed = assumed
    for var in (piece, lane):  # what is known of streams would not move on with them
        ctx.extents.pop(var, None)


def _unrolled(ctx: Context, nest: Nest, loop: Loop) -> None:
    extent = ctx.copies.get(loop.var) or _constant_extent(ctx, loop)
    if _lane_masks(ctx, loop) and not ctx.accumulators and extent > 1:
        # Copies that each test whether they run at all: a loop does the same in less code.
        _range(ctx, nest, loop, Val("0", I64), Val(str(extent), I64))
        return
    around = ctx.weaving
    ctx.weaving |= weaves(ctx, loop)
    ctx.unrolled[loop.var] = extent
    for k in range(extent):
        _at(ctx, nest, loop, Val(str(k), I64))
    del ctx.unrolled[loop.var]
    ctx.weaving = around


def _at(ctx: Context, nest: Nest, loop: Loop, value: Val) -> None:
    """The body for one value of the loop variable."""
    ctx.indices[loop.var] = value
    ctx.values = {}
    emit_nodes(ctx, nest, loop.body)
    ctx.values = {}
    del ctx.indices[loop.var]


# --- counting loops and peeling ---------------------------------------------------------------------------------------


def _counted(
    ctx: Context, nest: Nest, loop: Loop, low: Val, high: Val, started: list[Accumulator]
) -> list[Accumulator]:
    whole = ctx.assumed
    low, high, limits = limited(ctx, loop, low, high)
    ctx.assumed = whole | limits
    try:
        return _peeled(ctx, nest, loop, low, high, started)
    finally:
        ctx.assumed = whole


def _peeled(
    ctx: Context, nest: Nest, loop: Loop, low: Val, high: Val, started: list[Accumulator], otherwise: bool = False
) -> list[Accumulator]:
    part = steady(ctx, loop, low, high, otherwise)
    if not part.bounds:
        _range(ctx, nest, loop, low, high)
        return started
    assumed = ctx.assumed
    if part.low != low:
        ctx.assumed = assumed | part.tail
        _range(ctx, nest, loop, low, part.low)
    ctx.assumed = assumed | part.bounds
    # A chunk may lie wholly past the limit.
    _range(ctx, nest, loop, part.low, part.high)
    ctx.assumed = assumed
    if part.high == high:
        return started
    last = None if started or ctx.accumulators or high.is_literal else remainder(loop, part)
    if last is not None:
        _cases(ctx, nest, loop, smax(ctx, low, part.high), high, last, part.tail)
        return started
    # Lanes over targets keep their width, and so do those of a reduction that shares their loop.
    inside = {b.name for b in blocks_inside(loop)}
    shared = any(
        isinstance(a, Accumulator) and a.across is None and a.lanes
        for (name, _), a in ctx.accumulators.items()
        if name in inside
    )
    started = [
        reductions.for_tail(ctx, acc, ctx.target.lanes(4) if not shared and _cuts(part.tail, acc) else acc.lanes)
        if part.tail & set(acc.block.predicate)
        else acc
        for acc in started
    ]
    rest = smax(ctx, low, part.high)
    if part.bounds != part.tail and not (otherwise or started or ctx.accumulators):
        return _peeled(ctx, nest, loop, rest, high, started, otherwise=True)
    _range(ctx, nest, loop, rest, high)
    return started


def _cases(ctx: Context, nest: Nest, loop: Loop, last: Val, high: Val, rest: Remainder, tail: frozenset[Bound]) -> None:
    """The last iteration, unless it is of another chunk, for each number of unrolled copies that may be left in it.

    In a case the other copies are not there, where a condition around each would be asked for every term of a sum.
    """
    ctx.indices[loop.var] = last
    left = scalar_index(ctx, in_loops(ctx, rest.left))
    del ctx.indices[loop.var]
    is_here = ctx.b.binary("icmp slt", last, high, BOOL)
    around = ctx.copies, ctx.assumed
    for number in range(1, rest.copies):
        is_case = ctx.b.binary("icmp eq", left, Val(str(number), I64), BOOL)
        with branch(ctx, conjunction(ctx.b, is_here, is_case), _written(loop.body)):
            ctx.copies, ctx.assumed = around[0] | dict.fromkeys(rest.unrolled, number), around[1] | tail
            _at(ctx, nest, loop, last)
            ctx.copies, ctx.assumed = around


def _cuts(tail: frozenset[Bound], acc: Accumulator) -> bool:
    """Whether lanes of an accumulator are masked in a tail; of another loop's tail they are all live, or none."""
    names = {s for bound in tail & set(acc.block.predicate) for s in bound.lhs.free_symbols | bound.rhs.free_symbols}
    return acc.vector is not None and acc.vector.var in names


def _range(ctx: Context, nest: Nest, loop: Loop, low: Val, high: Val) -> None:
    if low.is_literal and high.is_literal:
        if int(high.name) <= int(low.name):
            return
        if int(high.name) == int(low.name) + 1:
            ctx.tiles = {}  # known by the loop's variable, not its value
            _at(ctx, nest, loop, low)
            ctx.tiles = {}
            return
        with runtime_loop(ctx, low.name, high.name, _written(loop.body)) as name:
            _at(ctx, nest, loop, Val(name, I64))
        return
    b = ctx.b
    some = b.binary("icmp slt", low, high, BOOL)
    written = _written(loop.body)
    with branch(ctx, some, written), runtime_loop(ctx, low.name, high.name, written) as name:
        _at(ctx, nest, loop, Val(name, I64))


def _written(nodes: tuple[Node, ...]) -> frozenset[str]:
    return frozenset(w.buffer for node in nodes for n in blocks_inside(node) for w in n.writes)


# --- blocks -----------------------------------------------------------------------------------------------------------


def _block(ctx: Context, nest: Nest, block: Block) -> None:
    ctx.axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    ctx.block = block
    ctx.values = {}
    condition, mask = _predicate(ctx, block)
    ctx.mask = ctx.block_mask = mask
    if condition is None or condition.name == "true":
        _statements(ctx, block)
    elif condition.name != "false":
        with branch(ctx, condition, frozenset(w.buffer for w in block.writes)):
            _statements(ctx, block)
    ctx.axes, ctx.block, ctx.mask, ctx.block_mask = {}, None, None, None
    ctx.values = {}


def _predicate(ctx: Context, block: Block) -> tuple[Val | None, Mask | None]:
    """The predicates that are not known to hold here: what is the same in all lanes, and the lanes' mask."""
    condition: Val | None = None
    mask: Mask | None = None
    for bound in block.predicate:
        if bound in ctx.assumed:
            continue
        part = bound_mask(ctx, bound)
        if not part.live.lanes:
            condition = part.live if condition is None else conjunction(ctx.b, condition, part.live)
        else:
            mask = part if mask is None else Mask(conjunction(ctx.b, mask.live, part.live))
    return condition, mask


def _statements(ctx: Context, block: Block) -> None:
    ctx.stored = {}
    for k, statement in enumerate(block.body):
        match statement:
            case Store():
                value = evaluate(ctx, statement.value)
                with checked(ctx, statement.buffer, statement.indices) as places:
                    store(ctx, statement.buffer, statement.indices, places, value)
                ctx.stored = {k: v for k, v in ctx.stored.items() if k[0] != statement.buffer}
                if all(p is None for p in places):
                    ctx.stored[statement.buffer, statement.indices] = value
            case Update():
                reductions.update(ctx, block, k, statement)
    ctx.stored = {}
