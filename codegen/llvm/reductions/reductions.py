"""Reductions: accumulators made where a reduction begins, updated at each step, joined and written where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Load
from ....ir.nest.hints import CASCADE, CHAIN
from ....ir.nest.loops import AxisKind, Block, Bound, Loop, LoopKind, Update
from ...kernel import EmitError
from ..functions.functions import apply
from ..memory.access import bound_mask, load, store
from ..memory.index import scalar_index
from ..memory.scatter import checked
from ..memory.values import evaluate, index_values
from ..text.builder import Val
from ..text.context import Context, Mask, conjunction
from ..text.control import runtime_loop
from .accumulators import (
    Accumulator,
    Reduced,
    clear,
    combined,
    element,
    first_index,
    halved,
    horizontal,
    identity,
    make_slot,
    position,
    read,
    spatial_vars,
    varying,
)
from .factor import factored
from .integers import gathered, with_integers
from .scans import prefix

# Past this many bytes accumulators no longer stay in the first-level cache: the targets themselves are updated.
_LARGEST = 1 << 15
# The same of those that wait while others sum a part of the terms. A stack of 128 KiB has room for them and the locals.
_LARGEST_WAITING = 3 << 15


def begin(ctx: Context, reduced: Reduced, loop: Loop) -> list[Accumulator] | None:
    """Make and clear the accumulators of a block whose reduction starts at ``loop``; None.

    Update the targets in memory.
    """
    inside = reduced.path[reduced.path.index(loop) :]
    spatial = spatial_vars(reduced.block)
    across = next((lp for lp in inside if lp.kind is LoopKind.VECTORIZED and lp.var in reduced.vars), None)
    vector = across or next((lp for lp in reduced.path if lp.kind is LoopKind.VECTORIZED), None)
    dims = []
    for lp in inside:
        if lp is vector or (lp.var not in spatial and not _is_interleaved(lp, reduced)):
            continue
        if not lp.extent.is_Integer or (lp.var in spatial and lp.var in reduced.vars):
            return None
        dims.append(lp)
    lanes = int(vector.extent) if vector else 0
    result = []
    for k, statement in enumerate(reduced.block.body):
        if isinstance(statement, Update):
            varies = varying(ctx, reduced, statement, vector.var if vector else None)
            values, factor = factored(reduced.block, statement.monoid, statement.values, loop, inside)
            if reduced.block.is_scan:
                varies = [vector is not None and across is None] * len(statement.values)
                values, factor = statement.values, None
            first = first_index(ctx, reduced, statement, [lp for lp in inside if lp is not across and lp not in dims])
            acc = Accumulator(
                reduced.block, statement, (), tuple(dims), reduced.vars, across, vector, values=values, factor=factor,
                first=first,
            )  # fmt: skip
            if acc.size * max(lanes, 1) * 8 * len(varies) > (
                _LARGEST_WAITING if _wait(inside, dims, reduced) else _LARGEST
            ):
                return None
            slots = [
                make_slot(ctx, acc.size, value.dtype, lanes if v else 0)
                for value, v in zip(statement.values, varies, strict=True)
            ]
            acc = with_integers(ctx, reduced, replace(acc, slots=tuple(slots)), inside)
            clear(ctx, acc)
            ctx.accumulators[reduced.block.name, k] = acc
            result.append(acc)
    return result


def _wait(inside: tuple[Loop, ...], dims: list[Loop], reduced: Reduced) -> bool:
    """Whether only some accumulators at a time are added to, by a loop that sums by itself."""
    alone = next((k for k, lp in enumerate(inside) if CASCADE.of(lp) and lp.var in reduced.vars), 0)
    return any(lp is d for lp in inside[:alone] for d in dims)


def _is_interleaved(loop: Loop, reduced: Reduced) -> bool:
    """Whether each copy of an unrolled loop keeps a partial state; with the hint ``CHAIN`` they share one."""
    if reduced.block.is_scan:
        return False
    return loop.var in reduced.vars and loop.kind is LoopKind.UNROLLED and not CHAIN.of(loop)


def begin_cascade(ctx: Context, reduced: Reduced, loop: Loop) -> list[tuple[Accumulator, Accumulator]]:
    """Accumulators for one run of ``loop`` inside the reduction.

    Pairs of what is outside and the cleared ones that replace it.
    """
    pairs = []
    for k, statement in enumerate(reduced.block.body):
        outer = ctx.accumulators.get((reduced.block.name, k))
        if (
            not isinstance(statement, Update)
            or not isinstance(outer, Accumulator)
            or statement.monoid.exact
            or outer.runs_on
            or any(s.lanes != outer.lanes for s in outer.slots)
        ):
            continue
        inside = reduced.path[reduced.path.index(loop) :]
        # A loop between selects among the accumulators outside: those of one of its iterations are needed here.
        dims = tuple(d for d in outer.dims if any(d.var == lp.var for lp in inside))
        own, factor = factored(reduced.block, statement.monoid, outer.values, loop, inside)
        inner = replace(outer, dims=dims, nested=True, values=own, factor=factor)
        inner = replace(inner, slots=tuple(make_slot(ctx, inner.size, s.dtype, s.lanes) for s in outer.slots))
        inner = with_integers(ctx, reduced, inner, inside)
        clear(ctx, inner)
        ctx.accumulators[reduced.block.name, k] = inner
        pairs.append((outer, inner))
    return pairs


def hold(ctx: Context, reduced: Reduced, loop: Loop) -> list[tuple[Accumulator, Accumulator, str]]:
    """Accumulators that one run of ``loop`` updates again and again, in slots of their own, which registers hold.

    What is outside, what replaces it, and its place there: a loop between selects it.
    """
    held = []
    inside = {lp.var for lp in reduced.path[reduced.path.index(loop) :]}
    for k, statement in enumerate(reduced.block.body):
        outer = ctx.accumulators.get((reduced.block.name, k))
        if not isinstance(statement, Update) or not isinstance(outer, Accumulator) or outer.runs_on:
            continue
        if not outer.dims or any(d.var in inside for d in outer.dims):
            continue
        at = position(ctx, outer)
        slots = tuple(make_slot(ctx, 1, s.dtype, s.lanes) for s in outer.slots)
        inner = replace(outer, slots=slots, dims=())
        _copy(ctx, outer, at, inner, "0")
        ctx.accumulators[reduced.block.name, k] = inner
        held.append((outer, inner, at))
    return held


def release(ctx: Context, outer: Accumulator, inner: Accumulator, at: str) -> None:
    """Put back what ``hold`` took."""
    for key, value in ctx.accumulators.items():
        if value is inner:
            ctx.accumulators[key] = outer
    _copy(ctx, inner, "0", outer, at)


def _copy(ctx: Context, source: Accumulator, at: str, target: Accumulator, to: str) -> None:
    for slot, place in zip(source.slots, target.slots, strict=True):
        ctx.b.line(f"store {read(ctx, slot, at)}, ptr {element(ctx, place, to)}")


def finish_cascade(ctx: Context, outer: Accumulator, inner: Accumulator) -> None:
    """Add what one run of the inner loop gathered to the accumulators outside."""
    for key, value in ctx.accumulators.items():
        if value is inner:
            ctx.accumulators[key] = outer
    if inner.factor is None and not inner.whole and len(inner.dims) == len(outer.dims):
        for k in range(outer.size):
            _join(ctx, outer, inner, str(k), str(k))
        return
    with _at_targets(ctx, inner):
        _join_dims(ctx, outer, inner, list(inner.dims))


def _join_dims(ctx: Context, outer: Accumulator, inner: Accumulator, dims: list[Loop]) -> None:
    if not dims:
        _join(ctx, outer, inner, position(ctx, outer), position(ctx, inner))
        return
    with _each(ctx, dims[0]) as positions:
        for value in positions:
            ctx.indices[dims[0].var] = value
            _join_dims(ctx, outer, inner, dims[1:])


def _join(ctx: Context, outer: Accumulator, inner: Accumulator, index: str, own: str) -> None:
    x = [read(ctx, slot, index) for slot in outer.slots]
    y = _whole(ctx, inner, gathered(ctx, inner, own))
    for slot, value in zip(outer.slots, combined(ctx, outer.update, x, y), strict=True):
        ctx.b.line(f"store {ctx.b.splat(value, slot.lanes)}, ptr {element(ctx, slot, index)}")


def for_tail(ctx: Context, acc: Accumulator, native: int) -> Accumulator:
    """The accumulator for a masked part: every component a lane.

    And along the reduction no more lanes than a register has.
    """
    if acc.runs_on:
        return acc
    lanes = acc.lanes
    wanted = lanes
    if (
        acc.across is not None
        and not acc.nested
        and lanes > native
        and lanes % native == 0
        and (lanes // native).bit_count() == 1
    ):
        wanted = native
    if all(slot.lanes == wanted for slot in acc.slots):
        return acc
    slots = tuple(make_slot(ctx, acc.size, s.dtype, wanted) for s in acc.slots)
    for k in range(acc.size):
        state = [ctx.b.splat(read(ctx, slot, str(k)), lanes) for slot in acc.slots]
        width = lanes
        while width > wanted:
            width //= 2
            state = halved(ctx, acc.update, state, width)
        for slot, value in zip(slots, state, strict=True):
            ctx.b.line(f"store {ctx.b.splat(value, wanted)}, ptr {element(ctx, slot, str(k))}")
    vector = acc.vector
    if vector is not None and wanted != lanes:
        vector = replace(vector, extent=sympy.Integer(wanted))
    new = replace(acc, slots=slots, vector=vector, across=vector if acc.across is not None else None)
    for key, value in ctx.accumulators.items():
        if value is acc:
            ctx.accumulators[key] = new
    return new


def update(ctx: Context, block: Block, k: int, statement: Update) -> None:
    """One step: the accumulator (or the targets in memory) combined with the values at this point."""
    acc = ctx.accumulators.get((block.name, k))
    if not isinstance(acc, Accumulator):
        values = [evaluate(ctx, v) for v in statement.values]
        if block.is_scatter:
            _scatter(ctx, statement, values)
        else:
            _update_memory(ctx, block, statement, values)
        return
    values = [evaluate(ctx, v) for v in acc.values]
    index = position(ctx, acc)
    old = [read(ctx, slot, index) for slot in acc.slots]
    mask = _reduction_mask(ctx, acc, block)
    if acc.runs_on and acc.across is not None and ctx.vector is not None:
        _scan_lanes(ctx, acc, mask, index, old, values)
        return
    rule = statement.monoid.follow if acc.first is not None else None
    new = combined(ctx, statement, old, values, statement.monoid.after if acc.runs_on else rule)
    results: list[Val] = []
    for slot, before, after in zip(acc.slots, old, new, strict=True):
        if mask is not None:
            after = ctx.b.select(mask.live, after, before)
        if after.lanes > slot.lanes:
            raise EmitError(
                f"{block.name}: a lane-dependent value in the scalar accumulator of {statement.monoid.name}"
            )
        after = ctx.b.splat(after, slot.lanes)
        ctx.b.line(f"store {after}, ptr {element(ctx, slot, index)}")
        results.append(after)
    if acc.runs_on:
        _make_known(ctx, statement, results)


def _scan_lanes(
    ctx: Context, acc: Accumulator, mask: Mask | None, index: str, old: list[Val], values: list[Val]
) -> None:
    """One step of a scan whose lanes run along it."""
    b = ctx.b
    values = [b.splat(v, ctx.lanes) for v in values]
    if mask is not None:
        neutral = [b.splat(v, ctx.lanes) for v in identity(ctx, acc.update)]
        values = [b.select(mask.live, v, n) for v, n in zip(values, neutral, strict=True)]
    results, new = prefix(ctx, acc.update, old, values)
    for slot, after in zip(acc.slots, new, strict=True):
        b.line(f"store {after}, ptr {element(ctx, slot, index)}")
    _make_known(ctx, acc.update, results)


def _make_known(ctx: Context, statement: Update, state: list[Val]) -> None:
    """What the statements after the update of a scan read: the state so far, which is not in memory yet."""
    for target, value in zip(statement.targets, state, strict=True):
        ctx.stored[target.buffer, target.indices] = value


def _reduction_mask(ctx: Context, acc: Accumulator, block: Block) -> Mask | None:
    """The mask of the predicates along the reduction. Others mask targets, whose dead lanes are never stored."""
    live: Val | None = None
    for bound, original in zip(block.predicate, acc.block.predicate, strict=True):
        if bound not in ctx.assumed and (original.lhs.free_symbols | original.rhs.free_symbols) & acc.reduced:
            mask = bound_mask(ctx, bound)
            live = mask.live if live is None else conjunction(ctx.b, live, mask.live)
    return None if live is None else Mask(live)


def _scatter(ctx: Context, statement: Update, values: list[Val]) -> None:
    """Targets in memory, where data say, combined with what is there."""
    (target,) = statement.targets
    with checked(ctx, target.buffer, target.indices) as places:
        old = load(ctx, target.buffer, target.indices, places)
        (new,) = combined(ctx, statement, [old], values)
        store(ctx, target.buffer, target.indices, places, new)


def _update_memory(ctx: Context, block: Block, statement: Update, values: list[Val]) -> None:
    """Targets in memory: begun where all reduction axes are zero."""
    b = ctx.b
    across = ctx.vector is not None and ctx.vector[0] not in spatial_vars(block)
    if across and block.is_scan:
        raise EmitError(f"{block.name}: lanes along a scan whose states are too many for registers")
    if across:
        assert ctx.vector is not None
        neutral = identity(ctx, statement)
        if ctx.block_mask is not None:
            values = [b.select(ctx.block_mask.live, v, n) for v, n in zip(values, neutral, strict=True)]
        values = horizontal(ctx, statement, [b.splat(v, ctx.lanes) for v in values])
        lane_zero = {ctx.vector[0]: sympy.S.Zero}
    else:
        lane_zero = {}
    first = Val("true" if statement.begins else "false", DType.BOOL)
    for axis, binding in zip(block.axes, block.bindings, strict=True):
        if axis.kind is not AxisKind.SPATIAL and statement.begins:
            here = scalar_index(ctx, sympy.expand(binding.xreplace(lane_zero)))
            first = conjunction(b, first, b.binary("icmp eq", here, b.const(0, DType.INT64), DType.BOOL))
    vector, mask, block_mask = ctx.vector, ctx.mask, ctx.block_mask
    if across:
        ctx.vector = ctx.mask = ctx.block_mask = None
    old = []
    for target, neutral_value in zip(statement.targets, identity(ctx, statement), strict=True):
        current = evaluate(ctx, Load(target.buffer, target.indices, neutral_value.dtype))
        old.append(b.select(first, neutral_value, current) if first.name != "true" else neutral_value)
    for target, value in zip(statement.targets, combined(ctx, statement, old, values), strict=True):
        store(ctx, target.buffer, target.indices, index_values(ctx, target.indices), value)
    ctx.vector, ctx.mask, ctx.block_mask = vector, mask, block_mask


def finish(ctx: Context, acc: Accumulator) -> None:
    """Combine interleaved copies and lanes, and store every target."""
    ctx.accumulators = {k: v for k, v in ctx.accumulators.items() if v is not acc}
    with _at_targets(ctx, acc):
        _finish_dims(ctx, acc, [d for d in acc.dims if d.var not in acc.reduced])


@contextmanager
def _at_targets(ctx: Context, acc: Accumulator) -> Iterator[None]:
    """Where the targets are: lanes over them, or none where lanes ran along the reduction."""
    old_axes, old_vector, old_block = ctx.axes, ctx.vector, ctx.block
    old_mask, old_block_mask, old_extents = ctx.mask, ctx.block_mask, ctx.extents
    ctx.axes = dict(zip((a.var for a in acc.block.axes), acc.block.bindings, strict=True))
    inside = (*acc.dims, *([acc.vector] if acc.vector is not None else ()))
    ctx.extents = {**ctx.extents, **{lp.var: lp.extent for lp in inside}}
    ctx.block = acc.block
    if acc.across is not None:
        ctx.vector = None
    elif acc.vector is not None:  # lanes over targets
        ctx.vector = (acc.vector.var, acc.lanes)
    yield
    ctx.axes, ctx.vector, ctx.block = old_axes, old_vector, old_block
    ctx.mask, ctx.block_mask, ctx.extents = old_mask, old_block_mask, old_extents
    ctx.values = {}


@contextmanager
def _each(ctx: Context, loop: Loop) -> Iterator[list[Val]]:
    """The values of a loop over targets: all of them where it is written out, else that of a loop at run time."""
    if loop.kind is LoopKind.UNROLLED or int(loop.extent) == 1:
        yield [ctx.b.const(k, DType.INT64) for k in range(ctx.copies.get(loop.var, int(loop.extent)))]
    else:
        with runtime_loop(ctx, "0", str(loop.extent)) as name:
            yield [Val(name, DType.INT64)]
    ctx.indices.pop(loop.var, None)  # written out, a loop may have no value


def _finish_dims(ctx: Context, acc: Accumulator, dims: list[Loop]) -> None:
    if not dims:
        _finish_one(ctx, acc)
        return
    loop, *rest = dims
    with _each(ctx, loop) as positions:
        for value in positions:
            ctx.indices[loop.var] = value
            _finish_dims(ctx, acc, rest)


def _live(ctx: Context, acc: Accumulator) -> Mask | None:
    """The targets that exist."""
    live: Mask | None = None
    for bound in acc.block.predicate:
        names = bound.lhs.free_symbols | bound.rhs.free_symbols
        if bound not in ctx.assumed and not names & acc.reduced:
            mask = bound_mask(ctx, bound)
            live = mask if live is None else Mask(conjunction(ctx.b, live.live, mask.live))
    return live


def _whole(ctx: Context, acc: Accumulator, state: list[Val]) -> list[Val]:
    """A state times the factor that its terms have in common."""
    if acc.factor is None:
        return state
    ctx.mask = ctx.block_mask = _live(ctx, acc)
    ctx.values = {}
    factor = evaluate(ctx, acc.factor)
    return [apply(ctx.b, "mul", (v, factor), v.dtype) for v in state]


def _finish_one(ctx: Context, acc: Accumulator) -> None:
    states = []
    interleaved = [d for d in acc.dims if d.var in acc.reduced]
    for choice in _choices(interleaved):
        for var, k in choice.items():
            ctx.indices[var] = ctx.b.const(k, DType.INT64)
        states.append(gathered(ctx, acc, position(ctx, acc)))
        for var in choice:
            del ctx.indices[var]
    while len(states) > 1:  # as a tree: shorter chains, smaller errors
        pairs = [combined(ctx, acc.update, x, y) for x, y in zip(states[::2], states[1::2], strict=False)]
        states = pairs + ([states[-1]] if len(states) % 2 else [])
    (state,) = states
    if acc.across is not None and not acc.runs_on:
        state = horizontal(ctx, acc.update, [ctx.b.splat(v, acc.lanes) for v in state])
    state = _whole(ctx, acc, state)
    ctx.mask = ctx.block_mask = _live(ctx, acc)
    ctx.values = {}
    if acc.first is not None:  # nothing was better than the identity: the first of equals is meant
        none = apply(ctx.b, "eq", (state[-1], identity(ctx, acc.update)[-1]), DType.BOOL)
        for extent in (a.extent for a in acc.block.axes if a.kind is AxisKind.REDUCTION):
            none = conjunction(ctx.b, bound_mask(ctx, Bound(sympy.S.Zero, extent)).live, none)
        state = [*state[:-1], ctx.b.select(none, evaluate(ctx, acc.first), state[-1])]
    if not acc.update.begins:
        places = zip(acc.update.targets, state, strict=True)
        old = [evaluate(ctx, Load(t.buffer, t.indices, v.dtype)) for t, v in places]
        state = combined(ctx, acc.update, old, state)
    for target, value in zip(acc.update.targets, state, strict=True):
        store(ctx, target.buffer, target.indices, index_values(ctx, target.indices), value)


def _choices(loops: list[Loop]) -> Iterator[dict[sympy.Symbol, int]]:
    if not loops:
        yield {}
        return
    first, *rest = loops
    for k in range(int(first.extent)):
        for others in _choices(rest):
            yield {first.var: k, **others}
