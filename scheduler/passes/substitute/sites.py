"""Products of a graph and what is read of them, as places where another product may stand, and what is written there.

What a place computes is read off the graph as sums of products over any number of tensors (``einsum.py``), which say
nothing of an order; the order is chosen by a model of time (``order.py``) and written as products again (``write.py``).
Which sums stand for a place is what rules say (``rules.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.origin import Origin
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Index, Load, call, cast, is_value, symbol, walk
from ....ir.graph.effects import has_effect
from ....ir.graph.facts import makers_of, names_in
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, TensorType, View, uses
from ....ir.machine import Machine
from ....ir.nest.loops import contiguous_strides
from ....ir.target import has_kernels
from ...context import PassContext
from ...cost.products.substitutions import ProductSize, gain_of, pass_time, product_time
from ...facts.definitions import Definitions, unrounded
from ...facts.views import readers_of, results_of, views_of
from ...rules import Capability, can
from ..products.chain_elements import exponentials
from ..products.operands import Product, product_of
from .einsum import Einsum, EinsumReader
from .order import Multiplication, Orders
from .rewrite import Rewrite, rewrite_of
from .terms import is_linear
from .write import EinsumWriter, scaled_by


@dataclass(frozen=True, slots=True)
class Root:
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


@dataclass(slots=True)
class ProductSites:
    """The products of one graph, for rules to ask."""

    graph: Graph
    context: PassContext
    # Names that are not to be given again.
    taken: set[str] = field(default_factory=set)
    # Of a part of a graph, the tensors from outside in whose elements an exponential can be.
    given: Collection[str] = ()
    reader: EinsumReader = field(init=False)
    found: Definitions = field(init=False)
    places: dict[str, int] = field(init=False)
    effects: list[int] = field(init=False)
    shown: list[str] = field(init=False)
    # What a rewrite may lose, asked when one loses anything.
    least: Callable[[], float] = lambda: -math.inf
    known_roots: dict[str, tuple[Root, ...]] = field(default_factory=dict)
    known_goes: dict[str, frozenset[str]] = field(default_factory=dict)
    raised: set[str] | None = None
    families: dict[str, list[Any]] | None = None

    def __post_init__(self) -> None:
        self.reader = EinsumReader(self.graph, self.graph.types())
        self.found = Definitions(self.graph)
        self.places = {name: k for k, n in enumerate(self.graph.nodes) for name in n.names}
        self.taken = self.taken | names_in(self.graph)
        self.shown = [o for o in self.graph.outputs if isinstance(o, str)]
        self.effects = [k for k, n in enumerate(self.graph.nodes) if has_effect(n)]

    def may_change(self, product: Product) -> bool:
        """Whether a product is one that kernels of ours may stand beside."""
        return has_kernels(product.type.device) and product.type.dtype.is_float

    def attends(self, product: Product) -> bool:
        """Whether a product is one of attention's, which belong to one kernel with the softmax between them."""
        if not can(self.context.target_of(product.type.device), Capability.ATTENTION):
            return False
        if self.raised is None:
            self.raised = exponentials(self.graph, self.given)
        return not self.raised.isdisjoint((product.left, product.right))

    # --- what may be replaced -----------------------------------------------------------------------------------------

    def roots(self, product: Product) -> tuple[Root, ...]:
        """The product itself, and what alone is read of it: a part, chosen rows, a sum."""
        if product.name not in self.known_roots:
            self.known_roots[product.name] = tuple(self._roots(product))
        return self.known_roots[product.name]

    def _roots(self, product: Product) -> Iterator[Root]:
        name, kind = product.name, product.type
        axes = self.reader.fresh(product.rank)
        yield Root(product.node, product, axes, (), dict(zip(axes, kind.shape, strict=True)), axes)
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

    def is_narrower(self, root: Root) -> bool:
        """Whether a root has fewer elements than its product."""
        hint = self.graph.symbols.hint
        return hint(root.type.numel) < hint(root.product.type.numel)

    def part(self, product: Product, reader: Node) -> Root | None:
        """A reader that makes nothing of a product's elements but a copy of some, or their sum."""
        if isinstance(reader, Compute):
            load = unrounded(reader.value)
            if isinstance(load, Load) and load.dtype is reader.type.dtype:
                return self.root_at(reader, product, load)
        if isinstance(reader, Reduction) and reader.monoid == SUM and len(reader.values) == 1:
            load = unrounded(reader.values[0])
            if isinstance(load, Load) and load.dtype is reader.types[0].dtype:
                return self.root_at(reader, product, load)
        return None

    def root_at(self, node: Node, product: Product, load: Load) -> Root:
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
        return Root(node, product, new[:kept], new[kept:], extents, base.indices)

    def goes(self, product: Product) -> frozenset[str]:
        """Products that one product alone is made of, with the copies, factors and sums between, where they may be put
        in another order; nothing where all that is in front is memory as it is."""
        if product.name not in self.known_goes:
            self.known_goes[product.name] = self._goes(product)
        return self.known_goes[product.name]

    def _is_made_of_products(self, p: Product) -> bool:
        """Whether what attention weighs is a product itself: weighed before it is made, it is never in memory."""
        raised = self.raised or ()
        makers, base = makers_of(self.graph), views_of(self.graph).base
        waiting = [base(u) for u in (p.left, p.right) if u not in raised]
        while waiting:
            node = makers.get(waiting.pop())
            if isinstance(node, Compute) and is_linear(node.value):
                waiting += map(base, uses(node))
            elif node is not None and product_of(node) is not None:
                return True
        return False

    def _goes(self, product: Product) -> frozenset[str]:
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
                if not is_linear(node.value):
                    continue
                inner += not isinstance(unrounded(node.value), Load)
            else:
                p = product_of(node)
                if p is None or p.added is not None or p.type.dtype is not product.type.dtype:
                    continue
                if name != product.name and self.attends(p) and not self._is_made_of_products(p):
                    continue
                inner += 1
            gone.add(name)
            waiting |= {base(u) for u in uses(node)} & makers.keys()
        first, last = min(self.places[n] for n in gone), self.places[product.name]
        if not inner or any(first < k < last for k in self.effects):
            return frozenset()
        return frozenset(gone - {product.name})

    # --- what stands there instead ------------------------------------------------------------------------------------

    def whole(self, root: Root) -> Einsum:
        """What a root sums, of the operands of its product."""
        plain = self.reader.of_product(root.product)
        e = self.reader.at(plain, root.axes, root.indices, root.extents)
        return replace(e, summed=(*e.summed, *root.summed))

    def rewrite(self, root: Root, sums: Sequence[Einsum], goes: frozenset[str]) -> Iterator[Rewrite]:
        """Sums of which a root is the sum, each in its fastest order; nothing where that costs more than any rewrite
        may, or nothing is summed."""
        product, kind = root.product, root.type
        if any(e.is_empty for e in sums) or (product.added is not None and root.summed):
            return
        machine = self.context.target_of(kind.device).machine
        kept = {f.buffer for e in sums for f in e.factors}
        before = self.time_of(root, sums, goes - kept, machine)
        found = [self.reader.refined(self.reader.without_ones(e)) for e in sums]
        steps = [self.order(e, product.type.dtype, machine) for e in found]
        after = sum(s.time for s in steps) + self.written_time(kept, machine)
        gain = gain_of(before, after)
        if gain < 0.0 and gain < self.least():
            return
        nodes: list[Node] = []
        values: list[tuple[Load, float]] = []
        at = tuple(symbol(f"i{k}") for k in range(len(kind.shape)))
        for e, step in zip(found, steps, strict=True):
            writer = self.writer(root, e)
            load = writer.written(step)
            nodes += writer.nodes
            values.append((writer.value(load, at, kind.shape), e.scale))
        last = self.last(root, at, values)
        if not isinstance(last, View):
            after += pass_time((len(values) + 1) * self.nbytes(kind), machine)
        gone = dict.fromkeys(name for s in sums for name in s.replaced)
        yield rewrite_of({root.name: (*nodes, last)}, before, after, gone)

    def writer(self, root: Root, e: Einsum) -> EinsumWriter:
        """A writer of what stands for a root."""
        node = root.product.node
        return EinsumWriter(
            self.reader, e, root.name, root.product.type.dtype, root.type.device, node.rounded, self.origins(root, e),
            node.reason, self.taken,
        )  # fmt: skip

    def order(self, e: Einsum, dtype: DType, machine: Machine) -> Multiplication:
        copied = frozenset(k for k, f in enumerate(e.factors) if self.reader.strides(f, e) is None)
        return Orders(e, self.graph.symbols.weighed(), machine, dtype, copied).best()

    def last(
        self, root: Root, at: tuple[sympy.Symbol, ...], values: Sequence[tuple[Load, float]], copies: bool = False
    ) -> Node:
        """The root's own node: a view of a result that lies as the root does, else a kernel that makes it; always such
        a kernel where it ``copies``."""
        kind, added = self.kind_of(root), root.product.added
        extents = dict(zip(at, kind.shape, strict=True))
        if len(values) == 1 and added is None and not copies and not any(map(is_value, values[0][0].indices)):
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

    def kind_of(self, root: Root) -> TensorType:
        """The type of what stands in the place of a root: of a view that only the graph itself looks at, one without
        the gaps between the elements."""
        kind = root.type
        if not isinstance(root.node, View) or root.name in self.graph.outputs:
            return kind
        if any(isinstance(n, View) and n.source == root.name for n in self.graph.nodes):
            return kind
        return replace(kind, strides=contiguous_strides(kind.shape))

    def added(self, root: Root, at: tuple[sympy.Symbol, ...], extents: Mapping[sympy.Symbol, sympy.Expr]) -> Load:
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

    def origins(self, root: Root, e: Einsum) -> tuple[Origin, ...]:
        makers = makers_of(self.graph)
        every = [o for name in e.replaced for o in makers[name].origins]
        return tuple(dict.fromkeys([*every, *root.node.origins]))

    # --- time ---------------------------------------------------------------------------------------------------------

    def time_of(self, root: Root, sums: Sequence[Einsum], goes: Iterable[str], machine: Machine) -> float:
        """That of the products which go with a root, and of the kernels among ``goes``."""
        makers = makers_of(self.graph)
        gone = dict.fromkeys(name for s in sums for name in s.replaced)
        total = sum(self.product_time(p, machine) for name in gone if (p := product_of(makers[name])) is not None)
        for name in goes:
            made = makers[name]
            # A copy may be made again for what comes, and then saves nothing.
            if isinstance(made, Compute) and not isinstance(unrounded(made.value), Load):
                read = sum(self.read_bytes(ld, made) for ld in dict.fromkeys(walk(made.value)) if isinstance(ld, Load))
                total += pass_time(read + self.nbytes(made.type), machine)
        if root.summed or isinstance(root.node, Compute):
            total += pass_time(self.nbytes(root.product.type) if root.summed else self.nbytes(root.type), machine)
        return total

    def time(self) -> float:
        """That of all products, and of writing and reading what else lies in memory."""
        total = 0.0
        for node in self.graph.nodes:
            kinds = [t for t in node.types if t is not None]
            if isinstance(node, View) or not kinds or not has_kernels(kinds[0].device):
                continue
            machine = self.context.target_of(kinds[0].device).machine
            product = product_of(node)
            if product is not None:
                total += self.product_time(product, machine)
            elif any(self.is_memory(name) for name in node.names):
                total += sum(pass_time(2 * self.nbytes(t), machine) for t in kinds)
        return total

    def product_time(self, p: Product, machine: Machine) -> float:
        """That of a product of the graph."""
        sizes = *p.type.shape, self.reader.types[p.left].shape[-1]

        def time(table: SymbolTable) -> float:
            *batch, m, n, depth = map(table.hint, sizes)
            return product_time(ProductSize(batch[0] if batch else 1, m, n, depth, p.type.dtype), machine)

        return fmean(map(time, self.graph.symbols.weighed()))

    def written_time(self, read: Iterable[str], machine: Machine) -> float:
        """That of writing what was none of its own memory before, and is an operand now."""
        return sum(pass_time(self.nbytes(self.reader.types[u]), machine) for u in read if not self.is_memory(u))

    def is_memory(self, name: str) -> bool:
        """Whether a tensor lies in memory, whatever is done with its only reader."""
        base = views_of(self.graph).base(name)
        if not isinstance(makers_of(self.graph).get(base), (Compute, Reduction)) or base in results_of(self.graph):
            return True
        readers = readers_of(self.graph).get(base, ())
        return len(readers) != 1 or isinstance(readers[0], Library)

    def read_bytes(self, load: Load, made: Compute) -> float:
        """How many bytes of a tensor in memory a kernel reads: of one that it reads a part of, that part alone."""
        if not self.is_memory(load.buffer):
            return 0.0
        whole = self.nbytes(self.reader.types[load.buffer])
        if any(map(is_value, load.indices)):
            return whole
        moving = {s for i in load.indices for s in i.free_symbols}
        along = [n for a, n in zip(made.axes, made.type.shape, strict=True) if a in moving]
        part = fmean(math.prod(map(table.hint, along)) for table in self.graph.symbols.weighed())
        return min(whole, part * load.dtype.itemsize)

    def nbytes(self, kind: TensorType) -> float:
        """How many bytes a tensor has, on average."""
        return fmean(table.hint(kind.nbytes) for table in self.graph.symbols.weighed())


__all__ = ["ProductSites", "Root"]
