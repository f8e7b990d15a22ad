"""How much memory a graph holds at most, as far as that is known before anything is fused."""

from __future__ import annotations

from ....ir.graph.facts import fact
from ....ir.graph.graph import Graph, Library, View, uses
from ...facts.views import readers_of, results_of, views_of


@fact
def peak_of(graph: Graph) -> int:
    """The most bytes that results of and operands for library calls, and what the graph returns, hold at once. What
    lies between kernels is not counted: fusion decides of it."""
    base, hint, count = views_of(graph).base, graph.symbols.hint, len(graph.nodes)
    results, readers = results_of(graph), readers_of(graph)
    last = {base(u): k for k, node in enumerate(graph.nodes) for u in uses(node)}
    change = [0] * (count + 1)
    for k, node in enumerate(graph.nodes):
        if isinstance(node, View):
            continue
        for name, kind in zip(node.names, node.types, strict=True):
            held = isinstance(node, Library) or name in results
            if kind is not None and (held or any(isinstance(r, Library) for r in readers.get(name, ()))):
                change[k] += hint(kind.nbytes)
                if name not in results:
                    change[last.get(name, k) + 1] -= hint(kind.nbytes)
    most = held_now = 0
    for c in change:
        held_now += c
        most = max(most, held_now)
    return most
