"""Keys of places: what a decision is about, without any name.

The place of a node is the graph around it: what makes its operands, so many steps back, what reads its results, and the
types of all else. Layers that repeat so have the same keys, and are decided alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from ...ir.graph.facts import makers_of, users_of
from ...ir.graph.graph import Graph, Input, IRModule, uses
from ...ir.text.structure import structural_key

# Steps back from the nodes of a place, and digits of a key.
BACK, DIGITS = 2, 16


def place_key(graph: Graph, names: Sequence[str], module: IRModule | None = None, back: int = BACK) -> str:
    """The key of the place of some results of a graph: 16 hex digits.

    ``module`` resolves the functions that the graph calls.
    """
    makers, users = makers_of(graph), users_of(graph)
    outputs = list(names)
    for name in names:
        outputs += [made for k in users.get(name, ()) for made in graph.nodes[k].names]
    inside: set[str] = set()
    for name in outputs:
        _step_back(graph, name, back if name in names else 0, inside)
    nodes = tuple(n for n in graph.nodes if not inside.isdisjoint(n.names))
    made = {name for n in nodes for name in n.names}
    types, given = graph.types(), {i.name: i for i in graph.inputs if isinstance(i, Input)}
    read = dict.fromkeys(name for n in nodes for name in uses(n) if name not in made)
    inputs = tuple(given.get(name) or Input(name, types[name]) for name in read if name in types)
    ends = tuple(dict.fromkeys(name for name in outputs if name in makers or name in read))
    around = Graph("place", inputs, nodes, ends, graph.symbols)
    left = sum(1 for name in names if name in graph.outputs)
    return text_key((structural_key(around, module), str(left)))


def _step_back(graph: Graph, name: str, steps: int, inside: set[str]) -> None:
    node = makers_of(graph).get(name)
    if node is None:
        return
    inside.update(node.names)
    for read in uses(node) if steps else ():
        _step_back(graph, read, steps - 1, inside)


def text_key(parts: Iterable[str]) -> str:
    """A key of what some texts tell."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:DIGITS]
