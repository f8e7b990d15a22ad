"""A rule for rows of a table that are multiplied: the table is multiplied instead, where it has fewer rows than are
chosen, and rows of the result are chosen. An embedding of few words in front of a linear layer so becomes a table
of results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from ....ir.expr.value import Expr, Load, is_value, symbol
from ....ir.graph.facts import makers_of
from ....ir.graph.graph import Compute, Library, Node
from ...cost.products.substitutions import pass_time
from ...facts.definitions import Definitions, unrounded
from ...facts.views import readers_of, results_of, views_of
from ..products.operands import Product
from .einsum import Einsum
from .rewrite import Rewrite, rewrite_of
from .sites import ProductSites, Root


def look_up_later(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """A product with chosen rows of a table, as chosen rows of a product with the table."""
    makers, base = makers_of(sites.graph), views_of(sites.graph).base
    if not any(_chooses(makers.get(base(u))) for u in (product.left, product.right)):
        return
    root = sites.roots(product)[0]
    whole = sites.whole(root)
    for k in range(len(whole.factors)):
        found = _of_table(sites, root, whole, k)
        if found is not None:
            yield from _rewritten(sites, root, whole, k, *found)


def _chooses(node: Node | None) -> bool:
    """Whether a node copies rows that data choose."""
    load = unrounded(node.value) if isinstance(node, Compute) else None
    return isinstance(load, Load) and any(map(is_value, load.indices))


def _of_table(sites: ProductSites, root: Root, e: Einsum, k: int) -> tuple[Einsum, sympy.Symbol, Expr] | None:
    """The sum with a table's own row in the place of the axes that choose one: with it that axis, and what chooses."""
    f, made = e.factors[k], makers_of(sites.graph).get(e.factors[k].buffer)
    if not isinstance(made, Compute):
        return None
    load = unrounded(Definitions(sites.graph, e.extents).moved(made.value, made.axes, f.indices))
    if not isinstance(load, Load) or load.dtype is not f.dtype:
        return None
    load = Definitions(sites.graph, e.extents).base(load)
    chosen = [d for d, i in enumerate(load.indices) if is_value(i)]
    if len(chosen) != 1:
        return None
    (d,) = chosen
    row, others = load.indices[d], {s for j, i in enumerate(load.indices) if j != d for s in i.free_symbols}
    over = e.axes_of(Load("", (row,), f.dtype))
    used = others.union(*(e.axes_of(g) for j, g in enumerate(e.factors) if j != k))
    if over & (used | set(e.summed)) or not over <= set(root.axes):
        return None
    size = sites.reader.types[load.buffer].shape[d]
    hint = sites.graph.symbols.hint
    if hint(size) >= hint(sympy.Mul(*(e.extents[s] for s in over))):
        return None
    (own,) = sites.reader.fresh(1)
    indices = tuple(own if j == d else i for j, i in enumerate(load.indices))
    extents = {s: n for s, n in e.extents.items() if s not in over} | {own: size}
    axes = (own, *(s for s in e.axes if s not in over))
    factors = (*e.factors[:k], Load(load.buffer, indices, load.dtype), *e.factors[k + 1 :])
    return replace(e, axes=axes, extents=extents, factors=factors), own, row


def _rewritten(
    sites: ProductSites, root: Root, whole: Einsum, k: int, of_table: Einsum, own: sympy.Symbol, row: Expr
) -> Iterator[Rewrite]:
    kind, machine = root.type, sites.context.target_of(root.type.device).machine
    if of_table.is_empty or whole.is_empty:
        return
    e = sites.reader.refined(sites.reader.without_ones(sites.reader.through_views(of_table)))
    step = sites.order(e, root.product.type.dtype, machine)
    before = sites.time_of(root, [whole], _read_alone(sites, root, whole.factors[k].buffer), machine)
    after = step.time + pass_time(2 * sites.nbytes(kind), machine)
    writer = sites.writer(root, e)
    load = writer.written(step)
    at = tuple(symbol(f"i{j}") for j in range(len(kind.shape)))
    extents = dict(zip(at, kind.shape, strict=True))
    # The result over the table's rows, then the chosen row in the place of each.
    shape = tuple(of_table.extents[s] for s in of_table.axes)
    over = tuple(symbol(f"t{j}") for j in range(len(of_table.axes)))
    value = writer.value(load, over, shape)
    found = Definitions(sites.graph, extents)
    env = dict(zip(root.axes, at, strict=True))
    here = [found.moved(row, root.axes, at) if s == own else env[s] for s in of_table.axes]
    moved = found.moved(value, over, tuple(here))
    assert isinstance(moved, Load)
    last = sites.last(root, at, [(moved, e.scale)])
    yield rewrite_of({root.name: (*writer.nodes, last)}, before, after, whole.replaced)


def _read_alone(sites: ProductSites, root: Root, name: str) -> frozenset[str]:
    """The chosen rows, where a product alone reads them."""
    readers = readers_of(sites.graph).get(name, ())
    alone = len(readers) == 1 and isinstance(readers[0], Library) and name not in results_of(sites.graph)
    return frozenset({name}) if alone else frozenset()
