"""Library calls that are products of matrices of float32, row by row of the first: ``mm``, and ``addmm`` as it is."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...ir.expr.dtypes import DType
from ...ir.graph.graph import Graph, Library, Ref, TensorType

_PLACES = {"aten::mm.default": (None, 0, 1), "aten::addmm.default": (0, 1, 2)}


@dataclass(frozen=True, slots=True)
class RowProduct:
    """``result[row, column] = added + sum of left[row, k] * right[k, column]``; ``added`` is None where there is
    nothing to add."""

    type: TensorType
    left: str
    right: str
    added: str | None
    rows: sympy.Expr
    columns: sympy.Expr
    depth: sympy.Expr


def row_product(graph: Graph, node: Library) -> RowProduct | None:
    """A library call as such a product; None where it is none."""
    places = _PLACES.get(node.target)
    kind = node.types[0] if len(node.types) == 1 else None
    if places is None or node.kwargs or kind is None or kind.dtype is not DType.FLOAT32:
        return None
    if len(node.args) != places[2] + 1:
        return None
    names = [None if p is None else a.name if isinstance(a := node.args[p], Ref) else "" for p in places]
    if "" in names:
        return None
    added, left, right = names
    assert left is not None and right is not None
    types = graph.types()
    operands = (types[left], types[right])
    if any(t.dtype is not DType.FLOAT32 or sympy.S.One not in t.strides for t in operands):
        return None
    rows, depth = operands[0].shape
    columns = operands[1].shape[1]
    # A single row or column may have any stride, and none that a library takes.
    if any(e.is_Integer and int(e) < 2 for e in (rows, depth, columns)):
        return None
    if kind.strides != (columns, sympy.S.One):
        return None
    return RowProduct(kind, left, right, added, rows, columns, depth)


__all__ = ["RowProduct", "row_product"]
