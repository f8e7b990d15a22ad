"""decompose_online."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.index import simplify
from ....ir.expr.monoid import ATTENTION, LOGSUMEXP, MAX, SUM, lowest
from ....ir.expr.product import weighing
from ....ir.expr.value import Const, Expr, IndexValue, Load, Select, call, const, rewrite, symbol, walk
from ....ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopKind,
    LoopNest,
    Node,
    Scope,
    Statement,
    Store,
    Update,
    blocks,
    contiguous_strides,
    map_nodes,
)
from ...error import ScheduleError
from ..analysis.dependence import accesses, carried, mixed
from ..analysis.empty import Guards, inlined, minus_infinity, occupied, unread_where_empty
from ..analysis.factor import without_factor
from ..analysis.live import LiveEnd, live_ends, opaque_data, with_ends
from ..analysis.region import below
from ..analysis.tree import blocks_under, dims_of_loops, find_block, find_loop, fresh, replace_node

ONLINE = (ATTENTION, LOGSUMEXP)
# What an exponential may be written as: itself, or powers of two.
EXPONENTIALS = ("exp", "exp2", "exp2_approx")


def decompose_online(
    nest: LoopNest, block: str, loop: str, skip: bool = False, exponential: str = "exp", finite: bool = False
) -> tuple[LoopNest, list[str]]:
    """Write the steps of an online softmax out, a tile at a time: one iteration of ``loop`` is a tile.

    Returns the names of the new blocks, in the order below.

    Rewrites::

        for no in range(N / 64):                  m[i] = -inf; s[i] = 0; v[i, d] = 0
            for i, d, ni in ...:             ->   for no in range(N / 64):
                n = no * 64 + ni                      for i, ni: t[no, i] max= a[i, n]
                (m, s, v)[i, d] attention=            for i:     u[no, i] = max(m[i], t[no, i])
                    (a[i, n], 1, b[n, d])                        r[no, i] = exp(m[i] - u[no, i]); m[i] = u[no, i]
                                                      for i, ni: p[i, n] = exp(a[i, n] - u[no, i])
                                                      for i, ni: w[no, i] += p[i, n]
                                                      for i:     s[i] = s[i] * r[no, i] + w[no, i]
                                                      for i, d, ni: x[no, i, d] += p[i, n] * b[n, d]
                                                      for i, d:  v[i, d] = v[i, d] * r[no, i] + x[no, i, d]

    Each exponential is taken once, and what multiplies ``b`` is a plain sum of products. A factor of ``b`` that has an
    ``i`` and no ``d`` (what dropout leaves of a probability) goes with ``p`` there, in the block that makes it. Maxima
    and sums lose the axes that scores do not have. For ``logsumexp`` there is neither ``v`` nor ``p``: the sum takes
    the exponentials. A state carries over from one tile to the next, so that the blocks which write it scan over
    ``loop``.

    With ``skip`` a tile is left out where its scores prove to be minus infinity by comparisons of positions (a causal
    mask, a window), with those blocks in the loop whose results nothing else reads; a row that has no other score must
    then be told by its maximum. Where positions are compared with numbers that are read (the length of a cache), a
    block ahead of the loop computes where it begins or ends, and the hints ``live_from`` and ``live_to`` say so.

    With ``exponential="exp2"`` weights are powers of two of differences times log2(e). A positive number by which all
    scores were multiplied goes into that factor, is gone from them, and multiplies maxima in a last block, behind the
    loop. No element is compared with its maximum: rows are told for themselves, and one that has no score yet has no
    weights either, so that it must be told by its maximum as well.

    With ``finite`` scores are compared with their maximum where that is finite, and with zero elsewhere. The sum of a
    row with plus infinity is then infinite, and zero where there is minus infinity alone. Times ``exp(m - c)``,
    whatever ``c`` is, both are what they would have been: that is all that may be made of a sum.

    Requires: the block is one update by ``attention`` or ``logsumexp`` whose targets are LOCAL; ``loop`` carries its
    reduction and no other axis, and is outermost of such; the loops inside it hold nothing but the block, and are
    serial; every tile has an element.
    Raises: ScheduleError.    Source: Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1.
    """
    asked = f"decompose_online({block}, {loop})"
    node, around = find_block(nest, block, asked)
    tile, outer = find_loop(nest, loop, asked)
    update = _update(nest, node, asked)
    over = carried(node)
    if tile.var not in over or mixed(node):
        raise ScheduleError(asked, f"{loop} does not carry the reduction of {block} alone", nest, loop)
    early = next((lp for lp in outer if lp.var in over), None)
    if early is not None:
        raise ScheduleError(asked, f"{early.var}, outside of it, carries the reduction too", nest, early.var.name)
    inner = around[len(outer) + 1 :]
    others = [b.name for lp in inner[:1] for b in blocks_under(lp) if b is not node]
    odd = next((lp for lp in inner if lp.kind is not LoopKind.SERIAL), None)
    if others or odd is not None:
        reason = f"{others[0]} stands in its loops" if others else f"{odd.var} is {odd.kind.value}"  # type: ignore[union-attr]
        raise ScheduleError(asked, reason, nest, others[0] if others else block)
    plan = _plan(nest, node, update, tile, inner, asked)
    guards: Guards = Guards(())
    ends: list[LiveEnd] = []
    if exponential not in EXPONENTIALS:
        raise ScheduleError(asked, f"exponential is {exponential!r}, not one of {', '.join(EXPONENTIALS)}", nest, block)
    if skip or (exponential != "exp" and not finite):
        unread_where_empty(nest, node, asked)
    if skip:
        score = inlined(nest, update.values[0])
        facts = minus_infinity(score)
        guards = occupied(nest, node, facts, {lp.var: lp.extent for lp in (*outer, tile)})
        along = {a.var for a, b in zip(node.axes, node.bindings, strict=True) if b.free_symbols & over}
        score, data = opaque_data(score, along)
        ends = live_ends(nest, node, tile, outer, inner, minus_infinity(score), data) if data else []
    weights = _Weights(finite=finite)
    if exponential != "exp":
        factor, nest, score = without_factor(nest, node, update.values[0])
        update = replace(update, values=(score, *update.values[1:]))
        weights = _Weights(exponential, factor, finite)
        plan.nest = nest
    steps = _steps(plan, update, guards.bounds, weights)
    states = _states(plan, update)
    ended = _ended(plan, weights)
    subtree = inner[0] if inner else node
    body = replace_node(nest.body, subtree, lambda _: tuple(steps))
    changed = find_loop(replace(nest, body=body), loop, asked)[0]
    body = replace_node(body, changed, lambda n: (*states, n, *ended))
    result = replace(nest, body=body, locals=(*nest.locals, *plan.made))
    result = _without_axes(result, plan.scalars, plan.dropped)
    names = [b.name for n in (*states, *steps, *ended) for b in blocks_under(n)]
    within = {b.name for n in steps for b in blocks_under(n)}
    return guards.applied(with_ends(result, loop, ends, within), loop, names), names


@dataclass(slots=True)
class _Plan:
    """What the steps are made of: the block's axes by their part in it, and the loops inside the tile's.

    ``shared`` are the axes of maxima and sums, ``own`` those that only the vector has, ``along`` the tile's and the
    element's axis in the reduction.
    """

    nest: LoopNest
    block: Block
    tile: Loop
    inner: tuple[Loop, ...]
    binding: dict[sympy.Symbol, sympy.Expr]
    shared: tuple[Axis, ...]
    own: tuple[Axis, ...]
    position: Axis
    elements: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    mapping: dict[sympy.Symbol, sympy.Expr]
    scalars: tuple[str, ...]
    dropped: tuple[int, ...]
    made: list[Buffer]
    taken: set[str]

    def local(self, base: str, axes: Sequence[Axis], like: Expr) -> str:
        name, k = base, 1
        while name in self.taken:
            name, k = f"{base}_{k}", k + 1
        self.taken.add(name)
        shape = tuple(a.extent for a in axes)
        self.made.append(Buffer(name, shape, contiguous_strides(shape), like.dtype, Scope.LOCAL))
        return name


def _update(nest: LoopNest, node: Block, asked: str) -> Update:
    if len(node.body) != 1 or not isinstance(node.body[0], Update) or node.body[0].monoid not in ONLINE:
        known = " or ".join(m.name for m in ONLINE)
        raise ScheduleError(asked, f"it is not one update by {known}", nest, node.name)
    update = node.body[0]
    local = {b.name for b in nest.locals}
    for t in update.targets:
        if t.buffer not in local or any(not getattr(i, "is_Symbol", False) for i in t.indices):
            raise ScheduleError(asked, f"{t.buffer} is not a local buffer at plain axes", nest, node.name)
    if len({t.indices for t in update.targets}) != 1:
        raise ScheduleError(asked, "its targets have different axes", nest, node.name)
    return update


def _plan(
    nest: LoopNest, node: Block, update: Update, tile: Loop, inner: tuple[Loop, ...], asked: str
) -> _Plan:  # fmt: skip
    binding = dict(zip((a.var for a in node.axes), node.bindings, strict=True))
    speaks = {s for v in update.values[:2] for s in _symbols(v)}
    spatial = tuple(a for a in node.axes if a.kind is AxisKind.SPATIAL)
    shared = tuple(a for a in spatial if a.var in speaks or update.monoid is LOGSUMEXP)
    # An axis that neither scores nor weights have belongs to the vector alone; loops that it shares with another
    # axis cannot be left out of the steps of the others.
    loops_of_shared = {s for a in shared for s in binding[a.var].free_symbols}
    own = tuple(a for a in spatial if a not in shared and not binding[a.var].free_symbols & loops_of_shared)
    own = tuple(a for a in own if a.var in update.targets[0].indices)
    fixed_by_outer = {lp.var for lp in inner}
    own = tuple(a for a in own if binding[a.var].free_symbols <= fixed_by_outer)
    shared = tuple(a for a in spatial if a not in own)
    over = carried(node)
    rest = [lp for lp in inner if lp.var in over]
    # Axes of one name are one dimension.
    taken = {a.var.name for b, _ in blocks(nest) for a in b.axes} | {b.name for b in (*nest.params, *nest.locals)}
    names = _names(taken, ["tile", *(f"tile_{k}" for k in range(len(rest)))])
    dims = dims_of_loops(node)
    position = Axis(symbol(names[0]), tile.extent, dim=dims[tile.var])
    elements = tuple(Axis(symbol(n), lp.extent, dim=dims[lp.var]) for n, lp in zip(names[1:], rest, strict=True))
    as_axes = {tile.var: position.var, **{lp.var: a.var for lp, a in zip(rest, elements, strict=True)}}
    extents = {a.var: a.extent for a in (position, *elements)}
    reduced = tuple(a for a in node.axes if a.kind is not AxisKind.SPATIAL)
    mapping = {a.var: simplify(sympy.expand(binding[a.var].xreplace(as_axes)), extents, nest.symbols) for a in reduced}
    scope = {tile.var: tile.extent, **{lp.var: lp.extent for lp in inner}}
    for b in node.predicate:
        if b.lhs.free_symbols & over:
            first = b.lhs.xreplace({lp.var: sympy.S.Zero for lp in rest})
            if not below(first, b.rhs, scope, nest.symbols):
                raise ScheduleError(asked, f"a tile may have no element: {b.lhs} < {b.rhs}", nest, node.name)
    dropped = tuple(k for k, i in enumerate(update.targets[0].indices) if any(i == a.var for a in own))
    return _Plan(
        nest, node, tile, inner, binding, shared, own, position, elements, reduced, mapping,
        tuple(t.buffer for t in update.targets[:2]), dropped, [], taken,
    )  # fmt: skip


def _symbols(e: Expr) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for x in walk(e):
        if isinstance(x, Load):
            found |= {s for i in x.indices if isinstance(i, sympy.Expr) for s in i.free_symbols}
        elif isinstance(x, IndexValue):
            found |= x.index.free_symbols
    return found


def _names(taken: set[str], bases: Sequence[str]) -> list[str]:
    result = []
    for base in bases:
        name = base
        while name in taken:
            name += "_"
        taken.add(name)
        result.append(name)
    return result


# --- the steps --------------------------------------------------------------------------------------------------------


def _states(plan: _Plan, update: Update) -> list[Node]:
    """The state before the first tile."""
    identity = update.monoid.identity(tuple(v.dtype for v in update.values))
    shared = tuple(a.var for a in plan.shared)
    begin: list[Statement] = [Store(t, shared, i) for t, i in zip(plan.scalars, identity, strict=False)]
    nodes = [_node(plan, "begin", plan.shared, begin, at_tile=False)]
    if update.monoid is ATTENTION:
        t = update.targets[2]
        nodes.append(
            _node(plan, "begin_vector", (*plan.shared, *plan.own), [Store(t.buffer, t.indices, identity[2])], False)
        )
    return nodes


@dataclass(frozen=True, slots=True)
class _Weights:
    """How weights are made of scores, which ``factor`` would have to multiply."""

    exponential: str = "exp"
    factor: float = 1.0
    finite: bool = False

    @property
    def plain(self) -> bool:
        return self.exponential == "exp" and not self.finite

    def beside(self, top: Expr) -> Expr:
        """What scores are compared with."""
        none = call("isinf", top) if self.finite else call("eq", top, lowest(top.dtype))
        return Select(none, const(0.0, top.dtype), top)

    def of(self, score: Expr, top: Expr) -> Expr:
        """The weight beside a row's maximum, or beside what stands for it in a row without scores."""
        if self.plain:
            return _rescale(score, top)
        if self.exponential == "exp":
            return call("exp", call("sub", score, top))
        by = const(score.dtype.rounded(self.factor * math.log2(math.e)), score.dtype)
        return call(self.exponential, call("mul", call("sub", score, top), by))


