"""Nodes in topological order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.graph.facts import fact, places_of
from ...ir.graph.graph import Graph, Node, size_makers, sizes_read, uses
from ...ir.graph.sequences import sequence_of


def in_order(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """The graph with other nodes, such that each stands after what it waits for, otherwise in the order given."""
    before = waits(replace(graph, nodes=tuple(nodes)))
    done: dict[int, Node] = {}
    stack = list(reversed(range(len(nodes))))
    while stack:
        left = [k for k in before[stack[-1]] if k not in done]
        stack += left
        if not left:
            k = stack.pop()
            done.setdefault(k, nodes[k])
    return replace(graph, nodes=tuple(done.values()))


@fact
def waits(graph: Graph) -> Sequence[Sequence[int]]:
    """For each node the positions of those that must stand before it: what makes the tensors that it reads and tells
    the sizes in it, and the call before it in its sequence.
    """
    places, sizes = places_of(graph), size_makers(graph)
    last: dict[str, int] = {}
    found: list[list[int]] = []
    for k, node in enumerate(graph.nodes):
        read = dict.fromkeys(uses(node))
        if sizes:
            read |= dict.fromkeys(sorted(sizes[s] for s in sizes_read(node) & sizes.keys()))
        before = [places[n] for n in read if n in places and places[n] != k]
        if (sequence := sequence_of(node)) is not None:
            before += [last[sequence]] if sequence in last else []
            last[sequence] = k
        found.append(before)
    return found
