"""Attention on CPUs, forward and backward: tiles of queries and keys whose scores stay in cache, lanes along queries.

One iteration of the team is a tile of queries. It goes over tiles of keys: a register-blocked product gives the tile's
scores, laid out with queries innermost, so that maxima and sums over keys are vertical; then one exponential an element
and a register-blocked product with the values. Queries are packed once a tile, transposed; keys and values only where
they are of a half type or do not lie along their vectors.

A backward is the same without an online state: several products make a tile (scores, gradients of weights), and plain
sums over the keys take it up. What is a query there may be a key of the model: the gradients of keys and values are
sums over queries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import sympy

from ....ir.expr.product import weighing
from ....ir.expr.role import Role
from ....ir.expr.value import Expr, Load, is_value, loads
from ....ir.nest.loops import AxisKind, Block, LoopNest, Scope, Update, blocks
from ....ir.target import Target
from ...cost.cpu_kernels import TILE_KEYS, TILE_QUERIES, keys_in_registers
from ...error import ScheduleError
from ...primitives.analysis.tree import linear_part
from ...schedule.schedule import Schedule
from ..registry import Capability, Params, Rule, Value
from .common import merge_paths, values


@dataclass(frozen=True, slots=True)
class Roles:
    """The blocks of an attention nest by what they do, and its axes.

    ``products`` make scores by contraction, ``edits`` are point-wise on scores, ``states`` are what is reduced over
    ``keys``: one online state, or sums (``online`` tells). ``results`` come after them. ``queries`` is the row axis
    along which tiles are taken: neither keys nor values move along it. ``widths`` are, for each state, the axes of
    values alone. ``totals`` sum what edits make over ``summed``, which are rows for everything else.
    ``prologues`` come first and see no keys: they reduce a row's own elements.
    """

    products: tuple[str, ...]
    edits: tuple[str, ...]
    states: tuple[str, ...]
    results: tuple[str, ...]
    rows: tuple[sympy.Symbol, ...]
    queries: sympy.Symbol
    keys: sympy.Symbol
    widths: tuple[tuple[sympy.Symbol, ...], ...]
    online: bool
    totals: tuple[str, ...] = ()
    summed: tuple[sympy.Symbol, ...] = ()
    prologues: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The online state, or the first sum."""
        return self.states[0]

    @property
    def width(self) -> tuple[sympy.Symbol, ...]:
        """The axes of values alone, of all states."""
        return tuple(dict.fromkeys(v for own in self.widths for v in own))


def roles(nest: LoopNest) -> Roles | None:
    """The roles in a nest as lowering left it; None where it is no attention of this form."""
    found = [b for b, _ in blocks(nest)]
    by_role = {role: [b for b in found if b.role is role] for role in Role}
    states = by_role[Role.STATE] or by_role[Role.WEIGHTED_SUM]
    totals = by_role[Role.WEIGHT_TOTAL] if states else []
    states = states or by_role[Role.WEIGHT_TOTAL]
    products, edits, prologues = by_role[Role.SCORE], by_role[Role.WEIGHT], by_role[Role.ROW_TOTAL]
    online = bool(by_role[Role.STATE])
    if any(b.role is None for b in found) or not products or not states or not _plain(found):
        return None
    reduced = {tuple(a.var for a in b.axes_of(AxisKind.REDUCTION)) for b in states}
    if len(reduced) != 1 or len(over := next(iter(reduced))) != 1:
        return None
    (keys,) = over
    spatial = [tuple(a.var for a in b.axes_of(AxisKind.SPATIAL)) for b in states]
    scored = {a.var for b in (*products, *edits) for a in b.axes_of(AxisKind.SPATIAL)}
    rows = tuple(v for v in spatial[0] if v in scored)
    summed = {tuple(a.var for a in b.axes_of(AxisKind.REDUCTION)) for b in totals}
    if len(summed) > 1 or any(not set(over) <= set(rows) for over in summed) or (totals and online):
        return None
    others = [b for b in found if b not in states and b not in totals]
    if (len(states) > 1 and online) or (prologues and (online or totals)):
        return None
    if any(not set(rows) <= {a.var for a in b.axes} for b in (*states, *others)):
        return None
    features = {v for at in spatial for v in at if v not in rows}
    local = {b.name for b in nest.locals}
    still = {s for b in (*products, *states) for v in _operands(b) for ld in loads(vector_of(v, features, rows))
             if ld.buffer not in local and keys in _moves(ld) for s in _moves(ld)}  # fmt: skip
    extents = {a.var: a.extent for a in states[0].axes}
    over_rows = next(iter(summed), ())
    tiled = [v for v in rows if v not in still and v not in over_rows]
    if not tiled:
        return None
    return Roles(
        tuple(b.name for b in products), tuple(b.name for b in edits),
        tuple(b.name for b in states), tuple(b.name for b in by_role[Role.RESULT]), rows,
        max(tiled, key=lambda v: nest.symbols.hint(extents[v])), keys,
        tuple(tuple(v for v in at if v not in rows) for at in spatial), online,
        tuple(b.name for b in totals), over_rows, tuple(b.name for b in prologues),
    )  # fmt: skip


