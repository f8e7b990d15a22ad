"""Drop nodes that no output needs."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.graph.effects import has_effect
from ....ir.graph.graph import Graph, Node, size_makers, sizes_read, uses
from ....ir.graph.sequences import sequence_of


def eliminate_dead(graph: Graph) -> Graph:
    """Keep what the outputs need, calls with effects, draws from a generator, on which later draws depend, and results
    that tell the sizes of what is kept.
    """
    makers = size_makers(graph)
    needed = {o for o in graph.outputs if isinstance(o, str)}
    sizes = {s for o in graph.outputs if isinstance(o, sympy.Basic) for s in o.free_symbols}
    needed.update(makers[s] for s in sizes & makers.keys())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if has_effect(node) or sequence_of(node) is not None or any(n in needed for n in node.names):
            kept.append(node)
            needed.update(uses(node))
            if makers:
                needed.update(makers[s] for s in sizes_read(node) & makers.keys())
    return graph if len(kept) == len(graph.nodes) else replace(graph, nodes=tuple(reversed(kept)))
