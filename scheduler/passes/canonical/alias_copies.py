"""A copy whose elements already lie where the copy would put them is a view."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.expr.index import simplify
from ....ir.expr.value import Load, is_value
from ....ir.graph.facts import aliases_of
from ....ir.graph.graph import Compute, Graph, Input, Node, TensorType, View
from ...facts.views import ViewMap, views_of


def alias_copies(graph: Graph) -> Graph:
    """Turn ``clone`` and the like into views where source and copy have the same layout.

    A tensor that leaves the graph stays a copy: callers may write into it. So does a copy of an input, which callers
    may write into while it is still needed for the backward pass. Both hold for views that library calls make as well.
    """
    views = views_of(graph)
    types = graph.types()
    aliases = aliases_of(graph)
    inputs = {i.name for i in graph.inputs if isinstance(i, Input)}
    nodes: list[Node] = []
    for node in graph.nodes:
        view = None
        if isinstance(node, Compute) and node.name not in aliases.leaving:
            view = _as_view(node, views, types, graph)
        nodes.append(view if view is not None and inputs.isdisjoint(aliases[view.source]) else node)
    same = all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


def _as_view(node: Compute, views: ViewMap, types: dict[str, TensorType], graph: Graph) -> View | None:
    if not isinstance(node.value, Load) or any(is_value(i) for i in node.value.indices):
        return None
    extents = dict(zip(node.axes, node.type.shape, strict=True))
    source, indices = views.access(node.value.buffer, node.value.indices, extents)
    if any(is_value(i) for i in indices):
        return None
    made = types[source]
    if made.device != node.type.device:
        return None
    offset = sympy.Add(*(i * s for i, s in zip(indices, made.strides, strict=True)))
    # A unit dimension has no say in the layout.
    wanted = sympy.Add(
        *(a * s for a, s, n in zip(node.axes, node.type.strides, node.type.shape, strict=True) if n != 1)
    )
    units = {a: sympy.S.Zero for a, n in zip(node.axes, node.type.shape, strict=True) if n == 1}
    start = sympy.expand(simplify(sympy.expand(offset.xreplace(units)), extents, graph.symbols) - wanted)
    if start.free_symbols & set(node.axes):
        return None
    return View(node.name, node.type, source, node.axes, indices, start, node.origins)