def vector_of(value: Expr, features: Collection[sympy.Symbol], rows: Collection[sympy.Symbol]) -> Expr:
    """What a state weighs, without weights that each row has of its own, or an operand of a product."""
    return weighing(value, features, rows)[1] if features else value


def _plain(found: list[Block]) -> bool:
    """Every axis has a loop of its own, as lowering makes them."""
    return all(not b.predicate and all(e.is_Symbol for e in b.bindings) for b in found)


def _operands(block: Block) -> tuple[Expr, ...]:
    return tuple(e for s in block.body if isinstance(s, Update) for e in values(s)[-1:])


def _moves(load: Load) -> set[sympy.Symbol]:
    return {s for i in load.indices if not is_value(i) for s in i.free_symbols}


def _matches(nest: LoopNest, target: Target) -> bool:
    found = roles(nest)
    return found is not None and not found.prologues


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return {"queries": TILE_QUERIES, "keys": TILE_KEYS, "registers": keys_in_registers(target.machine)}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = roles(schedule.nest)
    if found is None:
        raise ScheduleError("cpu_attention", "the nest is no attention", schedule.nest)
    lanes = 2 * target.lanes(4)
    rows = int(params["registers"])
    tile, inner = _tiles(schedule, found, lanes, rows, params)
    _pack(schedule, found, tile, inner)
    if found.online:
        _online(schedule, found, inner, lanes, rows)
    else:
        _plain_sums(schedule, found, inner, lanes, rows)
    for name in found.results:
        _innermost(schedule, name, 2 * lanes)


def _online(schedule: Schedule, found: Roles, inner: str, lanes: int, rows: int) -> None:
    """The steps of an online softmax, a tile of keys at a time."""
    try:
        steps = schedule.decompose_online(found.state, inner, skip=True)
    except ScheduleError:
        steps = schedule.decompose_online(found.state, inner)
    _, begin_vector, top, factor, weight, total, running, product, vector_step = steps
    _lay_out(schedule, found)
    for name in found.products:
        _block_registers(schedule, name, found.queries, found.keys, lanes, rows)
    for names in ((*found.edits, top), (weight, total)):
        for name in names:
            _along_queries(schedule, name, found.queries, found.keys, lanes)
        for other in names[1:]:
            _together(schedule, names[0], other)
    for name in (steps[0], factor, running):
        _innermost(schedule, name, lanes)
    if found.width:
        _block_registers(schedule, product, found.width[-1], found.queries, lanes, rows)
    for name in (begin_vector, vector_step):
        _innermost(schedule, name, 2 * lanes)


def _plain_sums(schedule: Schedule, found: Roles, inner: str, lanes: int, rows: int) -> None:
    """Sums over keys that go on from one tile to the next."""
    begins = [schedule.decompose_reduction(name, inner, skip=True) for name in found.states]
    for name in found.totals:
        first = min((x for v in found.summed for x in _loop(schedule, name, v)), key=schedule.get_loops(name).index)
        begins.append(schedule.decompose_reduction(name, first))
    _lay_out(schedule, found)
    for name in found.products:
        _block_registers(schedule, name, found.queries, found.keys, lanes, rows)
    for name in (*found.edits, *found.totals):
        _along_queries(schedule, name, found.queries, found.keys, lanes)
    for other in (*found.edits[1:], *found.totals):
        _together(schedule, found.edits[0], other)
    for name, width in zip(found.states, found.widths, strict=True):
        if width:
            _block_registers(schedule, name, width[-1], found.queries, lanes, rows)
    for name in begins:
        _innermost(schedule, name, 2 * lanes)


