"""The batch axis of matrix products as a mixed-radix number, and the nodes that stand for a product over its digits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Expr, Index, is_value, loads, rewrite, symbol
from ....ir.graph.graph import Compute, Graph, Reduction, TensorType, View
from ....ir.nest.loops import contiguous_strides
from ...facts.domain import quotient
from .operands import Product

_Node = TypeVar("_Node", Compute, Reduction)


@dataclass(slots=True)
class Batch:
    """The batch axis as a mixed-radix number: digits, most significant first, and the extents of all axes."""

    axes: list[sympy.Symbol] = field(default_factory=list)
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    # What each axis that was split became, oldest first.
    steps: list[dict[sympy.Symbol, sympy.Expr]] = field(default_factory=list)


def split_batch(
    table: SymbolTable,
    axis: sympy.Symbol | None,
    extents: Mapping[sympy.Symbol, sympy.Expr],
    values: Iterable[Expr],
) -> Batch:
    """The batch axis cut such that no load of the values divides it: heads, groups of heads, and so on."""
    batch = Batch(extents=dict(extents))
    if axis is None:
        return batch
    batch.axes = [axis]
    pieces = {i for v in values for ld in loads(v) for i in ld.indices if not is_value(i)}
    fresh = 0
    while (cut := _next_cut(batch, pieces)) is not None:
        axis, outer, inner = cut
        high, low = (symbol(f"att_batch{fresh + k}") for k in (0, 1))
        fresh += 2
        step = {axis: high * inner + low}
        del batch.extents[axis]
        batch.extents |= {high: outer, low: inner}
        at = batch.axes.index(axis)
        batch.axes[at : at + 1] = [high, low]
        batch.steps.append(step)
        pieces = {simplify(i.xreplace(step), batch.extents, table) for i in pieces}
    return batch


def _next_cut(batch: Batch, pieces: set[sympy.Expr]) -> tuple[sympy.Symbol, sympy.Expr, sympy.Expr] | None:
    """An axis that some index divides, and the extents of the two that it becomes."""
    found = []
    for index in pieces:
        for part in index.atoms(FloorDiv, ModularIndexing):
            axis = part.args[0]
            if axis not in batch.axes:
                continue
            by = part.args[1] if part.args[1] != 1 else part.args[2]
            outer = quotient(batch.extents[axis], by)
            if outer is not None:
                found.append((str(by), axis, outer, by))
    if not found:
        return None
    _, axis, outer, by = min(found, key=lambda f: (len(f[0]), f[0], str(f[1])))
    return axis, outer, by


def digits_of(
    indices: Sequence[sympy.Expr],
    axes: Sequence[sympy.Symbol],
    shape: Sequence[sympy.Expr],
    extents: Mapping[sympy.Symbol, sympy.Expr],
    table: SymbolTable,
) -> dict[sympy.Symbol, sympy.Expr] | None:
    """Digits in terms of the axes of a tensor that is read at ``indices`` in them: mixed-radix numbers, taken apart.

    None where they are not.
    """
    found: dict[sympy.Symbol, sympy.Expr] = {}
    bounds = dict(zip(axes, shape, strict=True))
    for index, axis in zip(indices, axes, strict=True):
        for term in sympy.Add.make_args(sympy.expand(index)):
            digits = [s for s in term.free_symbols if s in extents]
            if not digits and term == 0:
                continue
            step = quotient(term, digits[0]) if len(digits) == 1 else None
            if step is None or digits[0] in found:
                return None
            found[digits[0]] = simplify(ModularIndexing(axis, step, extents[digits[0]]), bounds, table)
    back = [simplify(i.xreplace(found), bounds, table) for i in indices]
    same = all(b == a or n == 1 for b, a, n in zip(back, axes, shape, strict=True))
    return found if same else None


@dataclass(frozen=True, slots=True)
class BatchWriter:
    """Writes nodes over the digits of a batch, on one device."""

    graph: Graph
    batch: Batch
    device: str

    def view(self, product: Product, out: str, transposed: bool) -> View:
        """The product's own result, whose batch is one axis, in ``out`` [batch, row, feature]; ``transposed`` where it
        is [batch, feature, row]."""
        axes = tuple(symbol(f"i{k}") for k in range(product.rank))
        *lead, i, j = axes
        row, feature = (j, i) if transposed else (i, j)
        digits: list[sympy.Expr] = []
        extents = dict(zip(axes, product.type.shape, strict=True))
        step: sympy.Expr = sympy.S.One
        for s in reversed(self.batch.axes):
            size = self.batch.extents[s]
            digit = ModularIndexing(lead[0], step, size) if len(self.batch.axes) > 1 else lead[0]
            digits.insert(0, simplify(digit, extents, self.graph.symbols))
            step = step * size
        return View(
            product.name, product.type, out, axes, (*digits, row, feature), sympy.S.Zero, product.node.origins
        )  # fmt: skip

    def result_type(self, product: Product, kept: tuple[sympy.Symbol, ...], transposed: bool) -> TensorType:
        """The type of ``out`` over the axes ``kept``: the memory of the product's result."""
        kind = product.type
        *lead, i, j = kind.strides
        strides: list[sympy.Expr] = [j, i] if transposed else [i, j]
        step = lead[0] if lead else sympy.S.One
        for s in reversed(self.batch.axes):
            strides.insert(0, step)
            step = step * self.batch.extents[s]
        return TensorType(tuple(self.batch.extents[s] for s in kept), tuple(strides), kind.dtype, kind.device)

    def type(self, axes: tuple[sympy.Symbol, ...], dtype: DType) -> TensorType:
        """A contiguous tensor over axes."""
        shape = tuple(self.batch.extents[s] for s in axes)
        return TensorType(shape, contiguous_strides(shape), dtype, self.device)

    def index(self, i: Index) -> sympy.Expr:
        """An index over the batch axis as one over its digits."""
        assert isinstance(i, sympy.Basic)
        for step in self.batch.steps:
            i = i.xreplace(step)
        return simplify(i, self.batch.extents, self.graph.symbols)

    def value(self, e: Expr, row: sympy.Symbol | None = None) -> Expr:
        """A value over the batch axis as one over its digits.

        ``row`` keeps its name where it has one element: it is the row of a tile.
        """
        extents = {s: n for s, n in self.batch.extents.items() if n != 1 or s != row}
        for step in self.batch.steps:
            e = _moved(e, step)
        return rewrite(e, lambda _: None, lambda i: simplify(i, extents, self.graph.symbols))

    def renamed(self, node: _Node) -> _Node:
        """The node with the axes that nodes have: i0, i1, … and r0."""
        reduced: tuple[sympy.Symbol, ...] = node.reduce_axes if isinstance(node, Reduction) else ()
        axes: tuple[sympy.Symbol, ...] = tuple(symbol(f"i{k}") for k in range(len(node.axes)))
        over: tuple[sympy.Symbol, ...] = tuple(symbol(f"r{k}") for k in range(len(reduced)))
        env: dict[sympy.Symbol, sympy.Expr] = dict(zip((*node.axes, *reduced), (*axes, *over), strict=True))
        if isinstance(node, Reduction):
            values = tuple(_moved(v, env) for v in node.values)
            return replace(node, axes=axes, reduce_axes=over, values=values)
        return replace(node, axes=axes, value=_moved(node.value, env))


def _moved(e: Expr, env: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    return rewrite(e, lambda _: None, lambda i: i.xreplace(env) if i.free_symbols else i)
