"""Products whose operand is made, element by element, of the results of other products become sums that take those
results up as they are made: the backward of attention, and attention without a softmax.

With the log-sum-exp of its rows at hand, a softmax is element-wise in its scores, so the gradients of queries, keys and
values are sums over columns or rows of such elements times a matrix. Elements are followed back to matrix products
through views and element-wise nodes, whatever they are; those products are then repeated, tile by tile, where their
results are wanted, and no matrix of all scores is left in memory. Sums over the same tiles share them. Source: Dao et
al. 2022, algorithm 4.

Attention without a softmax (a sigmoid, a squared ReLU, decays by position) is a sum of the same form, and so are other
products in a row. Without an exponential nothing says that scores are large: such sums are taken where a model of time
says so, where no product is repeated for it, and where a rule does them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ....ir.expr.monoid import SUM, WEIGHTED
from ....ir.expr.value import Cast, Expr, Load, call, cast, flops, loads, rewrite, walk
from ....ir.graph.graph import Compute, Graph, Node, Origin, Reduction, TensorType, uses
from ....ir.target import TargetOf, has_kernels
from ...context import USUAL, PassContext
from ...cost.attention import WIDEST, widths
from ...facts.definitions import Definitions
from ...rules import Capability, can
from ..canonical.names import fresh_name
from ..canonical.simplify_algebra import simplify_call
from .batch_axes import Batch, BatchWriter, split_batch
from .chain_choice import groups_of, refused_of
from .chain_elements import (
    BATCH,
    COLUMN,
    FEATURE,
    INNER,
    ROW,
    ChainedProduct,
    Elements,
    NoChainError,
    Score,
    buffer_of,
    exponentials,
    made_of_products,
)
from .chain_totals import Total, total_of
from .operands import Product, operand, product_of

# A common part of two functions of fewer operations is computed twice.
MIN_SHARED = 8


def chain_products(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Rewrite every product with a function of other products' results in an operand, where those are wanted by such
    products alone. Elsewhere their ``reason`` says why they stay."""
    products = [p for n in graph.nodes if (p := product_of(n)) is not None]
    if len(products) < 2:
        return graph
    types = graph.types()
    made = _Candidates(exponentials(graph), made_of_products(graph, _weighing(products, types, context.target_of)))
    if not any((made.raised | made.plain) & {p.left, p.right} for p in products):
        return graph
    found = Definitions(graph)
    chains: list[ChainedProduct | Total] = []
    for node in graph.nodes:
        chain = _sum_of_elements(found, node, types, made, context.target_of)
        if chain is not None:
            chains.append(chain)
    refused = refused_of(found, chains, context)
    chains = [c for c in chains if c.name not in refused]
    changed: dict[str, list[Node]] = {
        p.name: [replace(p.node, reason=f"{p.node.reason}; stays apart: {refused[p.name]}")]
        for p in products if p.name in refused
    }  # fmt: skip
    taken = set(types)
    for group in groups_of(found, chains, context.target_of):
        changed |= _ChainWriter(found, group, taken).nodes()
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in changed.get(n.names[0] if n.names else "", [n])]
    return replace(graph, nodes=tuple(nodes))


# --- finding them -----------------------------------------------------------------------------------------------------


def _is_taken(device: str, target_of: TargetOf) -> bool:
    return has_kernels(device) and can(target_of(device), Capability.ATTENTION)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tensors in whose elements an exponential can be, and those that are made of products which may be streamed
    without one."""

    raised: set[str]
    plain: set[str]


def _weighing(products: Sequence[Product], types: dict[str, TensorType], target_of: TargetOf) -> list[Product]:
    """The products of half types whose tiles a rule hands to another product by any point-wise function."""
    result: list[Product] = []
    for p in products:
        kind = p.type
        if kind.dtype.is_half and has_kernels(kind.device) and can(target_of(kind.device), Capability.WEIGHTED_SUMS):
            machine, width = target_of(kind.device).machine, types[p.left].shape[-1]
            if kind.dtype in machine.in_kernels and width.is_Integer and int(width) in widths(machine):
                result.append(p)
    return result


def _sum_of_elements(
    found: Definitions, node: Node, types: dict[str, TensorType], made: _Candidates, target_of: TargetOf
) -> ChainedProduct | Total | None:
    """What a node sums, where that is made of products' results with an exponential in it, or may do without."""
    if isinstance(node, Reduction):
        there = made.raised.intersection(uses(node)) and _is_taken(node.types[0].device, target_of)
        return total_of(found, node, types) if there else None
    product = product_of(node)
    if product is None or product.added is not None:
        return None
    operands = {product.left, product.right}
    if made.raised & operands and _is_taken(product.type.device, target_of):
        chain = _chain(found, product, types)
        if chain is not None and (chain.is_softmax or made.plain & operands):
            return chain
    elif made.plain & operands and product.type.dtype.is_half:
        return _chain(found, product, types)
    return None


