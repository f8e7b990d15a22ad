"""Which roundings to half types a kernel may leave out. Once a graph has been widened a conversion is what it says."""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.value import Cast, Expr, rewrite
from ....ir.expr.wide import may_stay_wide
from ....ir.graph.graph import Compute, Graph, Node, Reduction, Scan, Scatter


def widen(graph: Graph) -> Graph:
    """Let a kernel keep in float32 what it computes in float32: such values are rounded where they are stored.

    What comes to a half type from float64, or from whole numbers that it does not hold, is rounded at once, and so is
    what a ``bitcast`` reads: whoever compares two values decides by their last bits.
    """
    nodes = tuple(_widened(n) for n in graph.nodes)
    return graph if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)) else replace(graph, nodes=nodes)


def _widened(node: Node) -> Node:
    match node:
        case Compute():
            value = _value(node.value)
            return node if value is node.value else replace(node, value=value)
        case Reduction() | Scan() | Scatter():
            values = tuple(map(_value, node.values))
            same = all(a is b for a, b in zip(values, node.values, strict=True))
            return node if same else replace(node, values=values)
    return node


def _value(value: Expr) -> Expr:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Cast) and not e.when_stored and may_stay_wide(e):
            return Cast(e.value, e.dtype, when_stored=True)
        return None

    return rewrite(value, leaf)
