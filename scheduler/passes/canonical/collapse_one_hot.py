"""A sum of terms that are zero but at one position is the term at that position.

The gradient of a negative log-likelihood is such a row, and a log-softmax before it sums the row: with the sum gone,
the two are point-wise and visit the logits once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Call, Const, Expr, IndexValue, Select, call, cast, const, free_symbols
from ....ir.graph.graph import Compute, Graph, Node, Reduction
from ...facts.definitions import Definitions
from ...facts.views import map_value


def collapse_one_hot(graph: Graph) -> Graph:
    """Take out of every sum the axes along which a comparison with a position leaves one term."""
    if not any(isinstance(n, Reduction) and n.monoid == SUM for n in graph.nodes):
        return graph
    found = Definitions(graph)
    nodes = [_collapsed(found, n) if isinstance(n, Reduction) and n.monoid == SUM else n for n in graph.nodes]
    same = all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if same else replace(graph, nodes=tuple(nodes))


def _collapsed(found: Definitions, node: Reduction) -> Node:
    extents = dict(zip((*node.axes, *node.reduce_axes), (*node.types[0].shape, *node.reduce_shape), strict=True))
    found = found.within(extents)
    value = found.peel(node.values[0])
    left = dict(zip(node.reduce_axes, node.reduce_shape, strict=True))
    for axis in node.reduce_axes:
        term = _term_at(found, value, axis, left[axis])
        if term is not None:
            value = term
            del left[axis]
    if len(left) == len(node.reduce_axes):
        return node
    value = cast(value, node.values[0].dtype, when_stored=True)
    if left:
        return replace(node, reduce_axes=tuple(left), reduce_shape=tuple(left.values()), values=(value,))
    return Compute(node.names[0], node.types[0], node.axes, value, node.origins)


def _term_at(found: Definitions, value: Expr, axis: sympy.Symbol, extent: sympy.Expr) -> Expr | None:
    """The one term along ``axis`` that may differ from zero, or None where there may be others."""
    match value:
        case Select(condition, if_true, if_false) if _is_zero(found.peel(if_false)):
            tests = list(_tests(found, condition))
            for test in tests:
                position = _position(found, test, axis)
                if position is None:
                    continue
                place = cast(position, DType.INT64)
                first, end = const(0, DType.INT64), IndexValue(extent, DType.INT64)
                env = {axis: place}
                zero = const(0, if_true.dtype)
                term = map_value(if_true, env)
                for other in tests:
                    if other is not test:
                        term = Select(map_value(other, env), term, zero)
                # Outermost: nothing is read at positions that do not exist.
                return Select(call("logical_and", call("le", first, place), call("lt", place, end)), term, zero)
    return None


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _tests(found: Definitions, condition: Expr) -> Iterator[Expr]:
    """Comparisons that all must hold where a condition does."""
    inner = found.peel(condition)
    match inner:
        case Call("logical_and", (a, b), _):
            yield from _tests(found, a)
            yield from _tests(found, b)
        case _:
            yield inner


def _position(found: Definitions, test: Expr, axis: sympy.Symbol) -> Expr | None:
    """What is compared with the place along ``axis``, if that is what a test does."""
    match test:
        case Call("eq", (a, b), _) if a.dtype.is_int:
            for place, other in ((a, b), (b, a)):
                if axis not in free_symbols(other) and found.settled(place) == axis:
                    return other
    return None
