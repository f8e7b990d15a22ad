"""Parts of a graph: where few tensors pass from one to the next, so that each may be searched alone; and what tells
that two of them are the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ....ir.graph.facts import makers_of, places_of
from ....ir.graph.graph import (
    CallRegion,
    CallTensor,
    Compute,
    Graph,
    Input,
    Library,
    Node,
    Reduction,
    Scan,
    Scatter,
    SizeInput,
    View,
    uses,
)
from ...facts.definitions import unrounded
from ...facts.views import readers_of, results_of, views_of
from ..canonical.eliminate_common import rename
from ..products.operands import product_of
from .terms import is_linear

# Nodes of a part: no fewer where there is a choice, and no more where there is a place to cut.
LEAST_NODES, MOST_NODES = 12, 48


@dataclass(frozen=True, slots=True)
class GraphPart:
    """The nodes of a graph from ``start`` to ``stop``, as a ``graph`` of its own, at whose beginning stand the views
    ``shown`` that it reads and does not have."""

    start: int
    stop: int
    graph: Graph
    shown: frozenset[str]


def parts_of(graph: Graph) -> Iterator[GraphPart]:
    """The parts of a graph that have products, cut where fewest tensors pass."""
    last = _last_uses(graph)
    start = 0
    for stop in _cuts(graph, last):
        if any(product_of(n) is not None for n in graph.nodes[start:stop]):
            part = _part(graph, start, stop, last)
            if part is not None:
                yield part
        start = stop


def _last_uses(graph: Graph) -> dict[str, int]:
    """Behind which node each tensor is not read any more."""
    last = {u: k for k, node in enumerate(graph.nodes) for u in uses(node)}
    return last | {o: len(graph.nodes) for o in graph.outputs if isinstance(o, str)}


def _cuts(graph: Graph, last: dict[str, int]) -> list[int]:
    count = len(graph.nodes)
    passing, tied = [0] * (count + 1), [0] * (count + 1)
    # What passes is counted where it begins and where it ends.
    for k, node in enumerate(graph.nodes):
        for name in node.names:
            end = last.get(name, k)
            if end > k:
                passing[k + 1] += 1
                passing[min(end + 1, count)] -= 1
                if _is_tied(graph, node, name):
                    tied[k + 1] += 1
                    tied[min(end + 1, count)] -= 1
    for k in range(1, count + 1):
        passing[k] += passing[k - 1]
        tied[k] += tied[k - 1]
    cuts, start = list[int](), 0
    while count - start > MOST_NODES:
        found = [k for k in range(start + LEAST_NODES, min(start + MOST_NODES, count) + 1) if not tied[k]]
        if not found:
            found = [next((k for k in range(start + MOST_NODES, count) if not tied[k]), count)]
        start = min(found, key=lambda k: (passing[k], -k))
        cuts.append(start)
    return cuts if cuts and cuts[-1] == count else [*cuts, count]


def _is_tied(graph: Graph, node: Node, name: str) -> bool:
    """Whether a result and its only reader may be rewritten together, so that no cut may part them."""
    if isinstance(node, View):
        made = makers_of(graph).get(views_of(graph).base(name))
        return made is not None and _is_tied(graph, made, made.names[0])
    if name in results_of(graph) or len(readers_of(graph).get(name, ())) > 1:
        return False
    return product_of(node) is not None or (isinstance(node, Compute) and is_linear(unrounded(node.value)))


def _part(graph: Graph, start: int, stop: int, last: dict[str, int]) -> GraphPart | None:
    """The nodes from one place to another; None where they need something whose type is not known."""
    nodes, places, makers, types = graph.nodes[start:stop], places_of(graph), makers_of(graph), graph.types()
    own = {name for n in nodes for name in n.names}
    shown: dict[str, Node] = {}
    inputs: dict[str, Input] = {}
    waiting = [u for n in reversed(nodes) for u in reversed(uses(n))]
    while waiting:
        name = waiting.pop()
        if name in own or name in shown or name in inputs:
            continue
        made = makers.get(name)
        if isinstance(made, View):
            shown[name] = made
            waiting += uses(made)
        elif name in types:
            inputs[name] = Input(name, types[name])
        else:
            return None
    views = sorted(shown.values(), key=lambda n: places[n.names[0]])
    sizes = [i for i in graph.inputs if isinstance(i, SizeInput)]
    outputs = tuple(name for n in nodes for name in n.names if last.get(name, -1) >= stop and name in types)
    part = replace(graph, inputs=(*sizes, *inputs.values()), nodes=(*views, *nodes), outputs=outputs)
    return GraphPart(start, stop, part, frozenset(shown))


@dataclass(slots=True)
class GraphKeys:
    """What is equal for graphs that differ in names alone. Most nodes are in many of the graphs that are asked about,
    so what a node is, whatever it reads, is found once for each of them."""

    # By identity, with the node, which has to live as long as its number stands for it.
    _nodes: dict[int, tuple[Node, int, tuple[str, ...]]] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def of(self, graph: Graph) -> Hashable:
        """The key of a graph."""
        places: dict[str, int] = {}
        found: list[Hashable] = []
        for i in graph.inputs:
            if isinstance(i, Input):
                places[i.name] = len(places)
                found.append(i.type)
        for node in graph.nodes:
            number, read = self._node(node)
            found.append((number, *(places.get(name, name) for name in read)))
            for name in node.names:
                places[name] = len(places)
        return tuple(found), tuple(places.get(o, o) if isinstance(o, str) else o for o in graph.outputs)

    def _node(self, node: Node) -> tuple[int, tuple[str, ...]]:
        """A number of what a node is, and the tensors that it reads, in their order."""
        known = self._nodes.get(id(node))
        if known is None:
            read = tuple(dict.fromkeys(uses(node)))
            key = _key(rename(node, {name: f"t{k}" for k, name in enumerate(read)}), node.types)
            known = self._nodes[id(node)] = node, self._numbers.setdefault(key, len(self._numbers)), read
        return known[1], known[2]


def _key(node: Node, types: Sequence[object]) -> Hashable:
    """What a node is, but for its own names."""
    match node:
        case Library():
            return node.target, repr(node.args), repr(node.kwargs), tuple(types), node.rounded
        case View():
            return "view", node.type, node.source, node.axes, node.indices, node.offset
        case Compute():
            return "compute", node.type, node.axes, node.value
        case Reduction():
            return node.types, node.axes, node.reduce_axes, node.reduce_shape, node.monoid, node.values
        case Scan():
            return "scan", node.types, node.axes, node.scan_axis, node.monoid, node.values
        case Scatter():
            return node.type, node.axes, node.source_axes, node.source_shape, node.monoid, node.values
        case CallTensor() | CallRegion():
            return id(node)  # they are made after this pass


__all__ = ["GraphKeys", "GraphPart", "parts_of"]
