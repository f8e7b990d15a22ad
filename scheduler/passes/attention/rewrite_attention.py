"""Attention written in plain operations becomes a reduction by the attention monoid: scores, a function of them, one
pass over the columns that keeps maximum, sum and weighted values, and a projection.

No intermediate of all scores is left in memory once fusion has made one function of the four. Rows are those of eager:
NaN where every score is minus infinity or one is infinite, zeros where there is no column. Sources: Milakov and
Gimelshein 2018, Dao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ATTENTION, SUM, lowest
from ....ir.expr.value import Expr, Load, Select, call, cast, const, is_value, rewrite
from ....ir.graph.graph import Compute, Graph, Library, Node, Origin, Reduction, View, uses
from ....ir.machine import Machine
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.attention import head_widths, multiplies
from ...facts.definitions import Definitions
from ...facts.order import in_order
from ...facts.views import map_value
from ...rules import Capability, can
from ..canonical.names import fresh_name
from ..canonical.simplify_algebra import simplify_call
from ..products.batch_axes import BatchWriter, digits_of, split_batch
from ..products.operands import product_of
from .attention_match import HIGHEST, SCORES, Attention, NoAttention, match_attention
from .plain_attention import library_call


def rewrite_attention(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Rewrite every attention whose scores nobody else needs, for targets with a rule for it.

    Where a softmax feeds a product and yet they stay apart, the product's ``reason`` says why.
    """
    if sum(product_of(n) is not None for n in graph.nodes) < 2:
        return graph
    found = Definitions(graph)
    types = graph.types()
    changed: dict[str, list[Node]] = {}
    taken = set(types)
    for node in graph.nodes:
        product = product_of(node)
        if product is None or not has_kernels(product.type.device):
            continue
        try:
            attention = match_attention(found, product, types)
            if attention is None or not can(target := context.target_of(product.type.device), Capability.ATTENTION):
                continue
            read = _check_alone(found, attention, target.machine)
            ours = bool(read) or not target.machine.calls_libraries
            called = None if ours else library_call(found, attention, types, taken, context)
            if called is not None:
                changed[product.name] = called
                continue
            parts = (attention.query, attention.key, attention.value, attention.score, attention.weight,
                     attention.shift, attention.extra)  # fmt: skip
            values = [v for v in parts if v is not None]
            batch = split_batch(graph.symbols, attention.axes.batch, attention.extents, values)
            frame = BatchWriter(graph, batch, attention.product.type.device)
            written = _AttentionWriter(graph, attention, frame, taken).nodes([found.makers[n] for n in read])
        except NoAttention as refusal:
            reason = f"{product.node.reason}; attention stays apart: {refusal}"
            changed[product.name] = [replace(product.node, reason=reason)]
            continue
        changed |= {n: [] for n in read}
        changed[product.name] = written
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in changed.get(n.names[0] if n.names else "", [n])]
    return in_order(graph, nodes)


def _check_alone(found: Definitions, attention: Attention, machine: Machine) -> list[str]:
    """Raises NoAttention where something else than the attention needs its scores, or they are fewer than it reads.

    Returns the maxima and sums of its softmax, which others may need.
    """
    statistics: dict[str, None] = {}
    outputs = {o for o in found.graph.outputs if isinstance(o, str)}
    stack, seen = [attention.first.name], {attention.first.name}
    while stack:
        name = stack.pop()
        if name in outputs:
            raise NoAttention(f"{name}, made of its scores, is an output of the graph")
        for reader in found.readers(name):
            if reader is attention.product.node:
                continue
            if isinstance(reader, Library):
                raise NoAttention(f"{reader.names[0]} needs {name}, which is made of its scores")
            if reader.names[0] in attention.statistics:
                statistics[reader.names[0]] = None
                continue
            fresh = [n for n in reader.names if n not in seen]
            seen.update(fresh)
            stack += fresh
    a, hint = attention.axes, found.graph.symbols.hint
    space = [attention.extents[s] for s in (a.batch, a.row, a.column) if s is not None]
    if hint(sympy.Mul(*space)) > hint(attention.first.type.numel):
        raise NoAttention("its scores are fewer than those that it reads")
    wide = [attention.extents[s] for s in (a.inner, a.feature)]
    held = head_widths(machine)
    if held is not None and not all(w.is_Integer and int(w) in held for w in wide):
        raise NoAttention(f"heads of {wide[0]} and {wide[1]} elements; a tile holds {held.start} to {held.stop - 1}")
    if not multiplies(machine, attention.product.type.dtype):
        raise NoAttention("float64 is not for the tensor cores")
    return [s for s in statistics if _is_read(found, s, seen, outputs)]