def _ended(plan: _Plan, weights: _Weights) -> list[Node]:
    """The maximum of what scores were before a factor was taken from them."""
    if weights.factor == 1.0:
        return []
    top, shared = plan.scalars[0], tuple(a.var for a in plan.shared)
    dtype = plan.nest.buffers[top].dtype
    scaled = call("mul", Load(top, shared, dtype), const(weights.factor, dtype))
    return [_node(plan, "top", plan.shared, [Store(top, shared, scaled)], at_tile=False)]


def _steps(plan: _Plan, update: Update, guards: tuple[Bound, ...], weights: _Weights) -> list[Node]:
    moved = [_at_elements(plan, v) for v in update.values]
    score, weight, *vector = moved
    if weights.finite:
        weight = _own_weight(score, weight)
    top, total = plan.scalars
    shared = tuple(a.var for a in plan.shared)
    at = (plan.position.var, *shared)
    by_tile, by_element = (plan.position, *plan.shared), (plan.position, *plan.shared, *plan.elements)
    summed = (plan.position, *plan.shared, *(replace(a, kind=AxisKind.REDUCTION) for a in plan.elements))
    if not plan.elements:
        one = symbol(_names(plan.taken, ["one"])[0])
        summed = (*summed, replace(plan.position, var=one, extent=sympy.S.One, kind=AxisKind.REDUCTION))
    scan = (replace(plan.position, kind=AxisKind.SCAN), *plan.shared)
    most = plan.local(f"{top}_tile", by_tile, score)
    new = plan.local(f"{top}_new", by_tile, score)
    factor = plan.local(f"{top}_factor", by_tile, score)
    part = plan.local(f"{total}_tile", by_tile, weight)

    def at_tile(name: str, like: Expr) -> Load:
        return Load(name, at, like.dtype)

    old = Load(top, shared, score.dtype)
    # What scores are compared with: the maximum, or zero in a row whose maximum is infinite.
    beside = new if weights.plain else plan.local(f"{top}_beside", by_tile, score)
    weighed = weights.of(score, at_tile(beside, score))
    kept: list[Node] = []
    given = weighed
    if vector:
        where = (*shared, *(plan.mapping[a.var] for a in plan.reduced))
        made = plan.local(f"{top}_weight", (*plan.shared, *plan.reduced), score)
        stores: list[Statement] = [Store(made, where, weighed)]
        given = weighed = Load(made, where, score.dtype)
        own_weight, vector[0] = weighing(vector[0], {a.var for a in plan.own}, shared)
        if own_weight is not None:
            chosen = plan.local(f"{top}_chosen", (*plan.shared, *plan.reduced), score)
            stores.append(Store(chosen, where, call("mul", weighed, own_weight)))
            given = Load(chosen, where, score.dtype)
        kept = [_node(plan, "weight", by_element, stores)]
    rescale: list[Statement] = [
        Store(new, at, call("maximum", old, at_tile(most, score))),
        Store(factor, at, weights.of(old, at_tile(beside, score))),
        Store(top, shared, at_tile(new, score)),
    ]
    if not weights.plain:
        rescale.insert(1, Store(beside, at, weights.beside(at_tile(new, score))))
    running = call("mul", Load(total, shared, weight.dtype), at_tile(factor, score))
    steps: list[Node] = [
        _node(plan, "max", summed, [Update(MAX, (Access(most, at),), (score,))]),
        _node(plan, "factor", scan, rescale),
        *kept,
        _node(plan, "sum", summed, [Update(SUM, (Access(part, at),), (_product(weighed, weight),))]),
        _node(plan, "total", scan, [Store(total, shared, call("add", running, at_tile(part, weight)))]),
    ]  # fmt: skip
    if vector:
        (value,), target = vector, update.targets[2]
        own = tuple(a.var for a in plan.own)
        tile_vector = plan.local(f"{target.buffer}_tile", (plan.position, *plan.shared, *plan.own), value)
        product = Update(SUM, (Access(tile_vector, (*at, *own)),), (_product(given, value),))
        running = call("mul", Load(target.buffer, target.indices, value.dtype), at_tile(factor, score))
        result = call("add", running, Load(tile_vector, (*at, *own), value.dtype))
        over = summed[len(by_tile) :]
        steps += [
            _node(plan, "product", (plan.position, *plan.shared, *plan.own, *over), [product]),
            _node(plan, "vector", (*scan, *plan.own), [Store(target.buffer, target.indices, result)]),
        ]
    return [_guarded(s, guards) for s in steps]


