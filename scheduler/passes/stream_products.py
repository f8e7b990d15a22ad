"""Products whose operand is made, element by element, of the results of other products become sums that take those
results up as they are made: the backward of attention.

With the log-sum-exp of its rows at hand, a softmax is element-wise in its scores, so the gradients of queries, keys and
values are sums over columns or rows of such elements times a matrix. Elements are followed back to matrix products
through views and element-wise nodes, whatever they are; those products are then repeated, tile by tile, where their
results are wanted, and no matrix of all scores is left in memory. Sums over the same tiles share them. Source: Dao et
al. 2022, algorithm 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from ...ir.dtypes import DType
from ...ir.errors import MlcError
from ...ir.expr import Call, Cast, Expr, Load, call, cast, const, flops, is_value, loads, rewrite, walk
from ...ir.graph import Compute, Graph, Node, Origin, Reduction, TensorType, View, uses
from ...ir.monoid import SUM, WEIGHTED
from ..definitions import Definitions
from .batch_axes import Batch, Frame, split_batch
from .names import fresh_name
from .operands import Product, is_simple, made_of, mentions, operand, product_of, scaled
from .simplify_algebra import simplify_call

# Kinds of device that have a rule for functions of this kind.
DEVICES: tuple[str, ...] = ("cpu", "cuda")
# An element beyond so many operations is no function of scores any more.
MAX_NODES = 3000
# What stands whole beside a tile: the widths of the operands; on GPUs no less than a matrix instruction takes.
MAX_WIDTH, MIN_WIDTH_GPU = 256, 16
# Fewer rows or columns fill no tile.
MIN_ROWS = 4
# A common part of two functions of fewer operations is computed twice.
MIN_SHARED = 8


def stream_products(graph: Graph, devices: Collection[str] = DEVICES) -> Graph:
    """Rewrite every product with a softmax of other products' results in an operand, where those are wanted by such
    products alone. Elsewhere their ``reason`` says why they stay."""
    products = [p for n in graph.nodes if (p := product_of(n)) is not None]
    if len(products) < 3:
        return graph
    raised = _exponentials(graph)
    products = [p for p in products if raised & {p.left, p.right}]
    if not products:
        return graph
    found = Definitions.of(graph)
    types = graph.types()
    chains: list[_Chain] = []
    for product in products:
        if product.type.device.partition(":")[0] in devices and product.added is None:
            chain = _chain(found, product, types)
            if chain is not None:
                chains.append(chain)
    refused = _refused(found, chains)
    chains = [c for c in chains if c.product.name not in refused]
    changed: dict[str, list[Node]] = {
        p.name: [replace(p.node, reason=f"{p.node.reason}; stays apart: {refused[p.name]}")]
        for p in products if p.name in refused
    }  # fmt: skip
    taken = set(types)
    for group in _groups(found, chains):
        changed |= _Writer(found, group, taken).nodes()
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in changed.get(n.names[0] if n.names else "", [n])]
    return replace(graph, nodes=tuple(nodes))


# --- finding them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Score:
    """A product whose results make elements: the sum over ``inner`` of query * key at [batch, row, column]."""

    product: Product
    query: Expr
    key: Expr
    width: sympy.Expr


@dataclass(frozen=True, slots=True)
class _Chain:
    """``product[b, row, feature] = sum over columns of element * value``.

    ``element`` reads the results of ``scores[k]`` as the buffer ``names[k]``. ``transposed`` where the product's
    result is [b, feature, row].
    """

    product: Product
    scores: tuple[_Score, ...]
    element: Expr
    value: Expr
    extents: dict[sympy.Symbol, sympy.Expr]
    transposed: bool

    @property
    def space(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.extents[s] for s in (BATCH, ROW, COLUMN) if s in self.extents)


BATCH, ROW, COLUMN, FEATURE, INNER = (
    sympy.Symbol(f"att_{n}", integer=True, nonnegative=True) for n in ("batch", "row", "column", "feature", "inner")
)


class _NoChain(MlcError):
    """An operand is not made of products in a way that can be streamed."""


def _name(product: Product) -> str:
    """The buffer by which an element reads a product's result."""
    return f"scores of {product.name}"


