"""Attention written in plain operations becomes a reduction by the attention monoid: scores, a function of them, one
pass over the columns that keeps maximum, sum and weighted values, and a projection.

No intermediate of all scores is left in memory once fusion has made one function of the four. Rows are those of eager:
NaN where every score is minus infinity or one is infinite, zeros where there is no column. Sources: Milakov and
Gimelshein 2018, Dao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.dtypes import DType
from ...ir.expr import Expr, Load, Select, call, cast, const, is_value, loads, rewrite, symbol
from ...ir.graph import Compute, Graph, Library, Node, Origin, Reduction, TensorType, View, uses
from ...ir.index import simplify
from ...ir.loops import contiguous_strides
from ...ir.monoid import ATTENTION, SUM, lowest
from ..definitions import Definitions
from ..domain import quotient
from .attention_match import SCORES, Attention, NoAttention, match_attention, product_of
from .simplify_algebra import simplify_call

# Kinds of device that have a rule for functions of this kind.
DEVICES: tuple[str, ...] = ("cpu", "cuda")
# What stands whole in a tile of a GPU's kernel: the features of values, and what scores are summed over.
GPU_WIDTHS = range(16, 257)


def rewrite_attention(graph: Graph, devices: Collection[str] = DEVICES) -> Graph:
    """Rewrite every attention on one of the kinds of ``devices`` whose scores nobody else needs.

    Where a softmax feeds a product and yet they stay apart, the product's ``reason`` says why.
    """
    if sum(product_of(n) is not None for n in graph.nodes) < 2:
        return graph
    found = Definitions.of(graph)
    types = graph.types()
    changed: dict[str, list[Node]] = {}
    taken = set(types)
    for node in graph.nodes:
        if not isinstance(node, Library) or node.types[0] is None:
            continue
        if node.types[0].device.partition(":")[0] not in devices:
            continue
        try:
            attention = match_attention(found, node, types)
            if attention is None:
                continue
            _check_alone(found, attention)
        except NoAttention as refusal:
            reason = f"{node.reason}; attention stays apart: {refusal}"
            changed[node.names[0]] = [replace(node, reason=reason)]
            continue
        changed[node.names[0]] = _Writer(graph, attention, _split_batch(found, attention), taken).nodes()
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in changed.get(n.names[0] if n.names else "", [n])]
    return replace(graph, nodes=tuple(nodes))


def _check_alone(found: Definitions, attention: Attention) -> None:
    """Raises NoAttention where something else than the attention needs its scores, or they are fewer than it reads."""
    outputs = {o for o in found.graph.outputs if isinstance(o, str)}
    stack, seen = [attention.first.name], {attention.first.name}
    while stack:
        name = stack.pop()
        if name in outputs:
            raise NoAttention(f"{name}, made of its scores, is an output of the graph")
        for reader in found.readers.get(name, ()):
            if reader is attention.product.node:
                continue
            if isinstance(reader, Library):
                raise NoAttention(f"{reader.names[0]} needs {name}, which is made of its scores")
            fresh = [n for n in reader.names if n not in seen]
            seen.update(fresh)
            stack += fresh
    a, hint = attention.axes, found.graph.symbols.hint
    space = [attention.extents[s] for s in (a.batch, a.row, a.column) if s is not None]
    if hint(sympy.Mul(*space)) > hint(attention.first.type.numel):
        raise NoAttention("its scores are fewer than those that it reads")
    kind = attention.product.type.device.partition(":")[0]
    widths = [attention.extents[s] for s in (a.inner, a.feature)]
    if kind == "cuda" and not all(w.is_Integer and int(w) in GPU_WIDTHS for w in widths):
        raise NoAttention(f"heads of {widths[0]} and {widths[1]} elements; a tile holds 16 to 256")
    if kind == "cuda" and attention.product.type.dtype is DType.FLOAT64:
        raise NoAttention("float64 is not for the tensor cores")


# --- the batch --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    """The batch axis as a mixed-radix number: digits and their extents, most significant first."""

    axes: list[sympy.Symbol] = field(default_factory=list)
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    # What each axis that was split became, oldest first.
    steps: list[dict[sympy.Symbol, sympy.Expr]] = field(default_factory=list)


def _split_batch(found: Definitions, attention: Attention) -> _Batch:
    """The batch axis cut such that no load of the attention divides it: heads, groups of heads, and so on."""
    batch = _Batch(extents=dict(attention.extents))
    if attention.axes.batch is None:
        return batch
    batch.axes = [attention.axes.batch]
    values = [attention.query, attention.key, attention.value, attention.score]
    pieces = {i for v in values for ld in loads(v) for i in ld.indices if not is_value(i)}
    table, fresh = found.graph.symbols, 0
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


def _next_cut(batch: _Batch, pieces: set[sympy.Expr]) -> tuple[sympy.Symbol, sympy.Expr, sympy.Expr] | None:
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


# --- the nodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    graph: Graph
    attention: Attention
    batch: _Batch
    taken: set[str]
    env: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """Scores, their function, the reduction, the projection, and the product's result as a view of it."""
        a, product = self.attention, self.attention.product
        axes, extents = a.axes, self.batch.extents
        kind = product.type.dtype.compute
        batch = tuple(self.batch.axes)
        grid = (*batch, axes.row, axes.column)
        kept = (*batch, axes.row, axes.feature)
        scores, function, state, out = (self.fresh(s) for s in ("scores", "score", "state", "attention"))

        def marker(e: Expr) -> Expr | None:
            return Load(scores, grid, e.dtype) if isinstance(e, Load) and e.buffer == SCORES else None

        score = cast(rewrite(rewrite(self.value(a.score), marker), simplify_call), kind)
        made = call("mul", self.by_row(self.value(a.query)), self.value(a.key))
        origins = tuple(dict.fromkeys((*a.first.node.origins, *self.origins_between(), *product.node.origins)))
        names = tuple(f"{state}_{c.name}" for c in ATTENTION.components)
        self.taken.update(names)
        lifted = (Load(function, grid, kind), const(1.0, kind), self.value(a.value))
        return [
            self.renamed(Reduction((scores,), (self.type(grid, made.dtype),), grid, (axes.inner,),
                                   (extents[axes.inner],), SUM, (made,), a.first.node.origins)),
            self.renamed(Compute(function, self.type(grid, kind), grid, score, origins)),
            self.renamed(Reduction(names, (self.type(kept, kind),) * 3, kept, (axes.column,),
                                   (extents[axes.column],), ATTENTION, lifted, origins)),
            self.renamed(Compute(out, self.result_type(kept), kept,
                                 cast(self.projection(names, kept, kind), product.type.dtype), product.node.origins)),
            self.view(out, kept),
        ]  # fmt: skip

    def projection(self, names: tuple[str, ...], at: tuple[sympy.Symbol, ...], kind: DType) -> Expr:
        """Weighted values over the sum; eager's NaN where the greatest score is infinite, zeros without columns."""
        highest, total, weighted = (Load(n, at, kind) for n in names)
        odd = call("isinf", highest)
        zero = const(0.0, kind)
        plain = call("div", weighted, total)
        if self.attention.zero_for_nan:
            odd = call("logical_or", odd, call("isnan", total))
            return Select(odd, zero, plain)
        result = Select(odd, const(float("nan"), kind), plain)
        if self.attention.zero_for_empty:
            return Select(call("eq", highest, lowest(kind)), zero, result)
        columns = self.batch.extents[self.attention.axes.column]
        if self.graph.symbols.bounds(columns)[0] > 0:
            return result
        return Select(call("eq", total, zero), zero, result)

    def view(self, out: str, kept: tuple[sympy.Symbol, ...]) -> View:
        """The product's own result, whose batch is one axis."""
        product = self.attention.product
        axes = tuple(symbol(f"i{k}") for k in range(product.rank))
        *lead, i, j = axes
        row, feature = (j, i) if self.attention.transposed else (i, j)
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

    def result_type(self, kept: tuple[sympy.Symbol, ...]) -> TensorType:
        """The type of the projection: the memory of the product's result."""
        kind = self.attention.product.type
        *lead, i, j = kind.strides
        strides: list[sympy.Expr] = [j, i] if self.attention.transposed else [i, j]
        step = lead[0] if lead else sympy.S.One
        for s in reversed(self.batch.axes):
            strides.insert(0, step)
            step = step * self.batch.extents[s]
        return TensorType(tuple(self.batch.extents[s] for s in kept), tuple(strides), kind.dtype, kind.device)

    def type(self, axes: tuple[sympy.Symbol, ...], dtype: DType) -> TensorType:
        shape = tuple(self.batch.extents[s] for s in axes)
        return TensorType(shape, contiguous_strides(shape), dtype, self.attention.product.type.device)

    def value(self, e: Expr) -> Expr:
        """A value of the attention over the axes that the batch became."""
        for step in self.batch.steps:
            e = rewrite(e, lambda _: None, lambda i, s=step: i.xreplace(s))  # type: ignore[misc]
        # A row of one element keeps its name: it is the row of a tile.
        extents = {s: n for s, n in self.batch.extents.items() if n != 1 or s != self.attention.axes.row}
        return rewrite(e, lambda _: None, lambda i: simplify(i, extents, self.graph.symbols))

    def by_row(self, query: Expr) -> Expr:
        """A query that moves along the rows where there is one alone: it is the row of a tile."""
        row, types = self.attention.axes.row, self.graph.types()
        if self.attention.extents[row] != 1:
            return query

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or any(not is_value(i) and row in i.free_symbols for i in e.indices):
                return None
            single = [k for k, n in enumerate(types[e.buffer].shape) if n == 1 and e.indices[k] == 0]
            at = single[-1] if single else next((k for k, i in enumerate(e.indices) if not is_value(i)), None)
            return (
                None if at is None else replace(e, indices=(*e.indices[:at], e.indices[at] + row, *e.indices[at + 1 :]))
            )

        return rewrite(query, leaf)

    def origins_between(self) -> tuple[Origin, ...]:
        """The operations between the two products, for reports."""
        end = self.attention.product.name
        inside = {self.attention.first.name}
        origins: list[Origin] = []
        for node in self.graph.nodes:
            if end in node.names:
                break
            if not isinstance(node, View) and not inside.isdisjoint(uses(node)):
                origins += node.origins
            if not inside.isdisjoint(uses(node)):
                inside.update(node.names)
        return tuple(origins)

    def renamed(self, node: Any) -> Any:
        """The node with the axes that nodes have: i0, i1, … and r0."""
        reduced = node.reduce_axes if isinstance(node, Reduction) else ()
        env = {s: symbol(f"i{k}") for k, s in enumerate(node.axes)}
        env |= {s: symbol(f"r{k}") for k, s in enumerate(reduced)}

        def moved(e: Expr) -> Expr:
            return rewrite(e, lambda _: None, lambda i: i.xreplace(env) if i.free_symbols else i)

        axes = tuple(env[s] for s in node.axes)
        if isinstance(node, Reduction):
            values = tuple(moved(v) for v in node.values)
            return replace(node, axes=axes, reduce_axes=tuple(env[s] for s in reduced), values=values)
        return replace(node, axes=axes, value=moved(node.value))

    def fresh(self, suffix: str) -> str:
        name, k = f"{self.attention.product.name}_{suffix}", 0
        while name in self.taken:
            k += 1
            name = f"{self.attention.product.name}_{suffix}{k}"
        self.taken.add(name)
        return name
