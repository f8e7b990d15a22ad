"""Scatters that begin with a constant, at places that no data decide, are element-wise: each element knows its point.

The gradient of an embedding of positions is such, whose indices count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.value import Const, Expr, IndexValue, Select, call, cast, is_value, rewrite
from ....ir.graph.graph import Compute, Graph, Node, Scatter
from ...facts.definitions import Definitions
from ...facts.views import map_value


def settle_scatters(graph: Graph) -> Graph:
    """Write scatters at known places, one point a place at most, as what each element is.

    Those over a tensor that is there stay: they may touch the elements that are named alone.
    """
    if not any(isinstance(n, Scatter) for n in graph.nodes):
        return graph
    found = Definitions(graph)
    nodes: list[Node] = [_settled(found, n) if isinstance(n, Scatter) else n for n in graph.nodes]
    same = all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class _Places:
    """The point of each source axis that goes to an element, and the conditions under which one does."""

    points: dict[sympy.Symbol, sympy.Expr]
    inside: list[Expr]


def _settled(found: Definitions, node: Scatter) -> Node:
    over = dict(zip(node.axes, node.type.shape, strict=True))
    initial = found.within(over).peel(node.initial)
    if not isinstance(initial, Const):
        return node
    initial = cast(initial, node.initial.dtype)
    extents = dict(zip(node.source_axes, node.source_shape, strict=True))
    known = [p if not is_value(p) else found.within(extents).settled(p) for p in node.positions]  # type: ignore[arg-type]
    places = _places(found.within(extents), node, known)
    if places is None:
        return node
    value = map_value(node.value, places.points)
    value = rewrite(value, lambda _: None, lambda i: simplify(i, over, found.views.table))
    if node.monoid is not None:
        (value,) = node.monoid.combine((initial,), (value,))
    for condition in reversed(places.inside):
        value = Select(condition, value, initial)
    return Compute(node.name, node.type, node.axes, value, node.origins)


def _places(found: Definitions, node: Scatter, positions: Sequence[object]) -> _Places | None:
    """Which point goes to an element; None where several may, or one may go to none."""
    points: dict[sympy.Symbol, sympy.Expr] = {}
    inside: list[Expr] = []
    for axis, extent, place in zip(node.axes, node.type.shape, positions, strict=True):
        if not isinstance(place, sympy.Expr) or not found.is_position(place):
            return None
        if not found.is_position(extent - 1 - place):
            return None
        moving = [a for a in node.source_axes if a in place.free_symbols]
        if not moving:
            if extent != 1:
                inside.append(call("eq", _value(axis), _value(place)))
            continue
        first = sympy.expand(place - moving[0])
        if len(moving) > 1 or moving[0] in points or not first.free_symbols.isdisjoint(node.source_axes):
            return None
        (source,) = moving
        points[source] = axis - first
        if first != 0:
            inside.append(call("le", _value(first), _value(axis)))
        if sympy.expand(first + found.extents[source] - extent) != 0:
            inside.append(call("lt", _value(axis), _value(first + found.extents[source])))
    rest = [a for a in node.source_axes if a not in points]
    if any(found.extents[a] != 1 for a in rest):
        return None
    return _Places(points | dict.fromkeys(rest, sympy.S.Zero), inside)


def _value(index: sympy.Expr) -> Expr:
    return IndexValue(index, DType.INT64)
