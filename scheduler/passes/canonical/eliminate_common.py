"""Compute equal things once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ....ir.expr.value import rename_loads
from ....ir.graph.facts import aliases_of
from ....ir.graph.graph import CallTensor, Compute, Graph, Library, Node, Reduction, Ref, Scan, Scatter, View


def eliminate_common(graph: Graph) -> Graph:
    """One node for all tensor nodes of equal definition. Library calls stay: they may be random, or large.

    A result of the graph stays by itself, and of equal nodes of which views leave it one is merged with others: callers
    may write into either of two results.
    """
    names: dict[str, str] = {}
    seen: dict[Hashable, tuple[str, ...]] = {}
    kept: list[Node] = []
    outputs = {o for o in graph.outputs if isinstance(o, str)}
    leaving = aliases_of(graph).leaving
    taken: set[Hashable] = set()  # those of which a view leaves the graph
    for node in graph.nodes:
        node = rename(node, names)
        key = _key(node) if outputs.isdisjoint(node.names) else None
        if key is not None and not leaving.isdisjoint(node.names) and not isinstance(node, View):
            if key in taken:
                key = None
            else:
                taken.add(key)
        twin = seen.get(key) if key is not None else None
        if twin is not None:
            names.update(zip(node.names, twin, strict=True))
            continue
        if key is not None:
            seen[key] = node.names
        kept.append(node)
    return graph if not names else replace(graph, nodes=tuple(kept))


def _key(node: Node) -> Hashable | None:
    match node:
        case Compute():
            return ("compute", node.type, node.axes, node.value)
        case Reduction():
            return ("reduction", node.types, node.axes, node.reduce_axes, node.reduce_shape, node.monoid, node.values)
        case Scan():
            return ("scan", node.types, node.axes, node.scan_axis, node.monoid, node.values)
        case Scatter():
            return ("scatter", node.type, node.axes, node.source_axes, node.source_shape, node.monoid, node.values)
        case View():
            return ("view", node.type, node.source, node.axes, node.indices, node.offset)
        case _:
            return None


def rename(node: Node, names: dict[str, str]) -> Node:
    """Point the reads of a node at other tensors."""
    if not names:
        return node
    match node:
        case Compute():
            value = rename_loads(node.value, names)
            return node if value is node.value else replace(node, value=value)
        case Reduction() | Scan() | Scatter():
            values = tuple(rename_loads(v, names) for v in node.values)
            return (
                node if all(a is b for a, b in zip(values, node.values, strict=True)) else replace(node, values=values)
            )
        case View() if node.source in names:
            return replace(node, source=names[node.source])
        case View():
            return node
        case _:
            return _rename_call(node, names)


def _rename_call(node: Node, names: dict[str, str]) -> Node:
    def arg(a: object) -> object:
        match a:
            case Ref(name):
                return Ref(names.get(name, name))
            case tuple():
                return tuple(arg(x) for x in a)
            case list():
                return [arg(x) for x in a]
            case _:
                return a

    match node:
        case Library():
            return replace(
                node, args=tuple(arg(a) for a in node.args), kwargs=tuple((k, arg(v)) for k, v in node.kwargs)
            )
        case CallTensor():
            into = tuple(None if t is None else names.get(t, t) for t in node.into)
            return replace(node, args=tuple(names.get(a, a) for a in node.args), into=into)
        case _:
            return node