def _chain(found: Definitions, product: Product, types: dict[str, TensorType]) -> _Chain | None:
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
        search = _Elements(here, lead, types)
        try:
            element = search.expanded(Load(weights, at, kind))
        except _NoChain:
            continue
        if not search.scores or not _is_softmax(element):
            continue
        where = (*lead, *((FEATURE, COLUMN) if transposed else (COLUMN, FEATURE)))
        value = operand(here, Load(values, where, kind))
        return _Chain(product, tuple(search.scores.values()), cast(element, kind.compute), value, extents, transposed)
    return None


def _exponentials(graph: Graph) -> set[str]:
    """Tensors in whose elements an exponential can be: made of one by element-wise nodes and views alone."""
    result: set[str] = set()
    for node in graph.nodes:
        match node:
            case View() if node.source in result:
                result.add(node.name)
            case Compute() if any(
                ld.buffer in result if isinstance(ld, Load) else isinstance(ld, Call) and ld.fn == "exp"
                for ld in walk(node.value)
            ):
                result.update(node.names)
    return result


def _is_softmax(element: Expr) -> bool:
    """Whether an exponential of scores minus something that each row or column has one of is in an element."""
    for e in walk(element):
        if isinstance(e, Call) and e.fn == "exp" and isinstance(e.args[0], Call) and e.args[0].fn == "sub":
            score, shift = e.args[0].args
            if any(_is_score(ld) for ld in loads(score)) and not any(_is_score(ld) for ld in loads(shift)):
                return True
    return False


def _is_score(load: Load) -> bool:
    return load.buffer.startswith("scores of ")


def _along(index: Any) -> tuple[bool, bool]:
    """Whether an index moves along rows and along columns."""
    return mentions(index, ROW), mentions(index, COLUMN)


class _Elements:
    """An operand's element as a function of products' results, of other tensors and of positions."""

    def __init__(self, found: Definitions, lead: tuple[sympy.Symbol, ...], types: dict[str, TensorType]) -> None:
        self.found = found
        self.lead = lead
        self.types = types
        self.scores: dict[str, _Score] = {}
        self.known: dict[Load, Expr] = {}
        self.count = 0

    def expanded(self, e: Expr) -> Expr:
        """The element read through views and element-wise nodes. Raises _NoChain."""
        self.count += sum(1 for _ in walk(e))
        if self.count > MAX_NODES:
            raise _NoChain(f"it has more than {MAX_NODES} operations")
        return rewrite(e, lambda x: self._load(x) if isinstance(x, Load) and not _is_score(x) else None)

    def _load(self, e: Load) -> Expr:
        known = self.known.get(e)
        if known is None:
            known = self.known[e] = self._resolved(self.found.base(e))
        return known

    def _resolved(self, e: Load) -> Expr:
        made = self.found.makers.get(e.buffer)
        product = product_of(made)
        if product is not None:
            score = self._score(product, e)
            return e if score is None else score
        everywhere = all(any(not is_value(i) and mentions(i, s) for i in e.indices) for s in (ROW, COLUMN))
        settled = self.found.settled_load(e)
        if isinstance(made, Compute) and (everywhere and settled is not None):
            value = self.found.moved(made.value, made.axes, settled.indices)
            before = len(self.scores)
            inside = self.expanded(value)
            if len(self.scores) > before or any(_is_score(ld) for ld in loads(inside)):
                return inside
        if settled is None:
            return e
        if isinstance(made, Compute) and is_simple(self.found, made):
            return self.expanded(self.found.moved(made.value, made.axes, settled.indices))
        return settled

    def _score(self, product: Product, e: Load) -> Expr | None:
        """A product's result as that of a score; None where it is read as any other tensor."""
        if any(is_value(i) for i in e.indices) or not product.type.dtype.is_float:
            return None
        *lead, i, j = e.indices
        if any(mentions(x, ROW, COLUMN) for x in lead):
            return None
        kind = product.type.dtype
        sides = (Load(product.left, (*lead, i, INNER), kind), Load(product.right, (*lead, INNER, j), kind))
        if _along(i) == (False, True) and _along(j) == (True, False):
            sides = sides[::-1]
        elif _along(i) != (True, False) or _along(j) != (False, True):
            return None
        width = self.types[product.left].shape[-1]
        inside = self.found.within({**self.found.extents, INNER: width})
        (query, a), (key, b) = (scaled(inside, ld) for ld in sides)
        known = self.scores.get(product.name)
        if known is not None and (known.query, known.key) != (query, key):
            raise _NoChain("results of several positions make one element")
        self.scores[product.name] = _Score(product, query, key, width)
        compute = kind.compute
        value: Expr = Load(_name(product), (*self.lead, ROW, COLUMN), compute)
        factor = a * b * product.alpha
        if factor != 1.0:
            value = call("mul", value, const(factor, compute))
        if product.added is not None and product.beta != 0.0:
            added = self._added(product.added, e.indices, kind)
            if product.beta != 1.0:
                added = call("mul", added, const(product.beta, compute))
            value = call("add", value, added)
        return cast(value, kind)

    def _added(self, name: str, indices: tuple[Any, ...], kind: DType) -> Expr:
        shape = self.types[name].shape
        at = indices[len(indices) - len(shape) :]
        at = tuple(sympy.S.Zero if n == 1 else i for i, n in zip(at, shape, strict=True))
        return cast(self._load(Load(name, at, kind)), kind.compute)