def _chain(found: Definitions, product: Product, types: dict[str, TensorType]) -> ChainedProduct | None:
    """The product as a sum of elements made of other products' results, or None."""
    for transposed in (False, True):
        *_, m, d = reversed(product.type.shape[-2:]) if transposed else product.type.shape[-2:]
        extents = {ROW: m, COLUMN: types[product.left].shape[-1], FEATURE: d}
        lead: tuple[sympy.Symbol, ...] = ()
        if product.rank == 3:
            extents[BATCH], lead = product.type.shape[0], (BATCH,)
        here = found.within(extents)
        weights, values = (product.right, product.left) if transposed else (product.left, product.right)
        kind = product.type.dtype
        at = (*lead, *((COLUMN, ROW) if transposed else (ROW, COLUMN)))
        search = Elements(here, lead, types)
        try:
            element = search.expanded(Load(weights, at, kind))
        except NoChainError:
            continue
        if not search.scores:
            continue
        where = (*lead, *((FEATURE, COLUMN) if transposed else (COLUMN, FEATURE)))
        value = operand(here, Load(values, where, kind))
        return ChainedProduct(
            product, tuple(search.scores.values()), cast(element, kind.compute), value, extents, transposed,
            search.is_softmax(element),
        )  # fmt: skip
    return None


