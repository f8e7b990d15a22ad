"""Nodes in topological order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.graph.graph import Graph, Node, size_makers, sizes_read, uses
from ...ir.graph.sequences import sequence_of


def in_order(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """The graph with other nodes, such that each stands after what it waits for, otherwise in the order given."""
    before = waits(graph, nodes)
    done: dict[int, Node] = {}
    stack = list(reversed(range(len(nodes))))
    while stack:
        left = [k for k in before[stack[-1]] if k not in done]
        stack += left
        if not left:
            k = stack.pop()
            done.setdefault(k, nodes[k])
    return replace(graph, nodes=tuple(done.values()))


def waits(graph: Graph, nodes: Sequence[Node]) -> list[list[int]]:
    """For each of a graph's nodes the places of those that must stand before it: what makes the tensors that it reads
    and tells the sizes in it, and the call before it in its sequence.
    """
    makers = {name: k for k, node in enumerate(nodes) for name in node.names}
    sizes = size_makers(graph)
    last: dict[str, int] = {}
    found: list[list[int]] = []
    for k, node in enumerate(nodes):
        read = dict.fromkeys(uses(node))
        if sizes:
            read |= dict.fromkeys(sorted(sizes[s] for s in sizes_read(node) & sizes.keys()))
        before = [makers[n] for n in read if n in makers and makers[n] != k]
        if (sequence := sequence_of(node)) is not None:
            before += [last[sequence]] if sequence in last else []
            last[sequence] = k
        found.append(before)
    return found
