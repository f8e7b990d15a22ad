"""Rows of what products read and make begin at multiples of 16 bytes, where nobody outside of the graph can tell.

Tensor cores are fed 16 bytes at a time, so a matrix whose rows begin anywhere, as that of a vocabulary of 50257, is
copied, or written, an element at a time. What the graph makes for itself is given strides that are a little longer
than its rows: that moves no byte. A library writes its product into such memory (``codegen/host/build.py``). Of what
somebody else made, or may look at, a copy is such where the products that read it gain more than it costs. No size
changes, and no element is added to a sum.

Inductor's ``pad_mm`` does this by products of larger sizes, whose operands are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ....ir.expr.index import simplify
from ....ir.expr.value import Load, is_value, symbol
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, Ref, Scan, TensorType, View
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.alignment import COPY_WORTH, copying_time, filling_time, padded_row, scattering_time, wants_aligned
from ...cost.products.contraction_gpu import library_time, product_time, with_even_operands, with_even_rows
from ...facts.contraction import LibraryProduct, Products, factors_of
from ...facts.prologues import is_aligned
from ...facts.views import readers_of, results_of, views_of
from ..canonical.names import fresh_name


def pad_products(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Give the matrices of products rows that begin at multiples of 16 bytes: for nothing, or by copies that pay."""
    if not any(_is_odd(graph, n, context) for n in graph.nodes):
        return graph
    padded = _Rows(graph, context).padded()
    return _with_copies(padded, context)


def _is_odd(graph: Graph, node: Node, context: PassContext) -> bool:
    """Whether a node is a product for tensor cores with an operand, or a result, whose rows begin anywhere."""
    names = factors_of(node)
    if not names or node.types[0] is None or not has_kernels(node.types[0].device):
        return False
    if not wants_aligned(context.target_of(node.types[0].device), node.types[0].dtype):
        return False
    types = graph.types()
    return not all(is_aligned(types[n], graph.symbols) for n in (*names, *node.names))


@dataclass(slots=True)
class _Rows:
    """The tensors of a graph that may have longer strides, and the views of them."""

    graph: Graph
    context: PassContext
    types: dict[str, TensorType] = field(init=False)
    products: Products = field(init=False)

    def padded(self) -> Graph:
        """The graph with the strides of all tensors padded that products read or make, and that may be."""
        graph, base = self.graph, views_of(self.graph).base
        self.types, self.products = graph.types(), Products(graph)
        wanted: dict[str, None] = {}
        for node in graph.nodes:
            if _is_odd(graph, node, self.context):
                names = (*factors_of(node), *node.names)
                wanted.update((base(n), None) for n in names if not is_aligned(self.types[n], graph.symbols))
        views: dict[str, list[View]] = {}
        for node in graph.nodes:
            if isinstance(node, View):
                views.setdefault(base(node.name), []).append(node)
        changed: dict[str, tuple[TensorType, sympy.Expr]] = {}
        for name in wanted:
            changed |= self.changed(name, views.get(name, []))
        if not changed:
            return graph
        return replace(graph, nodes=tuple(_with_types(n, changed) for n in graph.nodes))

    def changed(self, name: str, views: list[View]) -> dict[str, tuple[TensorType, sympy.Expr]]:
        """A tensor and its views with padded rows, and where each view begins; nothing where one may not be so."""
        made = next((n for n in self.graph.nodes if name in n.names), None)
        if not isinstance(made, (Compute, Reduction)) and not factors_of(made):  # type: ignore[arg-type]
            return {}
        if made is None or name in results_of(self.graph):
            return {}
        kind = self.types[name]
        strides = _padded(kind)
        readers = readers_of(self.graph).get(name, ())
        if strides is None or not all(isinstance(r, (Compute, Reduction, Scan)) or factors_of(r) for r in readers):
            return {}
        if not self.pays(name, made, readers):
            return {}
        found = {name: (replace(kind, strides=strides), sympy.S.Zero)}
        for view in views:
            layout = self.layout(view, found[view.source][0].strides)
            if self.layout(view, self.types[view.source].strides) != (view.type.strides, view.offset) or not layout:
                return {}
            found[view.name] = (replace(view.type, strides=layout[0]), layout[1])
        return found

    def pays(self, name: str, made: Node, readers: Sequence[Node]) -> bool:
        """Whether products gain more by the longer rows of a tensor than others lose, whose loops are flat no more. In
        float32, of which the gain is not known, they take what costs nothing."""
        kind = self.types[name]
        machine, nbytes = self.context.target_of(kind.device).machine, self.graph.symbols.hint(kind.nbytes)
        flat = sum(isinstance(n, Compute) for n in (made, *readers))
        lost = flat * scattering_time(machine, nbytes)
        if isinstance(made, Library) and (p := self.products.product(made)) is not None and self.adds_row(p):
            lost += filling_time(machine, nbytes)
        if kind.dtype not in machine.multiplied:
            return not lost
        found = (self.products.product(n) for n in (made, *readers) if factors_of(n))
        return lost < sum(product_time(p, machine) - product_time(with_even_rows(p), machine) for p in found if p)

    def adds_row(self, p: LibraryProduct) -> bool:
        return p.added is not None and len(self.types[p.added].shape) == 1

    def layout(self, view: View, strides: tuple[sympy.Expr, ...]) -> tuple[tuple[sympy.Expr, ...], sympy.Expr] | None:
        """The strides of a view, and where it begins, in a source of these strides; None where it has none such."""
        if any(map(is_value, view.indices)):
            return None
        extents = dict(zip(view.axes, view.type.shape, strict=True))
        place = sympy.Add(*(i * s for i, s in zip(view.indices, strides, strict=True)))  # type: ignore[operator]
        place = sympy.expand(simplify(sympy.expand(place), extents, self.graph.symbols))
        found: list[sympy.Expr] = []
        for axis, old in zip(view.axes, view.type.strides, strict=True):
            step = place.coeff(axis)
            found.append(old if extents[axis] == 1 else step)
            place = sympy.expand(place - step * axis)
        return None if place.free_symbols & set(view.axes) else (tuple(found), place)


