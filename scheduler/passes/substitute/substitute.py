"""Graph substitution: products replaced by others that give the same results, where those are faster.

What is computed is read off the graph as sums of products over any number of tensors (``einsum.py``), which say nothing
of an order; the order is chosen by a model of time (``order.py``) and written as products again (``write.py``). Three
kinds of change come out of the one form:

- *reassociated*: (A B) C becomes A (B C), through views, transposed matrices, heads, repeated heads and factors. So a
  product with a weight of low rank (LoRA) never makes the weight, attention over compressed keys (MLA) never makes the
  keys, and attention without a softmax grows with the length and not with its square.
- *distributed*: X (W + A B) becomes X W + (X A) B.
- *narrowed*: rows and columns of which nobody reads the results are not multiplied; what is summed over rows is summed
  before the product.

Sources: Jia et al. 2019, "Optimizing DNN Computation with Relaxed Graph Substitutions" (MetaFlow); Smith and Gray 2018,
"opt_einsum".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.origin import Origin
from ....ir.expr.value import Call, Const, Expr, Index, Load, call, cast, is_value, symbol
from ....ir.graph.effects import has_effect
from ....ir.graph.facts import makers_of, names_in
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, TensorType, View, uses
from ....ir.machine import Machine
from ....ir.nest.loops import contiguous_strides
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.products.substitutions import ProductSize, is_worth, pass_time, product_time
from ...facts.definitions import Definitions, unrounded
from ...facts.views import readers_of, results_of, views_of
from ...rules import Capability, can
from ..canonical.eliminate_dead import eliminate_dead
from ..products.chain_elements import exponentials
from ..products.operands import Product, product_of
from .einsum import Einsum, EinsumReader
from .narrow import narrow
from .order import Multiplication, Orders
from .write import EinsumWriter, scaled_by

# Types in which products may be put in another order. Float16 may overflow on one way and not on the other.
_ORDERED = frozenset({DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16})
# Terms of an operand that is a sum.
MOST_TERMS = 3


def substitute(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace products by others, again and again, until none is faster."""
    products = [p for n in graph.nodes if (p := product_of(n)) is not None and has_kernels(p.type.device)]
    for _ in range(len(products)):
        found = _Substitutions(graph, context).replaced()
        if found is graph:
            break
        graph = narrow(found)
    return graph