# --- which of them ----------------------------------------------------------------------------------------------------


def _refused(found: Definitions, chains: list[_Chain]) -> dict[str, str]:
    """The products that have to stay as they are, and why."""
    refused: dict[str, str] = {}
    hint = found.graph.symbols.hint
    for c in chains:
        widths = [c.extents[FEATURE], *(s.width for s in c.scores)]
        on_gpu = not c.product.type.device.startswith("cpu")
        least = MIN_WIDTH_GPU if on_gpu else 1
        if on_gpu and c.product.type.dtype is DType.FLOAT64:
            refused[c.product.name] = "float64 is not for the tensor cores"
        elif not all(w.is_Integer and least <= int(w) <= MAX_WIDTH for w in widths):
            refused[c.product.name] = f"operands are {', '.join(map(str, widths))} elements wide"
        elif min(hint(c.extents[ROW]), hint(c.extents[COLUMN])) < MIN_ROWS:
            refused[c.product.name] = "it has too few rows for tiles of them"
    known = {c.product.name: c for c in chains}
    while True:
        fresh: dict[str, str] = {}
        for c in known.values():
            if c.product.name in refused:
                continue
            for s in c.scores:
                other = _other_reader(found, s.product.name, known.keys() - refused.keys())
                if other is not None:
                    fresh[c.product.name] = f"{other} needs what is made of {s.product.name}"
        if not fresh:
            return refused
        refused |= fresh


def _other_reader(found: Definitions, name: str, allowed: Collection[str]) -> str | None:
    """Who reads a product's results, through views and element-wise nodes, and is none of some products."""
    outputs = {o for o in found.graph.outputs if isinstance(o, str)}
    stack, seen = [name], {name}
    while stack:
        current = stack.pop()
        if current in outputs:
            return f"the graph's output {current}"
        for reader in found.readers.get(current, ()):
            if isinstance(reader, (Compute, View)):
                if reader.name not in seen:
                    seen.add(reader.name)
                    stack.append(reader.name)
            elif not set(reader.names) <= set(allowed):
                return reader.names[0]
    return None


def _groups(found: Definitions, chains: list[_Chain]) -> Iterator[list[_Chain]]:
    """Chains over the same tiles, none of which needs the result of another."""
    left = list(chains)
    while left:
        group = [left.pop(0)]
        for c in list(left):
            same = c.space == group[0].space and {(s.query, s.key) for s in c.scores} & {
                (s.query, s.key) for g in group for s in g.scores
            }
            if same and not any(made_of(found, g.product.name) & {*uses(c.product.node)} for g in group):
                group.append(c)
                left.remove(c)
        yield group


