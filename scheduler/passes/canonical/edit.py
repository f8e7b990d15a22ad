"""A graph while a pass rewrites nodes of it, one after another. Who reads what is kept up to date, so a step costs what
it touches and not what the graph has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import sympy

from ....ir.expr.value import Expr, is_value, loads
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Node, Reduction, Scan, View, node_values, uses
from ...facts.views import ViewMap, results_of, views_of

Reader: TypeAlias = Compute | Reduction | Scan
_READERS = (Compute, Reduction, Scan)


@dataclass(slots=True)
class Edit:
    """``values`` are those of nodes, by their first names, read through all views; ``outside`` is what others than such
    nodes ask for: results of the graph, operands of libraries, and what data decide the view of."""

    start: Graph
    views: ViewMap
    outside: set[str]
    taken: set[str]
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    # What stands at the place of each node that the graph began with, and at which of these places a node stands.
    _slots: list[list[Node]] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)
    _readers: dict[str, dict[str, None]] = field(default_factory=dict)
    _shows: dict[str, list[View]] = field(default_factory=dict)
    _is_changed: bool = False

    @classmethod
    def of(cls, graph: Graph) -> Edit:
        views, outside = views_of(graph), set(results_of(graph))
        edit = cls(graph, views, outside, set(names_in(graph)))
        for k, node in enumerate(graph.nodes):
            edit._slots.append([node])
            if isinstance(node, _READERS):
                extents = extents_of(node)
                edit._add(node, k, tuple(views.resolve(v, extents) for v in node_values(node)))
                continue
            edit._add(node, k)
            if isinstance(node, View):
                edit._shows.setdefault(views.base(node.name), []).append(node)
            if not isinstance(node, View) or any(map(is_value, node.indices)):
                outside.update(views.base(u) for u in uses(node))
        return edit

    @property
    def graph(self) -> Graph:
        """The graph as it is by now."""
        if not self._is_changed:
            return self.start
        return replace(self.start, nodes=tuple(n for slot in self._slots for n in slot))

    def readers(self, names: Iterable[str]) -> list[Reader]:
        """The nodes that read one of some tensors, in their order."""
        found = {r: self.nodes[r] for name in names for r in self._readers.get(name, ())}
        ordered = sorted(found, key=lambda r: (k := self._places[r], self._slots[k].index(found[r])))
        return [n for r in ordered if isinstance(n := found[r], _READERS)]

    def put(self, node: Node, new: Sequence[Node]) -> None:
        """Nodes that read through no view, in the place of one."""
        at = self._places[node.names[0]]
        self._remove(node)
        for n in new:
            self._add(n, at, node_values(n) if isinstance(n, _READERS) else ())
        slot = self._slots[at]
        k = next(k for k, n in enumerate(slot) if n is node)
        slot[k : k + 1] = new
        self._is_changed = True

    def drop_views(self, name: str) -> None:
        """Leave out all views of a tensor."""
        for view in self._shows.pop(name, ()):
            self.put(view, ())

    def _add(self, node: Node, at: int, values: tuple[Expr, ...] = ()) -> None:
        self.nodes.update(dict.fromkeys(node.names, node))
        self.taken.update(node.names)
        if not node.names:
            return
        first = node.names[0]
        self._places[first] = at
        if isinstance(node, _READERS):
            self.values[first] = values
            for name in {ld.buffer for v in values for ld in loads(v)}:
                self._readers.setdefault(name, {})[first] = None

    def _remove(self, node: Node) -> None:
        for v in self.values.pop(node.names[0], ()):
            for ld in loads(v):
                self._readers[ld.buffer].pop(node.names[0], None)
        for name in node.names:
            del self.nodes[name]


def extents_of(node: Reader) -> dict[sympy.Symbol, sympy.Expr]:
    """How long each axis of a node is, those that it reduces over included."""
    over = (node.reduce_axes, node.reduce_shape) if isinstance(node, Reduction) else ((), ())
    return dict(zip((*node.axes, *over[0]), (*node.types[0].shape, *over[1]), strict=True))
