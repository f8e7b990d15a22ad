"""Arithmetic that does nothing, undone: identities that hold for every value, NaN and signed zeros included;
literals folded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Const, Expr, Select, call, const, rewrite, substitute_index
from ....ir.graph.graph import Compute, Graph, Node, Reduction, Scan, Scatter

_FOLD: dict[str, Callable[..., bool | int | float]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "neg": lambda a: -a,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_not": lambda a: not a,
}  # fmt: skip
# Comparisons that hold where the other does not; of floats neither may hold.
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def simplify_algebra(graph: Graph) -> Graph:
    """Apply ``simplify_call`` everywhere."""

    def value(v: Expr) -> Expr:
        return rewrite(v, simplify_call)

    nodes: list[Node] = []
    for n in graph.nodes:
        match n:
            case Compute():
                v = value(n.value)
                nodes.append(n if v is n.value else replace(n, value=v))
            case Reduction() if all(size == 1 for size in n.reduce_shape):
                nodes += _one_element(n)
            case Reduction() | Scan() | Scatter():
                vs = tuple(value(v) for v in n.values)
                same = all(a is b for a, b in zip(vs, n.values, strict=True))
                nodes.append(n if same else replace(n, values=vs))
            case _:
                nodes.append(n)
    same = len(nodes) == len(graph.nodes) and all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


def _one_element(n: Reduction) -> list[Compute]:
    """Combining one element is that element, lifted."""
    zero = dict.fromkeys(n.reduce_axes, sympy.S.Zero)
    return [
        Compute(name, t, n.axes, substitute_index(v, zero), n.origins)
        for name, t, v in zip(n.names, n.types, n.values, strict=True)
    ]


def simplify_call(e: Expr) -> Expr | None:
    """The simpler equal of one node, or None."""
    match e:
        case Select(Const(condition), if_true, if_false):
            return if_true if condition else if_false
        case Select(_, if_true, if_false) if if_true == if_false:
            return if_true
        case Select(condition, Const(True, DType.BOOL), Const(False, DType.BOOL)):
            return condition
        case Select(condition, Const(False, DType.BOOL), Const(True, DType.BOOL)):
            return call("logical_not", condition)
        case Call("logical_not", (Call(fn, (a, b), _),), _) if fn in _OPPOSITE and not a.dtype.is_float:
            return call(_OPPOSITE[fn], a, b)
        case Call(fn, args, dtype) if fn in _FOLD and all(isinstance(a, Const) for a in args):
            return _fold(fn, args, dtype)
        case Call("mul", (x, Const(value)), _) | Call("mul", (Const(value), x), _) if value == 1 and value is not True:
            return x
        case Call("div", (x, Const(value)), dtype):
            return _divide(x, value, dtype)
        case Call("sub", (x, Const(value)), _) if value == 0 and not _is_negative_zero(value):
            return x
        case Call("add", (x, Const(value)), dtype) | Call("add", (Const(value), x), dtype) if value == 0:
            # x + 0.0 turns -0.0 into 0.0; x + -0.0 is x.
            return x if dtype.is_int or _is_negative_zero(value) else None
        case Call("pow", (x, Const(value)), dtype) if dtype.is_float:
            return _power(x, value)
        case Call("logical_and", (x, Const(True)), _) | Call("logical_or", (x, Const(False)), _):
            return x
        case Call("logical_not", (Call("logical_not", (x,), _),), _) | Call("neg", (Call("neg", (x,), _),), _):
            return x
    return None


def _is_negative_zero(value: bool | int | float) -> bool:
    return isinstance(value, float) and value == 0 and math.copysign(1.0, value) < 0


def _fold(fn: str, args: tuple[Expr, ...], dtype: DType) -> Expr | None:
    values = [a.value for a in args if isinstance(a, Const)]
    if dtype.is_float and dtype is not DType.FLOAT64 and dtype is not DType.FLOAT32:
        return None
    try:
        return const(_FOLD[fn](*values), dtype) if dtype is not DType.FLOAT32 else None
    except (OverflowError, ValueError):
        return None


def _divide(x: Expr, value: bool | int | float, dtype: DType) -> Expr | None:
    if value == 1:
        return x
    # Dividing by a power of two is multiplying by its inverse, exactly.
    if (
        dtype.is_float
        and value
        and math.isfinite(value)
        and abs(math.frexp(value)[0]) == 0.5
        and 2**-100 < abs(value) < 2**100
    ):
        return Call("mul", (x, Const(1.0 / float(value), dtype)), dtype)
    return None


def _power(x: Expr, value: bool | int | float) -> Expr | None:
    match float(value):
        case 1.0:
            return x
        case 2.0:
            return Call("mul", (x, x), x.dtype)
        case 3.0:
            return Call("mul", (Call("mul", (x, x), x.dtype), x), x.dtype)
        case 0.5:
            return None
        case -1.0:
            return Call("reciprocal", (x,), x.dtype)
    return None