# --- the nodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Writer:
    """Scores, elements, sums and their results in the products' memory, for one group."""

    found: Definitions
    group: list[_Chain]
    taken: set[str]
    frame: Frame = field(init=False)
    scores: dict[str, Reduction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = [v for c in self.group for v in (c.element, c.value)]
        values += [v for c in self.group for s in c.scores for v in (s.query, s.key)]
        first = self.group[0]
        extents = {**first.extents, INNER: sympy.Integer(MAX_WIDTH), FEATURE: sympy.Integer(MAX_WIDTH)}
        axis = BATCH if BATCH in first.extents else None
        batch = split_batch(self.found.graph.symbols, axis, extents, values)
        self.frame = Frame(self.found.graph, batch, first.product.type.device)

    @property
    def grid(self) -> tuple[sympy.Symbol, ...]:
        return (*self.frame.batch.axes, ROW, COLUMN)

    def nodes(self) -> dict[str, list[Node]]:
        """What each product of the group becomes. Nodes that several need stand with the first."""
        elements = {c.product.name: self._element(c) for c in self.group}
        made = self._shared(elements)
        result: dict[str, list[Node]] = {}
        for c in self.group:
            name = c.product.name
            nodes: list[Node] = [*self._scores(c, result)]
            nodes += [made.pop(n) for n in self._needed(elements[name], made)]
            result[name] = [*nodes, *self._sum(c, elements[name])]
        return result

    def _element(self, c: _Chain) -> Expr:
        """The element over the digits of the batch, of scores by the names of the nodes that make them."""
        names = {_name(s.product): self._score_name(s) for s in c.scores}
        value = self.frame.value(c.element)

        def leaf(e: Expr) -> Expr | None:
            return Load(names[e.buffer], self.grid, e.dtype) if isinstance(e, Load) and e.buffer in names else None

        return rewrite(rewrite(value, leaf), simplify_call)

    def _score_name(self, score: _Score) -> str:
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

    def _over(self, axis: sympy.Symbol, extent: sympy.Expr) -> Frame:
        """The frame where one axis has its own extent."""
        batch = self.frame.batch
        return replace(self.frame, batch=Batch(batch.axes, {**batch.extents, axis: extent}, batch.steps))

    def _scores(self, c: _Chain, done: dict[str, list[Node]]) -> Iterator[Reduction]:
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

    def _sum(self, c: _Chain, element: Expr) -> list[Node]:
        name, kind = c.product.name, c.product.type.dtype
        frame = self._over(FEATURE, c.extents[FEATURE])
        kept = (*frame.batch.axes, ROW, FEATURE)
        nodes: list[Node] = []
        if isinstance(element, Load) and element.indices == self.grid and element.buffer in self.taken:
            weight: Expr = element
        else:
            node = self._compute(fresh_name(f"{name}_element", self.taken), element, self._origins(c))
            nodes.append(node)
            weight = Load(node.name, self.grid, element.dtype)
        total, out = fresh_name(f"{name}_sum", self.taken), fresh_name(f"{name}_streamed", self.taken)
        value = call("mul", cast(weight, kind.compute), frame.value(c.value))
        reduction = Reduction((total,), (frame.type(kept, kind.compute),), kept, (COLUMN,), (c.extents[COLUMN],),
                              WEIGHTED, (value,), c.product.node.origins)  # fmt: skip
        result = cast(Load(total, kept, kind.compute), kind)
        made = Compute(out, frame.result_type(c.product, kept, c.transposed), kept, result, c.product.node.origins)
        return [*nodes, frame.renamed(reduction), frame.renamed(made), frame.view(c.product, out, c.transposed)]

    def _origins(self, c: _Chain) -> tuple[Origin, ...]:
        return tuple(dict.fromkeys(o for s in c.scores for o in s.product.node.origins))


def _common(a: Expr, b: Expr) -> Expr | None:
    """The outermost part that two elements share and that is worth a node."""
    theirs = set(walk(b))
    return next((part for part in walk(a) if part in theirs and _worth_sharing(part)), None)


def _worth_sharing(part: Expr) -> bool:
    return not isinstance(part, (Load, Cast)) and part.dtype.is_float and flops(part) >= MIN_SHARED


def _replaced(e: Expr, part: Expr, by: Expr) -> Expr:
    return rewrite(e, lambda x: by if x == part else None)


__all__ = ["stream_products"]
