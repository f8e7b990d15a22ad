"""Which roundings to half types a kernel may leave out. Once a graph has been widened a conversion is what it says."""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Expr, Select, rewrite
from ....ir.expr.whole import held
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, Scan, Scatter
from ...context import USUAL, PassContext
from ...numerics import ROUNDING, keeps


def widen(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Say which conversions to half types are made only when stored, so that a kernel goes on in float32; others round.

    With fast numerics those are made of what is computed in float32, but at places that keep eager's rounding, and with
    either of whole numbers that the half type holds, which loses nothing. What comes to a half type from float64, or
    from other whole numbers, was sent there by the user: it is rounded, or infinite, as are eight bits. So is what is
    read as it is stored: import writes that as a ``bitcast`` of a half type to itself, of which nothing is left here.
    So the pass runs once.
    """
    nodes = tuple(_widened(n, context.fast and not keeps(n, ROUNDING)) for n in graph.nodes)
    return graph if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)) else replace(graph, nodes=nodes)


def _widened(node: Node, fast: bool) -> Node:
    match node:
        case Compute():
            value = _value(node.value, fast)
            return node if value is node.value else replace(node, value=value)
        case Reduction() | Scan() | Scatter():
            values = tuple(_value(v, fast) for v in node.values)
            same = all(a is b for a, b in zip(values, node.values, strict=True))
            return node if same else replace(node, values=values)
        case Library():
            return node if fast or node.rounded else replace(node, rounded=True)
    return node


def _value(value: Expr, fast: bool) -> Expr:
    def leaf(e: Expr) -> Expr | None:
        match e:
            case Cast(value, dtype) if _may_wait(value, dtype, fast):
                return Cast(value, dtype, when_stored=True)
            case Call("bitcast", (value,), dtype) if dtype is value.dtype:
                return _as_stored(value)
        return None

    return rewrite(value, leaf)


def _as_stored(e: Expr) -> Expr:
    match e:
        case Cast(value, dtype, True):
            return Cast(value, dtype)
        case Select(condition, if_true, if_false):
            return Select(condition, _as_stored(if_true), _as_stored(if_false))
    return e


def _may_wait(value: Expr, dtype: DType, fast: bool) -> bool:
    """Whether what is converted to a half type may stay in float32 until it is stored."""
    if not dtype.may_stay_wide:
        return False
    if isinstance(value, Cast) and value.dtype is DType.FLOAT32:  # torch rounds twice
        value = value.value
    if value.dtype.is_float:
        return fast and value.dtype is not DType.FLOAT64
    return held(value, dtype)
