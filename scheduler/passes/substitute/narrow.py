"""Elements that nobody reads are not computed: norms of the rows of which only the last is multiplied, and what is in
front of them.

Demand goes from results to inputs. A node that others read at one index along an axis, or in a part of its length, is
made there alone. So are the rows of a matrix that a library reads through a view. What becomes of products is decided
in ``substitute.py``, which calls this when one of them has become smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Expr, Index, Load, is_value, loads, rename_loads, rewrite, symbol
from ....ir.graph.facts import makers_of
from ....ir.graph.graph import Compute, Graph, Node, Reduction, View, uses
from ....ir.nest.loops import contiguous_strides
from ...facts.definitions import Definitions
from ...facts.views import readers_of, results_of, views_of
from ..canonical.edit import Edit, Reader, extents_of
from ..canonical.eliminate_dead import eliminate_dead
from ..canonical.names import fresh_name
from ..products.operands import Product, product_of

Made: TypeAlias = Compute | Reduction


def narrow(graph: Graph) -> Graph:
    """Leave out elements of nodes that nobody reads."""
    if not any(_is_part(graph, n) for n in graph.nodes):
        return graph
    graph = _rows_of_computes(graph)
    edit = Edit.of(graph)
    for node in reversed(graph.nodes):
        current = edit.nodes.get(node.names[0]) if node.names else None
        if isinstance(current, (Compute, Reduction)):
            _narrow_node(edit, current)
        elif (product := product_of(current)) is not None:
            _narrow_product(edit, product)
    return _views_of_products(edit.graph)


def _is_part(graph: Graph, node: Node) -> bool:
    """Whether a view shows fewer elements than what it is of has, and that is made by the graph."""
    if not isinstance(node, View):
        return False
    made = makers_of(graph).get(views_of(graph).base(node.name))
    if made is None or made.types[0] is None:
        return False
    hint = graph.symbols.hint
    return hint(node.type.numel) < hint(made.types[0].numel)


def _rows_of_computes(graph: Graph) -> Graph:
    """Where a product reads a part of what a kernel makes, and nobody reads more: a kernel that makes the part."""
    views, readers, makers = views_of(graph), readers_of(graph), makers_of(graph)
    changed: dict[str, Compute] = {}
    shown = {n.source for n in graph.nodes if isinstance(n, View)}
    for node in graph.nodes:
        if not isinstance(node, View) or not _is_part(graph, node) or any(map(is_value, node.indices)):
            continue
        base = views.base(node.name)
        made = makers[base]
        if not isinstance(made, Compute) or base in results_of(graph):
            continue
        of_base = readers.get(base, ())
        read = {u for r in of_base for u in uses(r) if views.base(u) == base}
        # Other calls of libraries may look at the memory that a view is of, or give results in its layout.
        if read != {node.name} or node.name in shown or any(product_of(r) is None for r in of_base):
            continue
        found = Definitions(graph, dict(zip(node.axes, node.type.shape, strict=True)))
        _, indices = views.access(node.name, node.axes, found.extents)
        kind = replace(node.type, strides=contiguous_strides(node.type.shape))
        value = found.moved(made.value, made.axes, indices)
        changed[node.name] = Compute(node.name, kind, node.axes, value, made.origins)
    if not changed:
        return graph
    nodes = tuple(changed.get(n.names[0], n) if n.names else n for n in graph.nodes)
    return eliminate_dead(replace(graph, nodes=nodes))


@dataclass(frozen=True, slots=True)
class _Segment:
    """The elements ``start`` to ``start + size`` along a dimension."""

    start: sympy.Expr
    size: sympy.Expr


def _narrow_node(edit: Edit, node: Made) -> None:
    """Make a node only where it is read, if all that read it are such nodes themselves."""
    if edit.outside.intersection(node.names):
        return
    readers = edit.readers(node.names)
    parts = _parts_read(edit, readers, node.names, node.types[0].shape)
    if not parts:
        return
    for r in readers:
        values = tuple(_read_in(v, node.names, parts) for v in edit.values[r.names[0]])
        edit.put(r, [_with_values(r, values)])
    for name in node.names:
        edit.drop_views(name)
    edit.put(node, [_made_in(node, edit.values[node.names[0]], parts, edit.start.symbols)])


def _narrow_product(edit: Edit, product: Product) -> None:
    """Where several kernels alone read a product, and none of them beyond a part: they read a copy of the part, which
    then is what is wanted of the product."""
    name, kind = product.name, product.type
    readers = edit.readers((name,))
    if name in edit.outside or len(readers) < 2:
        return
    parts = _parts_read(edit, readers, (name,), kind.shape)
    if not parts:
        return
    part = fresh_name(f"{name}_part", edit.taken)
    shape = tuple(parts[d].size if d in parts else n for d, n in enumerate(kind.shape))
    axes = tuple(symbol(f"i{d}") for d in range(len(shape)))
    indices = tuple(a + parts[d].start if d in parts else a for d, a in enumerate(axes))
    indices = tuple(
        i.xreplace({a: sympy.S.Zero}) if n == 1 else i for i, a, n in zip(indices, axes, shape, strict=True)
    )
    for r in readers:
        values = tuple(rename_loads(_read_in(v, (name,), parts), {name: part}) for v in edit.values[r.names[0]])
        edit.put(r, [_with_values(r, values)])
    edit.drop_views(name)
    made = replace(kind, shape=shape, strides=contiguous_strides(shape))
    copy = Compute(part, made, axes, Load(name, indices, kind.dtype), product.node.origins)
    edit.put(product.node, [product.node, copy])


def _parts_read(
    edit: Edit, readers: Sequence[Reader], names: Sequence[str], shape: Sequence[sympy.Expr]
) -> dict[int, _Segment]:
    """The dimensions of which readers read a part alone, and which part."""
    places: list[tuple[tuple[Index, ...], dict[sympy.Symbol, sympy.Expr]]] = []
    left = [d for d, extent in enumerate(shape) if extent != 1]
    for r in readers:
        extents = extents_of(r)
        for load in (ld for v in edit.values[r.names[0]] for ld in loads(v) if ld.buffer in names):
            # Along most dimensions most readers read all, and then no other reader has to be asked.
            left = [d for d in left if not _goes_along(load.indices[d], extents, shape[d])]
            if not left:
                return {}
            places.append((load.indices, extents))
    parts: dict[int, _Segment] = {}
    for d in left if places else ():
        part = _part([(indices[d], extents) for indices, extents in places], shape[d], edit.start.symbols)
        if part is not None:
            parts[d] = part
    return parts


def _goes_along(index: Index, extents: dict[sympy.Symbol, sympy.Expr], extent: sympy.Expr) -> bool:
    """Whether an index is an axis that is as long as the dimension."""
    return isinstance(index, sympy.Symbol) and extents.get(index) == extent


def _part(
    places: Sequence[tuple[object, dict[sympy.Symbol, sympy.Expr]]], extent: sympy.Expr, table: SymbolTable
) -> _Segment | None:
    """The part of a dimension in which all indices lie; None where that is all of it, or is not known."""
    if extent == 1 or any(is_value(i) for i, _ in places):
        return None
    indices = {i for i, _ in places}
    (first, *others) = indices
    assert isinstance(first, sympy.Basic)
    if not others and all(not first.free_symbols & extents.keys() for _, extents in places):
        return _Segment(first, sympy.S.One)
    if not extent.is_Integer:
        return None
    bounds = [table.bounds(i, extents) for i, extents in places]  # type: ignore[arg-type]
    low = min(b[0] for b in bounds)
    highs = [b[1] for b in bounds]
    if low < 0 or any(h is None or h >= extent for h in highs):
        return None
    size = max(h for h in highs if h is not None) - low + 1
    return _Segment(sympy.Integer(low), sympy.Integer(size)) if 2 * size <= int(extent) else None


def _read_in(value: Expr, names: Sequence[str], parts: dict[int, _Segment]) -> Expr:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in names:
            indices = tuple(sympy.expand(i - parts[d].start) if d in parts else i for d, i in enumerate(e.indices))  # type: ignore[operator]
            return Load(e.buffer, indices, e.dtype)
        return None

    return rewrite(value, leaf)


def _made_in(node: Made, values: tuple[Expr, ...], parts: dict[int, _Segment], table: SymbolTable) -> Made:
    """The node over a part of its elements."""
    shape = tuple(parts[d].size if d in parts else n for d, n in enumerate(node.types[0].shape))
    env = {a: a + parts[d].start for d, a in enumerate(node.axes) if d in parts}
    # An axis of one element keeps its name, so that what is read element by element still is.
    extents = {a: n for a, n in zip(node.axes, shape, strict=True) if n != 1}
    found = Definitions(Graph("part", (), (), (), table), extents)
    moved = tuple(found.moved(v, tuple(env), tuple(env.values())) for v in values)
    types = tuple(replace(t, shape=shape, strides=contiguous_strides(shape)) for t in node.types)
    made = _with_values(node, moved)
    assert isinstance(made, (Compute, Reduction))
    return replace(made, type=types[0]) if isinstance(made, Compute) else replace(made, types=types)


def _with_values(node: Reader, values: tuple[Expr, ...]) -> Reader:
    return replace(node, value=values[0]) if isinstance(node, Compute) else replace(node, values=values)


def _views_of_products(graph: Graph) -> Graph:
    """Where a kernel alone reads a product, at fewer places than there are: it reads a view of it, which is the part
    of the product that is wanted."""
    views, makers, hint = views_of(graph), makers_of(graph), graph.symbols.hint
    taken: set[str] | None = None
    changed: dict[str, list[Node]] = {}
    for name, readers in readers_of(graph).items():
        product = product_of(makers.get(name))
        if product is None or len(readers) != 1 or name in results_of(graph):
            continue
        (reader,) = readers
        if not isinstance(reader, Compute) or hint(reader.type.numel) >= hint(product.type.numel):
            continue
        if isinstance(reader.value, Load) or reader.name in changed:
            continue
        extents = extents_of(reader)
        value = views.resolve(reader.value, extents)
        places = {ld.indices for ld in loads(value) if ld.buffer == name}
        if len(places) != 1 or any(map(is_value, indices := places.pop())):
            continue
        taken = set(graph.types()) if taken is None else taken
        part = fresh_name(f"{name}_part", taken)
        kind = replace(product.type, shape=reader.type.shape, strides=contiguous_strides(reader.type.shape))
        made = Compute(part, kind, reader.axes, Load(name, indices, product.type.dtype), product.node.origins)
        read = Load(part, reader.axes, product.type.dtype)
        changed[reader.name] = [made, replace(reader, value=_reading(value, name, read))]
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in (changed.get(n.names[0], [n]) if n.names else [n])]
    return replace(graph, nodes=tuple(nodes))


def _reading(value: Expr, name: str, read: Load) -> Expr:
    """A value that reads something else where it read a tensor."""
    return rewrite(value, lambda e: read if isinstance(e, Load) and e.buffer == name else None)


__all__ = ["narrow"]
