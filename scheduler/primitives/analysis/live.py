"""Where a loop over tiles of an online softmax may begin and end by what data say: a mask of positions compared with
numbers that are read, as the length of a cache is.

Such a comparison leaves scores of minus infinity on one side of a number that no element along the tiles changes.
A block ahead of the loop computes the first or the last iteration that holds anything else, from the numbers of all
rows of the tile, and the loop is told of it by a hint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import MAX, MIN
from ....ir.expr.value import Call, Cast, Expr, IndexValue, call, const, free_symbols, loads, rewrite, symbol
from ....ir.nest.hints import LIVE_FROM, LIVE_TO, Hint
from ....ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Store,
    Update,
    blocks,
    contiguous_strides,
    map_nodes,
)
from ...facts.views import map_value
from .dependence import accesses
from .empty import COMPARISONS
from .tree import blocks_under, dims_of_loops, find_loop, fresh, linear_part


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """An end of a loop: ``node`` computes it into ``buffer``, as a number of iterations of the loop."""

    hint: Hint[str]
    buffer: Buffer
    node: Node


def opaque_data(value: Expr, moving: Collection[sympy.Symbol]) -> tuple[Expr, dict[sympy.Symbol, Expr]]:
    """A value in which integers that are compared, that are read and do not move with some axes have names in their
    place, as if they were positions; what the names stand for."""
    data: dict[sympy.Symbol, Expr] = {}
    names: dict[Expr, sympy.Symbol] = {}

    def named(e: Expr) -> Expr:
        inner = e.value if isinstance(e, Cast) and e.value.dtype.is_int else e
        fits = e.dtype in (DType.INT64, DType.INT32) and next(loads(inner), None) is not None
        if not fits or free_symbols(e).intersection(moving):
            return e
        if e not in names:
            names[e] = sympy.Dummy(f"data{len(names)}", integer=True)
            data[names[e]] = e
        return IndexValue(names[e], e.dtype)

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Call) and e.fn in COMPARISONS:
            args = tuple(map(named, e.args))
            return Call(e.fn, args, e.dtype) if args != e.args else None
        return None

    return rewrite(value, leaf), data


def live_ends(
    nest: LoopNest,
    block: Block,
    tile: Loop,
    outer: Sequence[Loop],
    inner: Sequence[Loop],
    facts: Iterable[sympy.Expr],
    data: dict[sympy.Symbol, Expr],
) -> list[LiveEnd]:
    """The ends of ``tile`` that facts (below zero where an element is minus infinity) about ``data`` give: one for each
    fact that is linear in the loops inside, and has one number of data, plus or minus."""
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    taken = {b.name for b, _ in blocks(nest)} | {b.name for b in (*nest.params, *nest.locals)}
    found = []
    for g in facts:
        room = sympy.expand(g.xreplace(binding))
        own = [s for s in room.free_symbols if s in data]
        if len(own) != 1 or room.coeff(own[0]) not in (1, -1):
            continue
        sign = int(room.coeff(own[0]))
        rest = sympy.expand(room - sign * own[0])
        value = map_value(data[own[0]], binding)  # type: ignore[arg-type]
        end = _end(nest, block, tile, outer, inner, rest, sign, value, taken)
        if end is not None:
            taken |= {end.buffer.name, *(b.name for b in blocks_under(end.node))}
            found.append(end)
    return found


def _end(
    nest: LoopNest, block: Block, tile: Loop, outer: Sequence[Loop], inner: Sequence[Loop], rest: sympy.Expr,
    sign: int, value: Expr, taken: set[str],
) -> LiveEnd | None:  # fmt: skip
    rows = [lp for lp in inner if lp.var in free_symbols(value)]
    for lp in inner:
        parts = linear_part(rest, lp.var)
        if parts is None or not parts[0].is_Integer:
            return None
        if lp not in rows and parts[0] != 0:  # the best of the tile's elements
            rest = sympy.expand(parts[1] + (parts[0] * (lp.extent - 1) if parts[0] > 0 else 0))
    parts = linear_part(rest, tile.var)
    if parts is None or not parts[0].is_Integer or parts[0] == 0 or tile.var in free_symbols(value):
        return None
    step, rest = int(parts[0]), parts[1]
    used = free_symbols(value) | rest.free_symbols
    around = [lp for lp in outer if lp.var in used]
    if used - {lp.var for lp in (*around, *rows)} - set(nest.symbols.symbols):
        return None
    # Iterations t with number + rest + step * t >= 0 for some row.
    # Positions are nearer to zero than this: a number that is read may be cut to it before anything is added to it.
    far = 1 << 40
    number: Expr = call("minimum", call("maximum", _long(value), _const(-far)), _const(far))
    total = call("add" if sign > 0 else "sub", IndexValue(rest, DType.INT64), number)
    quotient = call("floordiv", total, _const(abs(step)))
    count = call("add", quotient, _const(1)) if step < 0 else call("sub", _const(0), quotient)
    return _computed(nest, block, around, rows, count, LIVE_TO if step < 0 else LIVE_FROM, taken)


def _computed(
    nest: LoopNest, block: Block, around: Sequence[Loop], rows: Sequence[Loop], count: Expr, hint: Hint[str],
    taken: set[str],
) -> LiveEnd:  # fmt: skip
    """A block that computes the most, or the least, over some loops, for each iteration of others."""
    name, k = f"{block.name}_live", 0
    while name in taken:
        name, k = f"{block.name}_live_{k}", k + 1
    dims, also = dims_of_loops(block), set(taken)
    axes, bindings, copies, renamed = [], [], [], {}
    for lp in (*around, *rows):
        axis = symbol(fresh(nest, f"{name}_{lp.var.name}", also))
        also.add(axis.name)
        kind = AxisKind.REDUCTION if lp in rows else AxisKind.SPATIAL
        axes.append(Axis(axis, lp.extent, kind, dims[lp.var]) if lp.var in dims else Axis(axis, lp.extent, kind))
        var = lp.var
        if lp in rows:
            var = symbol(fresh(nest, f"{lp.var.name}_live", also))
            also.add(var.name)
            copies.append((var, lp.extent))
            renamed[lp.var] = var
        bindings.append(var)
    as_axes = {lp.var: a.var for lp, a in zip((*around, *rows), axes, strict=True)}
    count = rewrite(count, lambda _: None, lambda i: i.xreplace(as_axes))
    known = {lp.var for lp in (*around, *rows)} | set(nest.symbols.symbols)
    tails = [b for b in block.predicate if b.lhs.free_symbols | b.rhs.free_symbols <= known]
    shape = tuple(lp.extent for lp in around)
    buffer = Buffer(name, shape, contiguous_strides(shape), DType.INT64, Scope.LOCAL)
    at = tuple(a.var for a in axes[: len(around)])
    statement = (
        Update(MAX if hint is LIVE_TO else MIN, (Access(name, at),), (count,)) if rows else Store(name, at, count)
    )
    predicate = tuple(replace(b, lhs=b.lhs.xreplace(renamed), rhs=b.rhs.xreplace(renamed)) for b in tails)
    node: Node = Block(f"{name}_end", tuple(axes), tuple(bindings), (statement,), predicate)
    for var, extent in reversed(copies):
        node = Loop(var, extent, (node,))
    return LiveEnd(hint, buffer, node)


def with_ends(nest: LoopNest, loop: str, ends: Sequence[LiveEnd], guarded: Collection[str]) -> LoopNest:
    """The nest with the ends computed ahead of a loop, and the blocks in it told: those ``guarded``, which do nothing
    beyond the ends, and those whose results nothing else reads."""
    if not ends:
        return nest
    hints = tuple(
        (name, ",".join(told))
        for name in (LIVE_FROM.name, LIVE_TO.name)
        if (told := [f"{loop}:{e.buffer.name}" for e in ends if e.hint.name == name])
    )
    inside = {*guarded, *blocks_only_for(nest, loop, guarded)}

    def visit(n: Node) -> Node | None:
        return replace(n, annotations=(*n.annotations, *hints)) if isinstance(n, Block) and n.name in inside else None

    changed = replace(nest, body=map_nodes(nest.body, visit), locals=(*nest.locals, *(e.buffer for e in ends)))
    return _ahead(changed, loop, tuple(e.node for e in ends))


def _ahead(nest: LoopNest, loop: str, nodes: tuple[Node, ...]) -> LoopNest:
    def put(body: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for n in body:
            if isinstance(n, Loop):
                if n.var.name == loop:
                    out += nodes
                else:
                    n = replace(n, body=put(n.body))
            out.append(n)
        return tuple(out)

    return replace(nest, body=put(nest.body))


def blocks_only_for(nest: LoopNest, loop: str, done: Collection[str]) -> list[str]:
    """The blocks in a loop, beside those ``done``, whose results nothing but those and one another read."""
    inside = [b for b in blocks_under(find_loop(nest, loop, "skip")[0])]
    local = {b.name for b in nest.locals}
    every = [b for b, _ in blocks(nest)]
    known, grown = set(done), True
    while grown:
        grown = False
        for b in inside:
            if b.name in known or not accesses(b).written <= local:
                continue
            readers = [r.name for r in every if r is not b and accesses(r).read & accesses(b).written]
            if all(r in known for r in readers):
                known.add(b.name)
                grown = True
    return [b.name for b in inside if b.name in known and b.name not in done]


def _long(e: Expr) -> Expr:
    return e if e.dtype is DType.INT64 else Cast(e, DType.INT64)


def _const(value: int) -> Expr:
    return const(value, DType.INT64)