def _is_read(found: Definitions, name: str, inside: Collection[str], outputs: Collection[str]) -> bool:
    """Whether something else than the attention needs a number of its rows, or what is made of that."""
    if name in outputs:
        return True
    for reader in found.readers(name):
        if any(n in inside for n in reader.names):
            continue
        if not isinstance(reader, (Compute, View)) or _is_read(found, reader.name, inside, outputs):
            return True
    return False


# --- the nodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _AttentionWriter:
    graph: Graph
    attention: Attention
    frame: BatchWriter
    taken: set[str]

    def nodes(self, statistics: Sequence[Node] = ()) -> list[Node]:
        """Scores, their function, the reduction, the projection, and the product's result as a view of it; then those
        of the softmax's maxima and sums that something else reads. Raises NoAttention."""
        a, product, frame = self.attention, self.attention.product, self.frame
        axes, extents = a.axes, frame.batch.extents
        kind = product.type.dtype.compute
        batch = tuple(frame.batch.axes)
        grid = (*batch, axes.row, axes.column)
        kept = (*batch, axes.row, axes.feature)
        scores, function, state, out = (
            fresh_name(f"{product.name}_{s}", self.taken) for s in ("scores", "score", "state", "attention")
        )

        def marker(e: Expr) -> Expr | None:
            return Load(scores, grid, e.dtype) if isinstance(e, Load) and e.buffer == SCORES else None

        score = cast(rewrite(rewrite(frame.value(a.score, axes.row), marker), simplify_call), kind)
        made = call("mul", self.by_row(frame.value(a.query, axes.row)), frame.value(a.key, axes.row))
        origins = tuple(dict.fromkeys((*a.first.node.origins, *self.origins_between(), *product.node.origins)))
        names = tuple(f"{state}_{c.name}" for c in ATTENTION.components)
        self.taken.update(names)
        value = frame.value(a.value, axes.row)
        if a.weight is not None:
            value = call("mul", cast(rewrite(frame.value(a.weight, axes.row), simplify_call), kind), value)
        result = cast(self.projection(names, kept, kind), product.type.dtype, when_stored=not product.node.rounded)
        lifted = (Load(function, grid, kind), const(1.0, kind), value)
        return [
            frame.renamed(Reduction((scores,), (frame.type(grid, made.dtype),), grid, (axes.inner,),
                                   (extents[axes.inner],), SUM, (made,), a.first.node.origins)),
            frame.renamed(Compute(function, frame.type(grid, kind), grid, score, origins)),
            frame.renamed(Reduction(names, (frame.type(kept, kind),) * 3, kept, (axes.column,),
                                   (extents[axes.column],), ATTENTION, lifted, origins)),
            frame.renamed(Compute(out, frame.result_type(product, kept, a.transposed), kept, result,
                                  product.node.origins)),
            frame.view(product, out, a.transposed),
            *(self.statistic(n, names, kind) for n in statistics),
        ]  # fmt: skip

    def statistic(self, node: Node, names: tuple[str, ...], kind: DType) -> Compute:
        """A maximum or sum of the softmax, read from the state: a sum is NaN where a score is infinite, as eager's."""
        assert isinstance(node, Reduction)
        frame, axes = self.frame, self.attention.axes
        rows = tuple(frame.index(i) for i in self.attention.rows)
        places = digits_of(rows, node.axes, node.types[0].shape, frame.batch.extents, self.graph.symbols)
        kept = (*frame.batch.axes, axes.row)
        if places is None or any(s not in places and frame.batch.extents[s] != 1 for s in kept):
            raise NoAttention(f"{node.names[0]} is not one number a row of it")
        at = (*(places.get(s, sympy.S.Zero) for s in kept), sympy.S.Zero)
        highest, total = (Load(n, at, kind) for n in names[:2])
        if self.attention.statistics[node.names[0]] == "max":
            value: Expr = highest
        elif self.attention.shift is None:
            value = Select(call("isinf", highest), const(float("nan"), kind), total)
        else:
            by_row = dict(zip(kept, at, strict=False))
            rest = self.rest(highest, by_row)
            value = Select(call("isinf", highest), rest, call("mul", total, rest))
        value = cast(value, node.types[0].dtype, when_stored=True)
        return Compute(node.names[0], node.types[0], node.axes, value, node.origins)

    def projection(self, names: tuple[str, ...], at: tuple[sympy.Symbol, ...], kind: DType) -> Expr:
        """Weighted values over the sum; eager's NaN where the greatest score is infinite, zeros without columns."""
        highest, total, weighted = (Load(n, at, kind) for n in names)
        odd = call("isinf", highest)
        zero = const(0.0, kind)
        if self.attention.shift is not None or self.attention.extra is not None:
            return self.with_sink(highest, total, weighted)
        plain = call("div", weighted, total)
        if self.attention.zero_for_nan:
            odd = call("logical_or", odd, call("isnan", total))
            return Select(odd, zero, plain)
        result = Select(odd, const(float("nan"), kind), plain)
        if self.attention.zero_for_empty:
            return Select(call("eq", highest, lowest(kind)), zero, result)
        columns = self.frame.batch.extents[self.attention.axes.column]
        if self.graph.symbols.bounds(columns)[0] > 0:
            return result
        return Select(call("eq", total, zero), zero, result)

    def with_sink(self, highest: Load, total: Load, weighted: Load) -> Expr:
        """Weighted values over the sum and what is added to it, all as the model shifted them.

        Where the largest score is infinite, each exponential is that of the largest, or zero: so is the quotient.
        """
        if self.attention.zero_for_nan or self.attention.zero_for_empty:
            raise NoAttention("zeros stand for rows of a softmax whose sum has more than its exponentials")
        extra = self.number(self.attention.extra, highest)
        if self.attention.shift is None:
            odd: Expr = const(float("nan"), highest.dtype)
            return Select(call("isinf", highest), odd, call("div", weighted, call("add", total, extra)))
        rest = self.rest(highest)
        odd = call("div", rest, call("add", rest, extra))
        result = call("div", call("mul", weighted, rest), call("add", call("mul", total, rest), extra))
        return Select(call("isinf", highest), odd, result)

    def rest(self, highest: Load, by_row: Mapping[sympy.Symbol, sympy.Expr] | None = None) -> Expr:
        """The exponential of what the largest score is above what the model subtracts."""
        return call("exp", call("sub", highest, self.number(self.attention.shift, highest, by_row)))

    def number(self, e: Expr | None, highest: Load, by_row: Mapping[sympy.Symbol, sympy.Expr] | None = None) -> Expr:
        """A number of a row; zero of none."""
        if e is None:
            return const(0.0, highest.dtype)
        e = rewrite(self.frame.value(e, self.attention.axes.row), simplify_call)
        if by_row:
            e = map_value(e, dict(by_row))
        return rewrite(e, lambda x: highest if isinstance(x, Load) and x.buffer == HIGHEST else None)

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