# --- the nodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ChainWriter:
    """Scores, elements, sums and their results in the products' memory, for one group."""

    found: Definitions
    group: list[ChainedProduct | Total]
    taken: set[str]
    frame: BatchWriter = field(init=False)
    scores: dict[str, Reduction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = [v for c in self.group for v in c.values]
        values += [v for c in self.group for s in c.scores for v in (s.query, s.key)]
        first = self.group[0]
        extents = {**first.extents, INNER: sympy.Integer(WIDEST), FEATURE: sympy.Integer(WIDEST)}
        axis = BATCH if BATCH in first.extents else None
        batch = split_batch(self.found.graph.symbols, axis, extents, values)
        self.frame = BatchWriter(self.found.graph, batch, first.device)

    @property
    def grid(self) -> tuple[sympy.Symbol, ...]:
        return (*self.frame.batch.axes, ROW, COLUMN)

    def nodes(self) -> dict[str, list[Node]]:
        """What each product of the group becomes. Nodes that several need stand with the first."""
        elements = {c.name: self._element(c) for c in self.group}
        made = self._shared(elements)
        result: dict[str, list[Node]] = {}
        for c in self.group:
            name = c.name
            nodes: list[Node] = [*self._scores(c, result)]
            nodes += [made.pop(n) for n in self._needed(elements[name], made)]
            result[name] = [
                *nodes,
                *(self._sum(c, elements[name]) if isinstance(c, ChainedProduct) else self._total(c, elements[name])),
            ]
        return result

    def _element(self, c: ChainedProduct | Total) -> Expr:
        """The element over the digits of the batch, of scores by the names of the nodes that make them."""
        names = {buffer_of(s.product): self._score_name(s) for s in c.scores}
        value = self.frame.value(c.element)

        def leaf(e: Expr) -> Expr | None:
            return Load(names[e.buffer], self.grid, e.dtype) if isinstance(e, Load) and e.buffer in names else None

        return rewrite(rewrite(value, leaf), simplify_call)

    def _score_name(self, score: Score) -> str:
        key = str((score.product.name, score.query, score.key))
        known = self.scores.get(key)
        if known is None:
            name = fresh_name(f"{score.product.name}_tile", self.taken)
            made = call("mul", self.frame.value(score.query), self.frame.value(score.key))
            known = self.scores[key] = self._over(INNER, score.width).renamed(
                Reduction((name,), (self.frame.type(self.grid, made.dtype),), self.grid, (INNER,), (score.width,),
                          SUM, (made,), score.product.node.origins)
            )  # fmt: skip
        return known.names[0]

    def _over(self, axis: sympy.Symbol, extent: sympy.Expr) -> BatchWriter:
        """The frame where one axis has its own extent."""
        batch = self.frame.batch
        return replace(self.frame, batch=Batch(batch.axes, {**batch.extents, axis: extent}, batch.steps))

    def _scores(self, c: ChainedProduct | Total, done: dict[str, list[Node]]) -> Iterator[Reduction]:
        before = {m.names[0] for nodes in done.values() for m in nodes if m.names}
        for s in c.scores:
            node = self.scores[str((s.product.name, s.query, s.key))]
            if node.names[0] not in before:
                yield node

    def _shared(self, elements: dict[str, Expr]) -> dict[str, Compute]:
        """Nodes for what several elements have in common; the elements then read those."""
        made: dict[str, Compute] = {}
        names = list(elements)
        for k, a in enumerate(names):
            for b in names[k + 1 :]:
                while (part := _common(elements[a], elements[b])) is not None:
                    node = self._compute(fresh_name(f"{a}_shared", self.taken), part, ())
                    made[node.name] = node
                    here = Load(node.name, self.grid, part.dtype)
                    for name in names:
                        elements[name] = _replaced(elements[name], part, here)
        return made

    def _needed(self, element: Expr, made: dict[str, Compute]) -> list[str]:
        return [n for n in dict.fromkeys(ld.buffer for ld in loads(element)) if n in made]

    def _compute(self, name: str, value: Expr, origins: tuple[Origin, ...]) -> Compute:
        return self.frame.renamed(Compute(name, self.frame.type(self.grid, value.dtype), self.grid, value, origins))

    def _sum(self, c: ChainedProduct, element: Expr) -> list[Node]:
        name, kind = c.name, c.product.type.dtype
        frame = self._over(FEATURE, c.extents[FEATURE])
        kept = (*frame.batch.axes, ROW, FEATURE)
        nodes, weight = self._weight(c, element)
        total, out = fresh_name(f"{name}_sum", self.taken), fresh_name(f"{name}_streamed", self.taken)
        value = call("mul", cast(weight, kind.compute), frame.value(c.value))
        reduction = Reduction((total,), (frame.type(kept, kind.compute),), kept, (COLUMN,), (c.extents[COLUMN],),
                              WEIGHTED, (value,), c.product.node.origins)  # fmt: skip
        result = cast(Load(total, kept, kind.compute), kind, when_stored=not c.product.node.rounded)
        made = Compute(out, frame.result_type(c.product, kept, c.transposed), kept, result, c.product.node.origins)
        return [*nodes, frame.renamed(reduction), frame.renamed(made), frame.view(c.product, out, c.transposed)]

    def _total(self, c: Total, element: Expr) -> list[Node]:
        """The sum of elements over digits of the batch, and the result in the memory of what it stands for."""
        nodes, weight = self._weight(c, element)
        return [*nodes, *c.written(self.frame, weight, fresh_name(f"{c.name}_total", self.taken))]

    def _weight(self, c: ChainedProduct | Total, element: Expr) -> tuple[list[Node], Load]:
        """The element as a node of the grid, with the nodes that it takes."""
        if isinstance(element, Load) and element.indices == self.grid and element.buffer in self.taken:
            return [], element
        node = self._compute(fresh_name(f"{c.name}_element", self.taken), element, self._origins(c))
        return [node], Load(node.name, self.grid, element.dtype)

    def _origins(self, c: ChainedProduct | Total) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys(o for s in c.scores for o in s.product.node.origins))


def _common(a: Expr, b: Expr) -> Expr | None:
    """The outermost part that two elements share and that is worth a node."""
    theirs = set(walk(b))
    return next((part for part in walk(a) if part in theirs and _worth_sharing(part)), None)


def _worth_sharing(part: Expr) -> bool:
    return not isinstance(part, (Load, Cast)) and part.dtype.is_float and flops(part) >= MIN_SHARED


def _replaced(e: Expr, part: Expr, by: Expr) -> Expr:
    return rewrite(e, lambda x: by if x == part else None)


__all__ = ["chain_products"]
