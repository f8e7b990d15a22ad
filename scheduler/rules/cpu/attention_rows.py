"""Online attention on CPUs for few rows, as decoding has them: one visit of keys and values, lanes along what lies
together in memory.

There are no tiles of queries to share a tile of keys. A score is a sum along a key, several keys at a time so that
their sums do not wait for one another; weighted values are summed with lanes along their width. Rows that read the same
keys (grouped heads, several tokens) go over a tile of keys while it is in the first-level cache. Where heads are fewer
than a team wants, keys are cut into pieces, each with a state of its own, which the monoid combines at the end: the
split of keys of decoding on GPUs (Dao et al. 2023, "Flash-Decoding").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import sympy

from ....ir.expr.value import Load, is_value, loads
from ....ir.nest.loops import LoopNest, Scope, blocks
from ....ir.target import Target
from ...cost.cpu_kernels import ROWS_KEYS, ROWS_MOST, ROWS_PIECE, ROWS_SHARES, ROWS_SUMS, ROWS_TOGETHER
from ...error import ScheduleError
from ...primitives.analysis.tree import linear_part
from ...schedule.schedule import Schedule
from ..registry import Capability, Params, Rule, Value
from .attention import Roles, roles, vector_of
from .common import merge_paths, values


def few_rows(nest: LoopNest) -> Roles | None:
    """The roles in a nest of attention whose queries are too few for tiles; None where it is none."""
    found = roles(nest)
    if (
        found is None
        or found.prologues
        or not all(nest.symbols.hint(extent) <= ROWS_MOST for extent in _extents(nest, found, _own(nest, found)))
    ):
        return None
    return found


def _own(nest: LoopNest, found: Roles) -> tuple[sympy.Symbol, ...]:
    """The row axes along which keys and values stay the same, that of the queries last."""
    state = next(b for b, _ in blocks(nest) if b.name == found.state)
    products = [b for b, _ in blocks(nest) if b.name in found.products]
    local = {b.name for b in nest.locals}
    still = {
        s
        for b in (*products, state)
        for v in values(b.body[0])
        for ld in loads(vector_of(v, found.width, found.rows))
        if ld.buffer not in local and found.keys in _moves(ld)
        for s in _moves(ld)
    }
    return (*(v for v in found.rows if v not in still and v != found.queries), found.queries)


def _moves(load: Load) -> set[sympy.Symbol]:
    return {s for i in load.indices if not is_value(i) for s in i.free_symbols}


def _extents(nest: LoopNest, found: Roles, axes: tuple[sympy.Symbol, ...]) -> list[sympy.Expr]:
    state = next(b for b, _ in blocks(nest) if b.name == found.state)
    by_axis = {a.var: a.extent for a in state.axes}
    return [by_axis[v] for v in axes]


def _matches(nest: LoopNest, target: Target) -> bool:
    return few_rows(nest) is not None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    found = few_rows(nest)
    assert found is not None
    own = _own(nest, found)
    hint = nest.symbols.hint
    heads = hint(sympy.Mul(*_extents(nest, found, tuple(v for v in found.rows if v not in own))))
    (keys,) = _extents(nest, found, (found.keys,))
    return {
        "keys": ROWS_KEYS,
        "together": ROWS_TOGETHER,
        "piece": tuple(dict.fromkeys((_piece(hint(keys), max(heads, 1), target), 0))),
    }


def _piece(count: int, heads: int, target: Target) -> int:
    """The least keys of a piece such that heads and pieces occupy a team; 0 where heads alone do."""
    team = ROWS_SHARES * target.cores
    if target.cores == 1 or heads >= team or count < 2 * ROWS_PIECE:
        return 0
    return -(-count // min(-(-team // heads), count // ROWS_PIECE))


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    found = few_rows(schedule.nest)
    assert found is not None
    own = _own(schedule.nest, found)
    # A loop of one iteration, fused with another, would hide which of its iterations is which.
    heads = tuple(v for v in found.rows if v not in own and _extents(schedule.nest, found, (v,)) != [1])
    own = (*(v for v in found.rows if v not in (*heads, found.queries)), found.queries)
    lanes = target.lanes(4)
    piece, side = int(params["piece"]), int(params["keys"])
    tile, state = _outer(schedule, found, heads, -(-piece // side), side)
    try:
        steps = schedule.decompose_online(state, tile, skip=True)
    except ScheduleError:
        steps = schedule.decompose_online(state, tile)
    _, begin_vector, top, _, weight, total, _, product, vector_step = steps
    for name in found.products:
        _scores(schedule, name, found, own, lanes, int(params["together"]))
    for name in found.edits:
        _along(schedule, name, found.keys, 2 * lanes)
    for name, wide in ((top, 4), (weight, 2), (total, 4)):
        _along(schedule, name, None, wide * lanes, found.rows)
    if found.width:
        _weighted(schedule, product, found, own, lanes)
        for name in (begin_vector, vector_step):
            _along(schedule, name, found.width[-1], 4 * lanes)
    if piece:
        _combination(schedule, (found.state, *found.results), found, lanes)
    else:
        for name in found.results:
            _along(schedule, name, found.width[-1] if found.width else None, 4 * lanes)


def _outer(schedule: Schedule, found: Roles, heads: tuple[sympy.Symbol, ...], tiles: int, side: int) -> tuple[str, str]:
    """All that sees keys in one loop over tiles of them, and around it heads and pieces for a team.

    The loop, and the block that reduces a piece, of so many ``tiles`` of ``side`` keys; all of them where it is 0.
    """
    everyone = [*found.products, *found.edits, found.state]
    state, paths = found.state, []
    for name in everyone:
        path = [x for v in heads for x in _loop(schedule, name, v)]
        (keys,) = _loop(schedule, name, found.keys)
        path += schedule.split(keys, [None, tiles, side] if tiles else [None, side])[:-1]
        if name == found.state and tiles:
            schedule.reorder(*path[:-1], *(x for x in schedule.get_loops(name) if x not in path[:-1]))
            name = state = schedule.rfactor(path[-2])
        schedule.reorder(*path, *(x for x in schedule.get_loops(name) if x not in path))
        paths.append(path)
    if not tiles:
        for name in found.results:
            path = [x for v in heads for x in _loop(schedule, name, v)]
            schedule.reorder(*path, *(x for x in schedule.get_loops(name) if x not in path))
            paths.append(path)
    first = merge_paths(schedule, paths)
    if len(first) > 1:
        schedule.parallel(schedule.fuse(*first[:-1]) if len(first) > 2 else first[0])
    return first[-1], state


# --- inside a tile ----------------------------------------------------------------------------------------------------


def _scores(
    schedule: Schedule, block: str, found: Roles, own: tuple[sympy.Symbol, ...], lanes: int, together: int
) -> None:
    """A product: sums along several keys at once, or lanes along keys where those lie so."""
    (key,) = _inside(schedule, block, found.keys)
    rows, copies = _rows(schedule, block, found, own)
    summed = [x for x in _alone(schedule, block) if x not in (key, *rows, *copies)]
    if _lies_along(schedule, block, found.keys):
        outer, vector = _split(schedule, key, 4 * lanes)
        order = [*rows, *outer, *summed, *copies, vector]
    else:
        outer, keys = _split(schedule, key, together)
        steps, vector = _split(schedule, summed[-1], lanes if copies else 2 * lanes)
        schedule.unroll(keys)
        order = [*rows, *outer, *summed[:-1], *steps, keys, *copies, vector]
    schedule.reorder(*order)
    for x in copies:
        schedule.unroll(x)
    schedule.vectorize(vector)


def _weighted(schedule: Schedule, block: str, found: Roles, own: tuple[sympy.Symbol, ...], lanes: int) -> None:
    """The product with values: lanes along their width, all rows that read a value beside each other."""
    rows, copies = _rows(schedule, block, found, own)
    (wide,) = _inside(schedule, block, found.width[-1])
    queries = int(schedule.extent(copies[0])) if copies else 1
    outer, vector = _split(schedule, wide, max(ROWS_SUMS // queries, 1) * lanes)
    rest = [x for x in _alone(schedule, block) if x not in (vector, *outer, *rows, *copies)]
    schedule.reorder(*rows, *outer, *rest, *copies, vector)
    for x in copies:
        schedule.unroll(x)
    schedule.vectorize(vector)


def _along(
    schedule: Schedule, block: str, last: sympy.Symbol | None, lanes: int, rows: Sequence[sympy.Symbol] = ()
) -> None:
    """Lanes along one axis of a block, or along what is no row."""
    alone = _alone(schedule, block)
    if last is not None:
        own = _inside(schedule, block, last)
    else:
        own = [x for x in alone if not any(x in _loop(schedule, block, v) for v in rows)]
    if not own or schedule.extent(own[-1]) == 1:
        return
    outer, vector = _split(schedule, own[-1], lanes)
    rest = [x for x in alone if x != own[-1]]
    schedule.reorder(*rest, *outer, vector)
    schedule.vectorize(vector)


def _rows(schedule: Schedule, block: str, found: Roles, own: tuple[sympy.Symbol, ...]) -> tuple[list[str], list[str]]:
    """The loops over rows that read the same keys: those that stay loops, and the one that is written out, if any."""
    loops = [x for v in own for x in _inside(schedule, block, v)]
    if loops and schedule.extent(loops[-1]).is_Integer and schedule.extent(loops[-1]) > 1:
        return loops[:-1], loops[-1:]
    return loops, []


def _combination(schedule: Schedule, ends: Sequence[str], found: Roles, lanes: int) -> None:
    """The states of the pieces combined, with what follows."""
    for level in range(len(found.rows)):
        for first, second in pairwise(ends):
            here, there = schedule.get_loops(first)[level], schedule.get_loops(second)[level]
            if here != there:
                schedule.merge(here, there)
    for name in ends:
        piece = [
            x
            for x in schedule.get_loops(name)
            if x not in {y for v in (*found.rows, *found.width) for y in _loop(schedule, name, v)}
        ]
        loops = [x for x in schedule.get_loops(name) if x not in piece]
        if found.width:
            outer, vector = _split(schedule, loops[-1], 4 * lanes)
            schedule.reorder(*outer, *piece, vector)
            schedule.vectorize(vector)


# --- loops ------------------------------------------------------------------------------------------------------------


def _loop(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    """The loops that an axis of a block moves with, outermost first."""
    b = schedule.block(block)
    names = {s.name for a, e in zip(b.axes, b.bindings, strict=True) if a.var == axis for s in e.free_symbols}
    return [lp for lp in schedule.get_loops(block) if lp in names]


def _alone(schedule: Schedule, block: str) -> list[str]:
    """The loops that hold this block and nothing else."""
    others = {x for b in schedule.get_blocks() if b != block for x in schedule.get_loops(b)}
    return [x for x in schedule.get_loops(block) if x not in others]


def _inside(schedule: Schedule, block: str, axis: sympy.Symbol) -> list[str]:
    alone = _alone(schedule, block)
    return [x for x in _loop(schedule, block, axis) if x in alone]


def _split(schedule: Schedule, loop: str, width: int) -> tuple[list[str], str]:
    extent = schedule.extent(loop)
    if extent.is_Integer and int(extent) <= width:
        return [], loop
    outer, inner = schedule.split(loop, [None, width])
    return [outer], inner


def _lies_along(schedule: Schedule, block: str, axis: sympy.Symbol) -> bool:
    """Whether what a block reads along an axis lies there element by element."""
    for load in schedule.block(block).reads:
        buffer = schedule.nest.buffer(load.buffer)
        if axis in _moves(load) and buffer.scope is Scope.GLOBAL:
            parts = zip(load.indices, buffer.strides, strict=True)
            offset = sympy.expand(sympy.Add(*(i * s for i, s in parts if not is_value(i))))
            part = linear_part(offset, axis)
            return part is not None and part[0] == 1
    return False


CPU_ATTENTION_ROWS = Rule(
    "cpu_attention_rows", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.SPLIT_KEYS})
)
