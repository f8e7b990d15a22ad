"""Products of plain matrices of float32 on CPUs as calls of oneDNN, where that is faster at them than BLAS.

ATen's products are BLAS's. Where that has narrower vectors than the processor, oneDNN multiplies the same matrices, the
weight as it lies or transposed, in half the time. Its calls cost more before they multiply, so that few rows stay
BLAS's. Where rows vary, the program calls the one or the other by their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from operator import is_

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import symbol
from ....ir.graph.by_size import by_size
from ....ir.graph.effects import LINEAR, PLAIN_WEIGHT
from ....ir.graph.facts import makers_of, names_in
from ....ir.graph.graph import Graph, Library, Node, Ref, TensorType, View
from ....ir.machine import Machine
from ....ir.nest.loops import contiguous_strides
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.products.contraction_cpu import onednn_rows, onednn_times
from ...decisions import Alternative, place_key, text_key
from ..canonical.names import fresh_name

# The ways of the decision: either library, or both, of which the number of rows says which is called.
BLAS, ONEDNN, BY_ROWS = "BLAS", "oneDNN", "by rows"
_PRODUCTS = ("aten::mm.default", "aten::addmm.default")
_REASON = "oneDNN, whose vectors are twice as wide as those of BLAS"


def multiply_by_onednn(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace ATen's products of plain matrices by oneDNN's where those are faster."""
    if not any(isinstance(n, Library) and n.target in _PRODUCTS for n in graph.nodes):
        return graph
    types, taken, nodes = graph.types(), set(names_in(graph)), list[Node]()
    for node in graph.nodes:
        nodes += onednn_product(node, types, graph, taken, context) if isinstance(node, Library) else (node,)
    # As many nodes may be others: a weight whose transpose is there needs no view.
    is_same = len(nodes) == len(graph.nodes) and all(map(is_, nodes, graph.nodes))
    return graph if is_same else replace(graph, nodes=tuple(nodes))


def onednn_product(
    node: Library, types: Mapping[str, TensorType], graph: Graph, taken: set[str], context: PassContext
) -> Collection[Node]:
    """A call of ATen's product as one of oneDNN, with the view of its weight that this reads, where that is faster; as
    both, of which one is called, where that varies; the call as it is otherwise. ``taken`` are names in use, to which
    those of new nodes are added."""
    library = _library(node, types, graph, context) if context.fast else BLAS
    if library == BLAS:
        return (node,)
    *bias, left, right = node.args
    weight = types[right.name]
    name, views = _transposed(node, right.name, types, graph, taken)
    args = (left, Ref(name), bias[0] if bias else None, "none", (), PLAIN_WEIGHT)
    if library == ONEDNN:
        return *views, replace(node, target=LINEAR, args=args, reason=f"{node.reason}: {_REASON}")
    rows, (inner, columns) = types[left.name].shape[0], map(int, weight.shape)
    least = onednn_rows(inner, columns, context.target_of(weight.device).machine)
    assert least is not None
    other = replace(node, target=LINEAR, args=args, reason=f"{node.reason}; from {least} rows {_REASON}")
    return *views, by_size(rows, least, node, other)


def _transposed(
    node: Library, weight: str, types: Mapping[str, TensorType], graph: Graph, taken: set[str]
) -> tuple[str, tuple[View, ...]]:
    """The transpose of a weight: the name of what it is a transpose of, or that of a view, which is made."""
    known, (row, column) = types[weight], (symbol("i0"), symbol("i1"))
    kind = replace(known, shape=known.shape[::-1], strides=known.strides[::-1])
    maker = makers_of(graph).get(weight)
    if isinstance(maker, View) and maker.indices == maker.axes[::-1] and maker.offset == 0:
        if types.get(maker.source) == kind:
            return maker.source, ()
    name = fresh_name(f"{node.names[0]}_weight", taken)
    return name, (View(name, kind, weight, (row, column), (column, row), sympy.S.Zero, node.origins),)


def _library(node: Library, types: Mapping[str, TensorType], graph: Graph, context: PassContext) -> str:
    """Which library multiplies: oneDNN where a call multiplies matrices that it takes, and BLAS is slower at it, either
    where rows vary and each is faster at some."""
    table = graph.symbols
    out = node.types[0]
    if node.target not in _PRODUCTS or node.kwargs or out is None or not has_kernels(out.device):
        return BLAS
    if not all(isinstance(a, Ref) for a in node.args):
        return BLAS
    *bias, a, b = (types[r.name] for r in node.args)
    if any(k.dtype is not DType.FLOAT32 or k.device != out.device for k in (*bias, a, b, out)):
        return BLAS
    # Sizes of a weight are numbers, and a bias is a row of them.
    if not all(n.is_Integer and n > 0 for n in b.shape) or out.strides != contiguous_strides(out.shape):
        return BLAS
    if not _fills_memory(a) or not _fills_memory(b):
        return BLAS
    if any(k.shape != b.shape[1:] or k.strides != (sympy.S.One,) for k in bias):
        return BLAS
    rows, inner, columns = (table.hint(n) for n in (a.shape[0], *b.shape))
    machine = context.target_of(out.device).machine
    by_cost, times = _by_cost(a.shape[0], inner, columns, table, machine), onednn_times(rows, inner, columns, machine)
    if times is None:
        return by_cost
    ways = [Alternative(BLAS, times[0]), Alternative(ONEDNN, times[1])]
    if by_cost == BY_ROWS:
        ways.append(Alternative(BY_ROWS, min(times)))
    return context.decide(
        "blas", lambda: _key(node, types, graph), tuple(ways), by_cost, at=node.names[0],
        nbytes=sum(table.hint(k.nbytes) for k in (a, b, out)), reason=f"{rows} x {inner} x {columns}",
    )  # fmt: skip


def _by_cost(rows: sympy.Expr, inner: int, columns: int, table: SymbolTable, machine: Machine) -> str:
    """The faster library at all numbers of rows, or either by their number: typical ones do not tell for all."""
    least = onednn_rows(inner, columns, machine)
    if least is None:
        return BLAS
    lower, most = table.bounds(rows)[0], table.most(rows)
    if lower >= least:
        return ONEDNN
    return BLAS if most is not None and most < least else BY_ROWS


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