def _padded(kind: TensorType) -> tuple[sympy.Expr, ...] | None:
    """The strides of a dense tensor, its dimensions in whatever order, with longer rows; None where rows are well as
    they are, or it is no such tensor."""
    found = list(kind.strides)
    left = [k for k, n in enumerate(kind.shape) if n != 1]
    before: sympy.Expr = sympy.S.One
    after: sympy.Expr = sympy.S.One
    while left:
        at = next((k for k in reversed(left) if kind.strides[k] == before), None)
        if at is None:
            return None
        left.remove(at)
        found[at], extent = after, kind.shape[at]
        row = padded_row(int(extent), kind.dtype.itemsize) if before == 1 and extent.is_Integer else None
        if before == 1 and row is None:
            return None
        before, after = sympy.expand(before * extent), sympy.expand(after * (extent if row is None else row))
    return tuple(found)


def _with_types(node: Node, changed: Mapping[str, tuple[TensorType, sympy.Expr]]) -> Node:
    if changed.keys().isdisjoint(node.names):
        return node
    match node:
        case View():
            kind, offset = changed[node.name]
            return replace(node, type=kind, offset=offset)
        case Compute():
            return replace(node, type=changed[node.name][0])
        case Reduction() | Library():
            types = tuple(changed[n][0] if n in changed else t for n, t in zip(node.names, node.types, strict=True))
            return replace(node, types=types)  # type: ignore[arg-type]
    return node


# --- copies -----------------------------------------------------------------------------------------------------------


def _with_copies(graph: Graph, context: PassContext) -> Graph:
    """The graph with copies of the matrices that could not be padded, where products gain more than copies cost."""
    copied = _worth_copying(graph, context)
    if not copied:
        return graph
    taken = set(names_in(graph))
    made: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for name in factors_of(node):
            if name in copied and name not in made:
                assert isinstance(node, Library)
                kind, made[name] = copied[name], fresh_name(f"{name}_padded", taken)
                axes = tuple(symbol(f"i{k}") for k in range(len(kind.shape)))
                nodes.append(Compute(made[name], kind, axes, Load(name, axes, kind.dtype), node.origins))
        nodes.append(_reading(node, made))
    return replace(graph, nodes=tuple(nodes))


def _reading(node: Node, made: Mapping[str, str]) -> Node:
    """A product that reads copies."""
    read = [n for n in factors_of(node) if n in made]
    if not read:
        return node
    assert isinstance(node, Library)
    args = tuple(Ref(made[a.name]) if isinstance(a, Ref) and a.name in read else a for a in node.args)
    return replace(node, args=args, reason=f"{node.reason}; rows of {', '.join(read)} are copied to begin evenly")


def _worth_copying(graph: Graph, context: PassContext) -> dict[str, TensorType]:
    """The matrices to copy, and the layouts of their copies. Who reads two of them gains where both are copied."""
    products, hint = Products(graph), graph.symbols.hint
    found: dict[str, TensorType] = {}
    gains: list[tuple[float, tuple[str, ...]]] = []
    for node in graph.nodes:
        p = products.product(node) if _is_odd(graph, node, context) else None
        if p is None or p.type.dtype not in context.target_of(p.type.device).machine.multiplied:
            continue
        odd = [o for o in (p.a, p.b) if not o.is_aligned]
        layouts = {o.name: replace(o.type, strides=s) for o in odd if (s := _padded(o.type)) is not None}
        if odd and len(layouts) == len({o.name for o in odd}):
            gains.append((_gain(p, context), tuple(layouts)))
            found |= layouts
    costs = {
        n: COPY_WORTH * copying_time(context.target_of(t.device).machine, hint(t.nbytes)) for n, t in found.items()
    }
    while True:
        gained = dict.fromkeys(found, 0.0)
        for gain, names in gains:
            if all(n in found for n in names):
                gained.update((n, gained[n] + gain * costs[n] / sum(costs[m] for m in names)) for n in names)
        kept = {n: t for n, t in found.items() if gained[n] > costs[n]}
        if len(kept) == len(found):
            return found
        found = kept


def _gain(p: LibraryProduct, context: PassContext) -> float:
    """Nanoseconds that a product gains where it reads copies, in a library: loops of ours would read what those are
    copies of."""
    machine = context.target_of(p.type.device).machine
    return product_time(p, machine) - library_time(with_even_operands(p), machine)


__all__ = ["pad_products"]