def _loop(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    """The loops that an axis of a block moves with, outermost first."""
    b = schedule.block(block)
    names = {s.name for a, e in zip(b.axes, b.bindings, strict=True) if a.var == axis for s in e.free_symbols}
    return [lp for lp in schedule.get_loops(block) if lp in names]


def _tiles(schedule: Schedule, found: Roles, lanes: int, rows: int, params: Params) -> tuple[str, str]:
    """All blocks under loops over tiles of queries, and those that see keys under one over tiles of keys.

    Rows that a total sums up are gone through, one after the other, for each tile of queries. Returns the loop in which
    a tile of one row is and the one over its keys.
    """
    extents = {a.var: a.extent for a in schedule.block(found.state).axes}
    sides = {}
    for axis, unit, key in ((found.queries, lanes, "queries"), (found.keys, rows, "keys")):
        extent = extents[axis]
        sides[axis] = most = int(params[key]) // unit * unit or unit
        if extent.is_Integer and extent > 0:  # tiles of one size, as far as whole registers allow
            count = -(-int(extent) // most)
            sides[axis] = -(-int(extent) // (count * unit)) * unit
    everyone = (*found.products, *found.edits, *found.states, *found.totals, *found.results)
    order = [v for v in found.rows if v != found.queries and v not in found.summed]
    heads: list[list[str]] = []
    for name in schedule.get_blocks():
        assert name in everyone
        over = {a.var for a in schedule.block(name).axes}
        (loop,) = _loop(schedule, name, found.queries)
        head, _ = schedule.split(loop, [None, sides[found.queries]])
        outer = [*(x for v in order for x in _loop(schedule, name, v)), head]
        outer += [x for v in found.summed for x in _loop(schedule, name, v)]
        if found.keys in over:
            (loop,) = _loop(schedule, name, found.keys)
            outer.append(schedule.split(loop, [None, sides[found.keys]])[0])
        schedule.reorder(*outer, *(x for x in schedule.get_loops(name) if x not in outer))
        heads.append(outer)
    first = merge_paths(schedule, heads)
    team = schedule.fuse(*first[: len(order) + 1])
    schedule.parallel(team)
    summed = first[len(order) + 1 : -1]
    return (summed[-1] if summed else team), first[-1]


def _pack(schedule: Schedule, found: Roles, tile: str, inner: str) -> None:
    """Queries transposed once a tile; keys and values as float where the machine cannot use them as they lie."""
    inputs = {p.name for p in schedule.nest.params} - set(schedule.nest.outputs)
    widths = dict(zip(found.states, found.widths, strict=True))
    for name in (*found.products, *found.states):
        block = schedule.block(name)
        (update,) = block.body
        own = widths.get(name, ())
        for load in dict.fromkeys(ld for v in values(update) for ld in loads(vector_of(v, own, found.rows))):
            axes = [a.var for a in block.axes if a.var in _moves(load)]
            if load.buffer not in inputs or not axes:  # what one element gives everywhere lies well as it is
                continue
            by_tile = found.keys not in axes
            last = found.queries if by_tile and found.queries in axes else axes[-1]
            if widths.get(name):
                last = widths[name][-1]
            if not by_tile and not load.dtype.is_half and _contiguous(schedule.nest, load, last):
                continue
            order = [v.name for v in axes if v != last] + [last.name]
            try:
                copy = schedule.pack(name, load.buffer, order)
                schedule.compute_at(copy, tile if by_tile else inner)
            except ScheduleError:
                continue
            _innermost(schedule, copy, 16, transposed=by_tile)


def _contiguous(nest: LoopNest, load: Load, axis: sympy.Symbol) -> bool:
    buffer = nest.buffer(load.buffer)
    offset = sympy.expand(
        sympy.Add(*(i * s for i, s in zip(load.indices, buffer.strides, strict=True) if not is_value(i)))
    )
    part = linear_part(offset, axis)
    return part is not None and part[0] == 1


def _lay_out(schedule: Schedule, found: Roles) -> None:
    """Scores and weights with queries innermost."""
    for buffer in schedule.nest.locals:
        if buffer.scope is not Scope.LOCAL:
            continue
        for block in schedule.get_blocks():
            place = next((w for w in schedule.block(block).writes if w.buffer == buffer.name), None)
            if place is None or found.queries not in place.indices:
                continue
            at = place.indices.index(found.queries)
            columns = {a.var for a in schedule.block(block).axes} & {*found.width}
            if at != len(place.indices) - 1 and not columns:
                rest = [k for k in range(len(place.indices)) if k != at]
                schedule.reorder_storage(buffer.name, [*rest, at])
            break


def _block_registers(
    schedule: Schedule, block: str, lanes_axis: sympy.Symbol, rows_axis: sympy.Symbol, lanes: int, rows: int
) -> None:
    """A product with ``rows`` x ``lanes`` accumulators in registers, and its reduction just outside of them."""
    (along,) = _inside(schedule, block, lanes_axis)
    (across,) = _inside(schedule, block, rows_axis)
    outer_lanes, vector = _split(schedule, along, lanes)
    outer_rows, copies = _split(schedule, across, rows)
    heads = [*outer_lanes, *outer_rows]
    used = {*heads, vector, copies}
    loops = [
        x for x in schedule.get_loops(block) if schedule.get_loops(block).index(x) >= _depth(schedule, block, used)
    ]
    reduced = [x for x in loops if x not in used]
    schedule.reorder(*heads, *reduced, copies, vector)
    schedule.unroll(copies)
    schedule.vectorize(vector)


def _depth(schedule: Schedule, block: str, used: set[str]) -> int:
    loops = schedule.get_loops(block)
    alone = len(loops)
    for k in reversed(range(len(loops))):
        if len([b for b in schedule.get_blocks() if loops[k] in schedule.get_loops(b)]) > 1:
            break
        alone = k
    return alone


def _split(schedule: Schedule, loop: str, width: int) -> tuple[list[str], str]:
    extent = schedule.extent(loop)
    if extent.is_Integer and int(extent) <= width:
        return [], loop
    outer, inner = schedule.split(loop, [None, width])
    return [outer], inner


def _inside(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    """The loops of an axis that hold this block alone."""
    alone = schedule.get_loops(block)[_depth(schedule, block, set()) :]
    return [x for x in _loop(schedule, block, axis) if x in alone]


def _along_queries(schedule: Schedule, block: str, queries: sympy.Symbol, keys: sympy.Symbol, lanes: int) -> None:
    """Lanes along queries, keys one after the other."""
    (along,) = _inside(schedule, block, queries)
    over = _inside(schedule, block, keys) or [
        x for x in schedule.get_loops(block)[_depth(schedule, block, set()) :] if x != along
    ]
    outer, vector = _split(schedule, along, lanes)
    schedule.reorder(*outer, *over, vector)
    schedule.vectorize(vector)


def _together(schedule: Schedule, first: str, second: str) -> None:
    """Two blocks in one visit of the tile, as far as their loops are alike."""
    for a, b in zip(schedule.get_loops(first), schedule.get_loops(second), strict=False):
        if a != b:
            try:
                schedule.merge(a, b)
            except ScheduleError:
                return


def _innermost(schedule: Schedule, block: str, lanes: int, transposed: bool = False) -> None:
    loops = schedule.get_loops(block)
    if not loops or _depth(schedule, block, set()) == len(loops):
        return
    outer, vector = _split(schedule, loops[-1], lanes)
    if transposed and len(loops) > 1 and loops[-2] in loops[_depth(schedule, block, set()) :]:
        across, copies = _split(schedule, loops[-2], 8)
        schedule.reorder(*outer, *across, copies, vector)
        schedule.unroll(copies)
    if int(schedule.extent(vector)) > 1:
        schedule.vectorize(vector)


CAN = frozenset({Capability.ATTENTION, Capability.SHARED_TOTALS})
CPU_ATTENTION = Rule("cpu_attention", ("cpu",), _matches, _parameters, _apply, can=CAN)
