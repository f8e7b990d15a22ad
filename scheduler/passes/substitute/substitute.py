"""Graph substitution: products replaced by others that give the same results, where those are faster.

Rules (``rules.py``) say what may stand in the place of a product. Which of them are used, and in which order, is found
by a search (``search.py``): of rules that look for products far apart on the whole graph, of the others on its parts
(``parts.py``), of which equal ones are searched once. What nobody reads any more of what is in front of a product is
left out then (``narrow.py``), which may be a reason to search again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from ....ir.graph.facts import names_in
from ....ir.graph.graph import Graph, Input, Node
from ...context import USUAL, PassContext
from ...decisions import SUBSTITUTE, Alternative, place_key
from ..products.chain_elements import exponentials
from ..products.operands import product_of
from .narrow import narrow
from .parts import GraphKeys, GraphPart, parts_of
from .peak import peak_of
from .rules import RULES
from .search import GraphBudget, RewriteSearch, SearchStep

_FAR = tuple(r for r in RULES if r.wide)
_NEAR = tuple(r for r in RULES if not r.wide)


def substitute(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace products by others, again and again, until none is faster."""
    graph = narrow(graph)
    count = sum(product_of(n) is not None for n in graph.nodes)
    budget = GraphBudget()
    keys = GraphKeys()
    known: dict[Hashable, tuple[SearchStep, ...]] = {}
    if count > 1:
        before = graph
        search = RewriteSearch(_FAR, context, budget, keys, names_in(graph), lambda g: peak_of(g) <= peak_of(before))
        found = search.chosen(graph).graph
        graph = found if _is_taken(graph, found, context) else graph
    for _ in range(count):
        found = _in_parts(graph, context, budget, keys, known)
        if found is graph:
            break
        graph = narrow(found)
    return graph


def _is_taken(graph: Graph, found: Graph, context: PassContext) -> bool:
    """Whether what is faster by cost takes the place of a graph: unless somebody has decided otherwise."""
    if found is graph or context.decider is None:
        return True
    kept = {n.names[0]: n for n in found.nodes if n.names}
    replaced = [n.names[0] for n in graph.nodes if product_of(n) is not None and kept.get(n.names[0]) is not n]
    names = replaced or [n.names[0] for n in graph.nodes if n.names][:1]
    ways = (Alternative("replaced"), Alternative("as written"))
    reason = f"{', '.join(names)} by products that are faster"
    key = partial(place_key, graph, names)
    return context.decide(SUBSTITUTE, key, ways, "replaced", at=names[0], reason=reason) == "replaced"


def _in_parts(
    graph: Graph,
    context: PassContext,
    budget: GraphBudget,
    keys: GraphKeys,
    known: dict[Hashable, tuple[SearchStep, ...]],
) -> Graph:
    """The graph with each part replaced by the best that it could be, where it then needs no more memory."""
    changed: list[tuple[GraphPart, Graph]] = []
    taken = set(names_in(graph))
    raised = exponentials(graph)
    for part in parts_of(graph):
        search = RewriteSearch(_NEAR, context, budget, keys, taken, given=raised)
        key = keys.of(part.graph), tuple(isinstance(i, Input) and i.name in raised for i in part.graph.inputs)
        if key not in known:
            best = search.chosen(part.graph)
            known[key], found = best.steps, best.graph
        else:
            found = search.again(part.graph, known[key])
        if known[key] and peak_of(found) <= peak_of(part.graph) and _is_taken(part.graph, found, context):
            changed.append((part, found))
            taken |= names_in(found)
    if not changed:
        return graph
    nodes: list[Node] = []
    done = 0
    for part, found in changed:
        nodes += graph.nodes[done : part.start]
        nodes += (n for n in found.nodes if not n.names or n.names[0] not in part.shown)
        done = part.stop
    return replace(graph, nodes=(*nodes, *graph.nodes[done:]))


__all__ = ["substitute"]
