"""Short rows that every program of their readers makes again: a norm in front of products with a vector.

Each program of such a product multiplies one row of a matrix with the whole vector, so a vector that is a norm of
another one can be made there: of a few KB that lie in a near cache, while the matrix comes from memory. The norm's own
kernel is gone, and what waited for it waits no more. Its reductions get the rows of the product: they say the same in
each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import sympy

from ...ir.expr.value import Expr, Load, flops, free_symbols, is_value, rewrite, symbol
from ...ir.graph.graph import Graph
from ...ir.nest.loops import contiguous_strides
from ..context import PassContext
from ..cost.recompute import BESIDE, Reader, added_time, may_repeat_row, repeats_row
from ..decisions import Alternative, place_key
from ..facts.fusion_nodes import FusionNode, collect_loads
from .group import Group
from .join import rebuilt


def repeat_rows(
    groups: Sequence[Group], outside: set[str], sizes: Mapping[str, int], graph: Graph, context: PassContext
) -> list[Group]:
    """Take the nodes of groups that make one short row into all groups that read it, where that pays; the groups of
    which nothing is left."""
    readers: dict[str, list[Group]] = {}
    for g in groups:
        for name in {ld.buffer for m in g.nodes for ld in m.loads} - g.produced.keys():
            readers.setdefault(name, []).append(g)
    gone: list[Group] = []
    for g in groups:
        if not _is_row(g) or not outside.isdisjoint(g.produced):
            continue
        if not may_repeat_row(g.target.machine, g.table.hint(g.domain.size(g.domain.order))):
            continue
        found = {id(r): r for name in g.produced for r in readers.get(name, ())}
        grown = [(r, _with_row(r, g)) for r in found.values()]
        if not grown or not all(new is not None and _is_product_of_rows(new, r, g) for r, new in grown):
            continue
        costs = [_reader(r, g, new, sizes) for r, new in grown if new is not None]
        machine = g.target.machine
        names = tuple(g.produced)
        way = context.decide(
            "repeat-row", lambda names=names: place_key(graph, names[:1]),  # type: ignore[misc]
            (Alternative("again", added_time(machine, costs)), Alternative("store", machine.launch)),
            "again" if repeats_row(machine, costs) else "store", at=names[0],
            nbytes=sum(sizes.get(n, 0) for n in names), reason=f"a short row that {len(costs)} kernels read",
        )  # fmt: skip
        if way == "again":
            for r, new in grown:
                assert new is not None
                r.take(new)
            gone.append(g)
    return gone


def _is_row(g: Group) -> bool:
    """Whether a group reduces one row of known length."""
    if g.domain.inner is None or g.has_scan or g.is_split or g.cross:
        return False
    return all(e.is_Integer and (d in g.domain.inner or e == 1) for d, e in g.domain.extents.items())


def _with_row(reader: Group, row: Group) -> Group | None:
    """The reader with the nodes of a row that it reads along its reductions, once for all rows of its own; None where
    it reads anything of it otherwise."""
    extents: tuple[sympy.Expr, ...] | None = None
    for m in reader.nodes:
        for ld in (ld for ld in m.loads if ld.buffer in row.produced):
            own = _beside(m, ld)
            if (
                any(map(is_value, ld.indices))
                or not own
                or any(a in m.reduce_axes for a in own)
                or extents not in (None, _extents(m, own))
            ):
                return None
            extents = _extents(m, own)
    assert extents is not None
    axes = tuple(symbol(f"again{k}") for k in range(len(extents)))
    names = {name: f"{name}_again" for name in row.produced}
    again = [_again(m, names, axes, extents) for m in row.nodes]
    nodes = [_reading(m, names) for m in reader.nodes]
    return rebuilt([*again, *nodes], reader)


def _beside(m: FusionNode, ld: Load) -> tuple[sympy.Symbol, ...]:
    """The axes of a node along which a load does not move: its own rows."""
    known = free_symbols(ld)
    return tuple(a for a in m.all_axes if a not in known and m.extents[a] != 1)


def _extents(m: FusionNode, axes: Iterable[sympy.Symbol]) -> tuple[sympy.Expr, ...]:
    return tuple(m.extents[a] for a in axes)


def _again(
    m: FusionNode, names: Mapping[str, str], axes: tuple[sympy.Symbol, ...], extents: tuple[sympy.Expr, ...]
) -> FusionNode:
    """A node of a row for each of several rows."""
    values = _renamed(m.values, names, axes)
    shapes = [(*t.shape, *extents) for t in m.types]
    return replace(
        m,
        names=tuple(names[n] for n in m.names),
        types=tuple(replace(t, shape=s, strides=contiguous_strides(s)) for t, s in zip(m.types, shapes, strict=True)),
        axes=(*m.axes, *axes),
        extents={**m.extents, **dict(zip(axes, extents, strict=True))},
        values=values,
        loads=collect_loads(values),
    )


def _reading(m: FusionNode, names: Mapping[str, str]) -> FusionNode:
    """A node that reads the row that is its own."""
    read = [ld for ld in m.loads if ld.buffer in names]
    if not read:
        return m
    values = _renamed(m.values, names, _beside(m, read[0]))
    return replace(m, values=values, loads=collect_loads(values))


def _renamed(values: tuple[Expr, ...], names: Mapping[str, str], axes: tuple[sympy.Symbol, ...]) -> tuple[Expr, ...]:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in names:
            return Load(names[e.buffer], (*e.indices, *axes), e.dtype)
        return None

    return tuple(rewrite(v, leaf) for v in values)


def _is_product_of_rows(new: Group, old: Group, row: Group) -> bool:
    """Whether a reader has rows of its own alone, which its reductions run along, as those of the row do."""
    if new.is_split or new.cross or new.has_scan or new.domain.inner is None:
        return False
    reductions = [m for m in old.nodes if m.monoid is not None]
    return any(ld.buffer in row.produced for m in reductions for ld in m.loads)


def _reader(old: Group, row: Group, new: Group, sizes: Mapping[str, int]) -> Reader:
    """What a reader reads and computes, and what the row adds to that."""
    names = {ld.buffer for m in old.nodes for ld in m.loads} - old.produced.keys() - row.produced.keys()
    again = {f"{n}_again" for n in row.produced}
    hint = new.table.hint
    ops = {True: 0, False: 0}
    for m in new.nodes:
        each = sum(flops(v) for v in m.values) + BESIDE * len(m.loads) + (m.monoid is not None)
        ops[m.name in again] += each * hint(sympy.Mul(*m.extents.values()))
    rows = max(hint(new.domain.size(new.domain.rows())), 1)
    return Reader(rows, sum(sizes.get(n, 0) for n in names), ops[False], ops[True] // rows)


__all__ = ["repeat_rows"]
