"""Products of plain matrices of float32 on CPUs as calls of oneDNN, where that is faster at them than BLAS.

ATen's products are BLAS's. Where that has narrower vectors than the processor, oneDNN multiplies the same matrices, the
weight as it lies or transposed, in half the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import symbol
from ....ir.graph.effects import LINEAR, PLAIN_WEIGHT
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Graph, Library, Node, Ref, TensorType, View
from ....ir.nest.loops import contiguous_strides
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.products.contraction_cpu import onednn_multiplies, onednn_times
from ...decisions import Alternative, place_key, text_key
from ..canonical.names import fresh_name

_PRODUCTS = ("aten::mm.default", "aten::addmm.default")
_REASON = "oneDNN, whose vectors are twice as wide as those of BLAS"


def multiply_by_onednn(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace ATen's products of plain matrices by oneDNN's where those are faster."""
    if not any(isinstance(n, Library) and n.target in _PRODUCTS for n in graph.nodes):
        return graph
    types, taken, nodes = graph.types(), set(names_in(graph)), list[Node]()
    for node in graph.nodes:
        nodes += onednn_product(node, types, graph, taken, context) if isinstance(node, Library) else (node,)
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes))


def onednn_product(
    node: Library, types: Mapping[str, TensorType], graph: Graph, taken: set[str], context: PassContext
) -> Collection[Node]:
    """A call of ATen's product as one of oneDNN, with the view of its weight that this reads, where that is faster; the
    call as it is otherwise. ``taken`` are names in use, to which those of new nodes are added."""
    if not context.fast or not _is_faster(node, types, graph, context):
        return (node,)
    *bias, left, right = node.args
    weight, (row, column) = types[right.name], (symbol("i0"), symbol("i1"))
    name = fresh_name(f"{node.names[0]}_weight", taken)
    kind = replace(weight, shape=weight.shape[::-1], strides=weight.strides[::-1])
    view = View(name, kind, right.name, (row, column), (column, row), sympy.S.Zero, node.origins)
    args = (left, Ref(name), bias[0] if bias else None, "none", (), PLAIN_WEIGHT)
    return view, replace(node, target=LINEAR, args=args, reason=f"{node.reason}: {_REASON}")


def _is_faster(node: Library, types: Mapping[str, TensorType], graph: Graph, context: PassContext) -> bool:
    """Whether a call multiplies matrices that oneDNN takes, and is slower at it."""
    table = graph.symbols
    out = node.types[0]
    if node.target not in _PRODUCTS or node.kwargs or out is None or not has_kernels(out.device):
        return False
    if not all(isinstance(a, Ref) for a in node.args):
        return False
    *bias, a, b = (types[r.name] for r in node.args)
    if any(k.dtype is not DType.FLOAT32 or k.device != out.device for k in (*bias, a, b, out)):
        return False
    # Sizes of a weight are numbers, and a bias is a row of them.
    if not all(n.is_Integer and n > 0 for n in b.shape) or out.strides != contiguous_strides(out.shape):
        return False
    if not _fills_memory(a) or not _fills_memory(b):
        return False
    if any(k.shape != b.shape[1:] or k.strides != (sympy.S.One,) for k in bias):
        return False
    rows, inner, columns = (table.hint(n) for n in (a.shape[0], *b.shape))
    machine = context.target_of(out.device).machine
    by_cost, times = onednn_multiplies(rows, inner, columns, machine), onednn_times(rows, inner, columns, machine)
    if times is None:
        return by_cost
    chosen = context.decide(
        "blas", lambda: _key(node, types, graph), (Alternative("BLAS", times[0]), Alternative("oneDNN", times[1])),
        "oneDNN" if by_cost else "BLAS", at=node.names[0], nbytes=sum(table.hint(k.nbytes) for k in (a, b, out)),
        reason=f"{rows} x {inner} x {columns}",
    )  # fmt: skip
    return chosen == "oneDNN"


def _key(node: Library, types: Mapping[str, TensorType], graph: Graph) -> str:
    """The key of the place of a product, which another pass may be about to write."""
    if node.names[0] in names_in(graph):
        return place_key(graph, node.names)
    told = [types[r.name] for r in node.args]
    return text_key((node.target, *(f"{k.dtype.value} {k.shape} {k.strides} {k.device}" for k in told)))


def _fills_memory(kind: TensorType) -> bool:
    """Whether the elements of a matrix fill memory, row by row or column by column."""
    return kind.strides in (contiguous_strides(kind.shape), contiguous_strides(kind.shape[::-1])[::-1])


__all__ = ["multiply_by_onednn", "onednn_product"]
