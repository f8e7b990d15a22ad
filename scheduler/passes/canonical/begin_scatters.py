"""A sum of a tensor and of what is scattered into zeros is scattered into that tensor.

The gradient of an embedding whose table also multiplies is such: it goes into what the product made, of which rows that
no index names are not touched.
"""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Call, Const, Expr, Load
from ....ir.graph.facts import users_of
from ....ir.graph.graph import Compute, Graph, Library, Node, Scatter
from ...facts.definitions import Definitions


def begin_scatters(graph: Graph) -> Graph:
    """Let sums that are scattered into zeros begin with a library's result to which they alone are added."""
    if not any(isinstance(n, Scatter) and n.monoid == SUM for n in graph.nodes):
        return graph
    found = Definitions(graph)
    begun: dict[str, Scatter] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, Compute) and (made := _addend(found, node)) is not None:
            scatter, other = made
            gone.add(scatter.name)
            values = (other, *scatter.values[1:])
            begun[node.name] = replace(scatter, name=node.name, axes=node.axes, values=values)
    if not begun:
        return graph
    left = [n for n in graph.nodes if gone.isdisjoint(n.names)]
    nodes: list[Node] = [begun.get(n.name, n) if isinstance(n, Compute) else n for n in left]
    return replace(graph, nodes=tuple(nodes))


def _addend(found: Definitions, node: Compute) -> tuple[Scatter, Expr] | None:
    """The scatter into zeros to which a node does nothing but to add a result of a library, and that result."""
    match node.value:
        case Call("add", (Load() as a, Load() as b), _):
            pairs = ((a, b), (b, a))
        case _:
            return None
    here = found.within(dict(zip(node.axes, node.type.shape, strict=True)))
    for term, other in pairs:
        scatter = found.makers.get(term.buffer)
        if not isinstance(scatter, Scatter) or scatter.monoid != SUM or term.indices != node.axes:
            continue
        initial = found.within(dict(zip(scatter.axes, scatter.type.shape, strict=True))).peel(scatter.initial)
        is_alone = len(users_of(found.graph)[term.buffer]) == 1 and term.buffer not in found.graph.outputs
        is_zero = isinstance(initial, Const) and initial.value == 0
        if is_alone and is_zero and scatter.type == node.type and term.buffer != other.buffer:
            made = found.makers.get(here.base(other).buffer)
            if isinstance(made, Library) and other.dtype is node.type.dtype:
                return scatter, other
    return None
