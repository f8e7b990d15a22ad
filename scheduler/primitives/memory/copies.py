"""What the caching primitives share: a block that copies a buffer, and statements that name another buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy

from ....ir.expr.value import Expr, Index, Load, Select, children, is_value, loads, rename_loads, symbol, walk
from ....ir.nest.loops import (
    Access,
    Axis,
    Block,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Statement,
    Store,
    Update,
    contiguous_strides,
    walk_nodes,
)
from ...error import ScheduleError
from ..analysis.region import below
from ..analysis.tree import blocks_under, fresh

CACHES = {s.value: s for s in (Scope.LOCAL, Scope.SHARED)}


def cache_scope(scope: str, asked: str, nest: LoopNest) -> Scope:
    """The scope of a cache. Raises ScheduleError."""
    if scope not in CACHES:
        raise ScheduleError(asked, f"a cache lives in scope {' or '.join(CACHES)}, not {scope!r}", nest)
    return CACHES[scope]


def cache_buffer(nest: LoopNest, of: Buffer, scope: Scope) -> Buffer:
    """A buffer of the nest's own that holds what another does; no block or buffer has its name."""
    taken = set(nest.buffers) | {n.name for n, _ in walk_nodes(nest.body) if isinstance(n, Block)}
    base = name = f"{of.name}_{scope.value}"
    k = 1
    while name in taken:
        name, k = f"{base}_{k}", k + 1
    return Buffer(name, of.shape, contiguous_strides(of.shape), of.dtype, scope)


def copy_block(nest: LoopNest, name: str, source: Buffer, target: Buffer) -> Node:
    """The block ``target[i0, i1, …] = source[i0, i1, …]`` over loops of its own."""
    axes = tuple(Axis(symbol(f"i{k}"), e) for k, e in enumerate(source.shape))
    loops = [symbol(fresh(nest, f"{name}_i{k}")) for k in range(len(axes))]
    at = tuple(a.var for a in axes)
    node: Node = Block(name, axes, tuple(loops), (Store(target.name, at, Load(source.name, at, source.dtype)),))
    for var, axis in zip(reversed(loops), reversed(axes), strict=True):
        node = Loop(var, axis.extent, (node,))
    return node


def top_of(nest: LoopNest, block: Block) -> int:
    """Which statement of the nest's body a block stands in."""
    return next(k for k, n in enumerate(nest.body) if any(b is block for b in blocks_under(n)))


def redirected(statement: Statement, reads: Mapping[str, str], writes: Mapping[str, str]) -> Statement:
    """A statement that reads and writes other buffers at the same places."""

    def indices(given: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(rename_loads(i, reads) if is_value(i) else i for i in given)  # type: ignore[arg-type]

    match statement:
        case Store(buffer, at, value):
            return Store(writes.get(buffer, buffer), indices(at), rename_loads(value, reads))
        case Update(monoid, targets, values):
            places = tuple(Access(writes.get(t.buffer, t.buffer), indices(t.indices)) for t in targets)
            return Update(monoid, places, tuple(rename_loads(v, reads) for v in values))


def statement_values(statement: Statement) -> tuple[Expr, ...]:
    """What a statement stores or combines."""
    return statement.values if isinstance(statement, Update) else (statement.value,)


def parts_of(value: Expr, buffer: str) -> list[Expr]:
    """The largest sub-expressions that load the buffer and no other."""
    names = {ld.buffer for ld in loads(value)}
    if buffer not in names:
        return []
    if names == {buffer}:
        return [value]
    return [p for c in children(value) for p in parts_of(c, buffer)]


def free_name(taken: Collection[str], base: str) -> str:
    """``base``, with a number behind it where it is taken."""
    name, k = base, 1
    while name in taken:
        name, k = f"{base}_{k}", k + 1
    return name


def under_choice(value: Expr, part: Expr) -> bool:
    """Whether a branch of a select, which is computed where it is taken, holds the part."""
    if value == part:
        return False
    if isinstance(value, Select) and any(part in walk(v) for v in (value.if_true, value.if_false)):
        return True
    return any(under_choice(c, part) for c in children(value))


def in_range(nest: LoopNest, part: Expr, extents: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether every load of the part is proved to be inside its buffer for all the axes' values."""
    for ld in loads(part):
        for i, extent in zip(ld.indices, nest.buffer(ld.buffer).shape, strict=True):
            if is_value(i) or nest.symbols.bounds(i, extents)[0] < 0 or not below(i, extent, extents, nest.symbols):
                return False
    return True
