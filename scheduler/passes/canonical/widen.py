"""Which roundings to half types a kernel may leave out. Once a graph has been widened a conversion is what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Const, Expr, Select, rewrite
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, Scan, Scatter
from ...context import USUAL, PassContext

_Range = tuple[float, float]
# Up to where each type holds all whole numbers.
_WHOLE = {DType.FLOAT16: 1 << 11, DType.BFLOAT16: 1 << 8}
# How far a whole number is followed to what it is made of.
_DEPTH = 8


def widen(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Say which conversions to half types are made only when stored, so that a kernel goes on in float32; others round.

    With fast numerics those are made of what is computed in float32, and with either of whole numbers that the half
    type holds, which loses nothing. What comes to a half type from float64, or from other whole numbers, was sent there
    by the user: it is rounded, or infinite, as are eight bits. So is what is read as it is stored: import writes that
    as a ``bitcast`` of a half type to itself, of which nothing is left here. So the pass runs once.
    """
    nodes = tuple(_widened(n, context.fast) for n in graph.nodes)
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
    low, high = _range(value, _DEPTH)
    return -_WHOLE[dtype] <= low and high <= _WHOLE[dtype]


def _range(e: Expr, depth: int) -> _Range:
    """The least and the greatest that a whole number may be."""
    if e.dtype is DType.BOOL:
        return 0, 1
    if not e.dtype.is_int:
        return -math.inf, math.inf
    least = -(1 << (e.dtype.bits - 1)) if e.dtype.is_signed else 0
    every = (least, least + (1 << e.dtype.bits) - 1)
    found = _made(e, depth) if depth else every
    return found if every[0] <= found[0] and found[1] <= every[1] else every


def _made(e: Expr, depth: int) -> _Range:
    """What is known of a whole number from what it is made of; it may not fit its type, and then wraps."""
    match e:
        case Const(number):
            return number, number
        case Cast(value):
            return _range(value, depth - 1)
        case Select(_, if_true, if_false):
            (a, b), (c, d) = _range(if_true, depth - 1), _range(if_false, depth - 1)
            return min(a, c), max(b, d)
        case Call(fn, args) if fn in _RULES:
            return _RULES[fn](*(_range(a, depth - 1) for a in args))
    return -math.inf, math.inf


def _masked(a: _Range, b: _Range) -> _Range:
    """Bits of what is not negative are no more than it."""
    bounds = [high for low, high in (a, b) if low >= 0]
    return (0, min(bounds)) if bounds else (-math.inf, math.inf)


def _shifted(a: _Range, by: _Range) -> _Range:
    if by[0] != by[1] or not 0 <= by[0] < 64:
        return min(a[0], 0), max(a[1], 0)
    return a[0] // 2 ** by[0], a[1] // 2 ** by[0]


def _product(a: _Range, b: _Range) -> _Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


_RULES: dict[str, Callable[..., _Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "bit_and": _masked,
    "shr": _shifted,
}