def _rescale(old: Expr, new: Expr) -> Expr:
    """exp(old - new), and one where they are equal, infinities included."""
    return Select(call("eq", old, new), const(1.0, old.dtype), call("exp", call("sub", old, new)))


def _own_weight(score: Expr, weight: Expr) -> Expr:
    """The weight without what only says that an element of minus infinity has none."""
    match score, weight:
        case (
            Select(inside, _, Const(value=lowest)),
            Select(condition, own, Const(value=0)),
        ) if inside == condition and lowest == -math.inf:
            return own
    return weight


def _product(weight: Expr, value: Expr) -> Expr:
    return weight if isinstance(value, Const) and value.value == 1 else call("mul", weight, value)


def _at_elements(plan: _Plan, value: Expr) -> Expr:
    extents = {a.var: a.extent for a in (plan.position, *plan.elements, *plan.shared, *plan.own)}

    def index(i: sympy.Expr) -> sympy.Expr:
        if not i.free_symbols & plan.mapping.keys():
            return i
        return simplify(sympy.expand(i.xreplace(plan.mapping)), extents, plan.nest.symbols)

    return rewrite(value, lambda _: None, index)


def _node(plan: _Plan, step: str, axes: Sequence[Axis], body: list[Statement], at_tile: bool = True) -> Node:
    """A block over some of the axes, under copies of those loops inside the tile that they move with."""
    by_element = dict(
        zip((a.var for a in plan.elements), (lp.var for lp in plan.inner if lp.var in carried(plan.block)), strict=True)
    )
    bindings = []
    for a in axes:
        if a.var == plan.position.var:
            bindings.append(plan.tile.var)
        elif a.var in by_element:
            bindings.append(by_element[a.var])
        else:
            bindings.append(plan.binding.get(a.var, sympy.S.Zero))
    used = {s for b in bindings for s in b.free_symbols}
    inside = [lp for lp in plan.inner if lp.var in used]
    reduced = carried(plan.block)
    known = used | {s for b in plan.block.bindings for s in b.free_symbols if s not in {lp.var for lp in plan.inner}}
    known |= set(plan.nest.symbols.symbols)
    if not at_tile:
        known -= reduced
    predicate = tuple(b for b in plan.block.predicate if b.lhs.free_symbols <= known)
    if not any(lp.var in reduced for lp in inside):
        predicate = tuple(b for b in predicate if not b.lhs.free_symbols & reduced)
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    for lp in inside:
        name = fresh(plan.nest, f"{lp.var.name}_{step}", plan.taken)
        plan.taken.add(name)
        renamed[lp.var] = symbol(name)
    name = f"{plan.block.name}_{step}"
    while name in plan.taken:
        name += "_"
    plan.taken.add(name)
    node: Node = Block(
        name,
        tuple(axes),
        tuple(b.xreplace(renamed) for b in bindings),
        tuple(body),
        tuple(Bound(b.lhs.xreplace(renamed), b.rhs) for b in predicate),
        plan.block.annotations,
    )
    for lp in reversed(inside):
        node = Loop(renamed[lp.var], lp.extent, (node,))  # type: ignore[arg-type]
    return node