@dataclass(frozen=True, slots=True)
class _Root:
    """A node whose elements are those of a product, read at ``indices`` in ``axes``, and summed over ``summed``."""

    node: Node
    product: Product
    axes: tuple[sympy.Symbol, ...]
    summed: tuple[sympy.Symbol, ...]
    extents: Mapping[sympy.Symbol, sympy.Expr]
    indices: tuple[Index, ...]

    @property
    def name(self) -> str:
        return self.node.names[0]

    @property
    def type(self) -> TensorType:
        kind = self.node.types[0]
        assert kind is not None
        return kind


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Nodes in the place of a root, and how long both take, in nanoseconds; ``gone`` are products that nobody reads any
    more, ``read`` are tensors that the new nodes read."""

    root: _Root
    nodes: tuple[Node, ...]
    before: float
    after: float
    gone: frozenset[str]
    read: frozenset[str]


@dataclass(slots=True)
class _Substitutions:
    graph: Graph
    context: PassContext
    reader: EinsumReader = field(init=False)
    found: Definitions = field(init=False)
    places: dict[str, int] = field(init=False)
    effects: list[int] = field(init=False)
    shown: list[str] = field(init=False)
    taken: set[str] = field(init=False)
    raised: set[str] | None = None

    def __post_init__(self) -> None:
        self.reader = EinsumReader(self.graph, self.graph.types())
        self.found = Definitions(self.graph)
        self.places = {name: k for k, n in enumerate(self.graph.nodes) for name in n.names}
        self.taken = set(names_in(self.graph))
        self.shown = [o for o in self.graph.outputs if isinstance(o, str)]
        self.effects = [k for k, n in enumerate(self.graph.nodes) if has_effect(n)]

    def replaced(self) -> Graph:
        """The graph with every product replaced for which another way is faster, where the ways do not meet: what is
        read by one is not taken away by another."""
        chosen: dict[str, _Replacement] = {}
        gone: set[str] = set()
        read: set[str] = set()
        for node in reversed(self.graph.nodes):
            product = product_of(node)
            if product is None or not has_kernels(product.type.device) or not product.type.dtype.is_float:
                continue
            if self.attends(product):
                continue
            goes = self.goes(product)
            roots = [r for r in self.roots(product) if goes or self.is_narrower(r)]
            found = [r for root in roots for r in self.rewrites(root, goes) if is_worth(r.before, r.after)]
            found = [r for r in found if not (r.gone & (gone | read) or r.read & gone or r.root.name in chosen)]
            if found:
                best = max(found, key=lambda r: r.before - r.after)
                chosen[best.root.name] = best
                gone |= best.gone
                read |= best.read
        if not chosen:
            return self.graph
        nodes: list[Node] = []
        for n in self.graph.nodes:
            here = chosen.get(n.names[0]) if n.names else None
            nodes += here.nodes if here is not None else (n,)
        return eliminate_dead(replace(self.graph, nodes=tuple(nodes)))

    def attends(self, product: Product) -> bool:
        """Whether a product is one of attention's, which belong to one kernel with the softmax between them."""
        if not can(self.context.target_of(product.type.device), Capability.ATTENTION):
            return False
        if self.raised is None:
            self.raised = exponentials(self.graph)
        return not self.raised.isdisjoint((product.left, product.right))

    # --- what may be replaced -----------------------------------------------------------------------------------------

    def roots(self, product: Product) -> Iterator[_Root]:
        """The product itself, and what alone is read of it: a part, chosen rows, a sum."""
        name, kind = product.name, product.type
        axes = self.reader.fresh(product.rank)
        yield _Root(product.node, product, axes, (), dict(zip(axes, kind.shape, strict=True)), axes)
        readers = readers_of(self.graph).get(name, ())
        if len(readers) == 1 and name not in results_of(self.graph):
            root = self.part(product, readers[0])
            if root is not None:
                yield root
        views = views_of(self.graph)
        read = {u for r in readers for u in uses(r) if views.base(u) == name}
        read |= {o for o in self.shown if views.base(o) == name}
        if len(read) == 1:
            (view,) = (makers_of(self.graph)[u] for u in read)
            if isinstance(view, View):
                yield self.root_at(view, product, Load(view.name, view.axes, view.type.dtype))

    def is_narrower(self, root: _Root) -> bool:
        """Whether a root has fewer elements than its product."""
        hint = self.graph.symbols.hint
        return hint(root.type.numel) < hint(root.product.type.numel)

    def part(self, product: Product, reader: Node) -> _Root | None:
        """A reader that makes nothing of a product's elements but a copy of some, or their sum."""
        if isinstance(reader, Compute):
            load = unrounded(reader.value)
            if isinstance(load, Load) and load.dtype is reader.type.dtype:
                return self.root_at(reader, product, load)
        wide = product.type.dtype in (DType.FLOAT32, DType.FLOAT64) and self.context.fast
        if wide and isinstance(reader, Reduction) and reader.monoid == SUM and len(reader.values) == 1:
            load = unrounded(reader.values[0])
            if isinstance(load, Load) and load.dtype is reader.types[0].dtype:
                return self.root_at(reader, product, load)
        return None

    def root_at(self, node: Node, product: Product, load: Load) -> _Root:
        """A node that is the element that ``load`` reads, in axes of its own."""
        assert isinstance(node, (View, Compute, Reduction)) and node.types[0] is not None
        over = (node.reduce_axes, node.reduce_shape) if isinstance(node, Reduction) else ((), ())
        old = (*node.axes, *over[0])
        new = self.reader.fresh(len(old))
        extents = dict(zip(new, (*node.types[0].shape, *over[1]), strict=True))
        moved = self.found.within(extents).moved(load, old, new)
        assert isinstance(moved, Load)
        base = self.found.within(extents).base(moved)
        kept = len(node.axes)
        return _Root(node, product, new[:kept], new[kept:], extents, base.indices)

    def goes(self, product: Product) -> frozenset[str]:
        """Products that one product alone is made of, with the copies, factors and sums between, where they may be put
        in another order; nothing where there is no product among them."""
        if not self.context.fast or product.type.dtype not in _ORDERED:
            return frozenset()
        gone, inner = {product.name}, 0
        results, readers, makers = results_of(self.graph), readers_of(self.graph), makers_of(self.graph)
        base = views_of(self.graph).base
        # Whatever makes an operand comes before all that it is for, so the last one of those that wait has all of its
        # readers behind it.
        waiting = {base(u) for u in (product.left, product.right)} & makers.keys()
        while waiting:
            name = max(waiting, key=self.places.__getitem__)
            waiting.discard(name)
            node = makers[name]
            if name in results or not all(r.names and r.names[0] in gone for r in readers.get(name, ())):
                continue
            if isinstance(node, Compute):
                if not _is_sum(node.value):
                    continue
            else:
                p = product_of(node)
                if p is None or p.added is not None or p.type.dtype is not product.type.dtype:
                    continue
                inner += 1
            gone.add(name)
            waiting |= {base(u) for u in uses(node)} & makers.keys()
        first, last = min(self.places[n] for n in gone), self.places[product.name]
        if not inner or any(first < k < last for k in self.effects):
            return frozenset()
        return frozenset(gone - {product.name})

    # --- how it may be replaced ---------------------------------------------------------------------------------------

    def rewrites(self, root: _Root, goes: frozenset[str]) -> Iterator[_Replacement]:
        """What may stand in the place of a root."""
        product = root.product
        if product.added is not None and root.summed:
            return
        plain = self.reader.of_product(product)
        whole = self.reader.at(plain, root.axes, root.indices, root.extents)
        whole = replace(whole, summed=(*whole.summed, *root.summed))
        one = self.reader.expanded(whole, goes)
        if one.is_empty:
            return
        if root.node is not product.node or len(one.factors) > 2:
            yield self.rewrite(root, [one], goes)
        for several in self.distributed(whole, goes):
            if not any(s.is_empty for s in several):
                yield self.rewrite(root, several, goes)

    def distributed(self, e: Einsum, goes: frozenset[str]) -> Iterator[list[Einsum]]:
        """The sum as several, where a factor is a sum of which a term is a product."""
        makers = makers_of(self.graph)
        for k, f in enumerate(e.factors):
            made = makers.get(f.buffer)
            if f.buffer not in goes or not isinstance(made, Compute):
                continue
            value = Definitions(self.graph, e.extents).moved(made.value, made.axes, f.indices)
            terms = list(_terms(value))
            if not 2 <= len(terms) <= MOST_TERMS or any(t is None for t in terms):
                continue
            sums = [
                self.reader.through_views(
                    replace(e, factors=(*e.factors[:k], t[0], *e.factors[k + 1 :]), scale=e.scale * t[1])
                )
                for t in terms if t is not None
            ]  # fmt: skip
            sums = [self.reader.expanded(s, goes) for s in sums]
            if any(len(s.factors) > len(e.factors) for s in sums):
                yield sums

    def rewrite(self, root: _Root, sums: list[Einsum], goes: frozenset[str]) -> _Replacement:
        """Sums of which a root is the sum, each in its fastest order."""
        product, kind = root.product, root.type
        machine = self.context.target_of(kind.device).machine
        after, nodes = 0.0, list[Node]()
        values: list[tuple[Load, float]] = []
        at = tuple(symbol(f"i{k}") for k in range(len(kind.shape)))
        for one in sums:
            e = self.reader.refined(self.reader.without_ones(one))
            step = self.order(e, product.type.dtype, machine)
            writer = EinsumWriter(
                self.reader, e, root.name, product.type.dtype, kind.device, product.node.rounded, self.origins(root, e),
                product.node.reason, self.taken,
            )  # fmt: skip
            load = writer.written(step)
            nodes += writer.nodes
            after += step.time
            values.append((writer.value(load, at, kind.shape), e.scale))
        last = self.last(root, at, values)
        if not isinstance(last, View):
            after += pass_time((len(values) + 1) * self.nbytes(kind), machine)
        before = self.time_of(root, sums, goes, machine)
        gone = dict.fromkeys(name for s in sums for name in s.replaced)
        times = f"{after / 1e3:.1f} us rather than {before / 1e3:.1f}"
        told = f"{product.node.reason}; in the place of {', '.join(gone)}: {times}"
        nodes = [replace(n, reason=told) if isinstance(n, Library) else n for n in nodes]
        nodes = [*nodes, last]
        made = {name for n in nodes for name in n.names}
        read = frozenset({u for n in nodes for u in uses(n)} - made)
        return _Replacement(root, tuple(nodes), before, after, frozenset(gone), read)

    def order(self, e: Einsum, dtype: DType, machine: Machine) -> Multiplication:
        copied = frozenset(k for k, f in enumerate(e.factors) if self.reader.strides(f, e) is None)
        return Orders(e, self.graph.symbols.hint, machine, dtype, copied).best()

    def last(self, root: _Root, at: tuple[sympy.Symbol, ...], values: list[tuple[Load, float]]) -> Node:
        """The root's own node: a view of a result that lies as the root does, else a kernel that makes it."""
        kind, added = self.kind_of(root), root.product.added
        extents = dict(zip(at, kind.shape, strict=True))
        if len(values) == 1 and added is None:
            load, scale = values[0]
            place = self.reader.place(load, extents)
            own = sympy.expand(sympy.Add(*(a * s for a, s in zip(at, kind.strides, strict=True))))
            if scale == 1.0 and place == own and load.dtype is kind.dtype:
                return View(root.name, kind, load.buffer, at, load.indices, sympy.S.Zero, root.node.origins)
        parts = [scaled_by(load, scale, kind.dtype) for load, scale in values]
        if added is not None and root.product.beta != 0.0:
            parts.append(scaled_by(self.added(root, at, extents), root.product.beta, kind.dtype))
        value = parts[0]
        for p in parts[1:]:
            value = call("add", value, p)
        stored = cast(value, kind.dtype, when_stored=not root.product.node.rounded)
        return Compute(root.name, kind, at, stored, root.node.origins)

    def kind_of(self, root: _Root) -> TensorType:
        """The type of what stands in the place of a root: of a view that only the graph itself looks at, one without
        the gaps between the elements."""
        kind = root.type
        if not isinstance(root.node, View) or root.name in self.graph.outputs:
            return kind
        if any(isinstance(n, View) and n.source == root.name for n in self.graph.nodes):
            return kind
        return replace(kind, strides=contiguous_strides(kind.shape))

    def added(self, root: _Root, at: tuple[sympy.Symbol, ...], extents: Mapping[sympy.Symbol, sympy.Expr]) -> Load:
        """The element of what a product adds, at the root's place."""
        name = root.product.added
        assert name is not None
        kind = self.reader.types[name]
        indices = root.indices[len(root.indices) - len(kind.shape) :]
        indices = tuple(sympy.S.Zero if n == 1 else i for i, n in zip(indices, kind.shape, strict=True))
        found = self.found.within(extents)
        moved = found.moved(Load(name, indices, kind.dtype), root.axes, at)
        assert isinstance(moved, Load)
        return moved

    def origins(self, root: _Root, e: Einsum) -> tuple[Origin, ...]:
        makers = makers_of(self.graph)
        every = [o for name in e.replaced for o in makers[name].origins]
        return tuple(dict.fromkeys([*every, *root.node.origins]))

    # --- time ---------------------------------------------------------------------------------------------------------

    def time_of(self, root: _Root, sums: list[Einsum], goes: frozenset[str], machine: Machine) -> float:
        """That of everything that goes with a root."""
        makers, hint = makers_of(self.graph), self.graph.symbols.hint
        gone = dict.fromkeys(name for s in sums for name in s.replaced)
        total = 0.0
        for name in gone:
            p = product_of(makers[name])
            assert p is not None
            *batch, m, n = (hint(s) for s in p.type.shape)
            depth = hint(self.reader.types[p.left].shape[-1])
            total += product_time(ProductSize(batch[0] if batch else 1, m, n, depth, p.type.dtype), machine)
        for name in goes - gone.keys() if len(gone) > 1 else ():
            made = makers[name]
            if isinstance(made, Compute):
                read = sum(self.nbytes(self.reader.types[u]) for u in uses(made))
                total += pass_time(read + self.nbytes(made.type), machine)
        if root.summed or isinstance(root.node, Compute):
            total += pass_time(self.nbytes(root.product.type) if root.summed else self.nbytes(root.type), machine)
        return total

    def nbytes(self, kind: TensorType) -> int:
        return self.graph.symbols.hint(kind.nbytes)


def _is_sum(value: Expr) -> bool:
    """Whether a value is a sum of a few loads times numbers."""
    terms = list(islice(_terms(value), MOST_TERMS + 1))
    return len(terms) <= MOST_TERMS and None not in terms


def _terms(value: Expr, scale: float = 1.0) -> Iterator[tuple[Load, float] | None]:
    """The loads that a value is the sum of, each with the number that multiplies it; None for a term that is none."""
    value = unrounded(value)
    match value:
        case Load() if not any(map(is_value, value.indices)):
            yield value, scale
        case Call("add", (a, b)):
            yield from _terms(a, scale)
            yield from _terms(b, scale)
        case Call("sub", (a, b)):
            yield from _terms(a, scale)
            yield from _terms(b, -scale)
        case Call("mul", (a, Const(c, _))) | Call("mul", (Const(c, _), a)):
            yield from _terms(a, scale * float(c))
        case Call("neg", (a,)):
            yield from _terms(a, -scale)
        case _:
            yield None


__all__ = ["substitute"]