def _guarded(node: Node, guards: tuple[Bound, ...]) -> Node:
    if not guards:
        return node

    def visit(n: Node) -> Node | None:
        return replace(n, predicate=(*guards, *n.predicate)) if isinstance(n, Block) else None

    return map_nodes((node,), visit)[0]


def _without_axes(nest: LoopNest, buffers: Collection[str], dropped: Collection[int]) -> LoopNest:
    """Buffers without some of their dimensions; the new blocks speak of them so already."""
    if not dropped:
        return nest
    rank = {b.name: len(b.shape) for b in nest.locals if b.name in buffers}

    def kept(indices: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(i for k, i in enumerate(indices) if k not in dropped)

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in rank and len(e.indices) == rank[e.buffer]:
            return Load(e.buffer, kept(e.indices), e.dtype)
        return None

    def statement(s: Statement) -> Statement:
        if isinstance(s, Store):
            return replace(s, value=rewrite(s.value, leaf))
        return replace(s, values=tuple(rewrite(v, leaf) for v in s.values))

    def visit(n: Node) -> Node | None:
        if not isinstance(n, Block) or not accesses(n).read & rank.keys():
            return None
        return replace(n, body=tuple(map(statement, n.body)))

    own = []
    for b in nest.locals:
        if b.name in rank:
            shape: tuple[sympy.Expr, ...] = kept(b.shape)  # type: ignore[assignment]
            b = replace(b, shape=shape, strides=contiguous_strides(shape))
        own.append(b)
    return replace(nest, body=map_nodes(nest.body, visit), locals=tuple(own))
