"""Rules that read a product as a sum over several factors, and write that sum otherwise.

- *reorder*: (A B) C is A (B C), through views, transposed matrices, heads and repeated heads. So a product with a
  weight of low rank (LoRA) never makes the weight, attention over compressed keys (MLA) never makes the keys, and
  attention without a softmax grows with the length and not with its square. A factor of rows or of columns is one of
  the factors: (r X c) W is r (X (c W)), or whatever is smallest.
- *distribute*: X (W + A B) is X W + (X A) B, and [X Y] W is X W' + Y W'' where one of both is the same for many rows.
- *narrow_product*, *sum_first*: rows and columns of which nobody reads the results are not multiplied; what is summed
  over rows is summed before the product.

Sources: Jia et al. 2019, "Optimizing DNN Computation with Relaxed Graph Substitutions" (MetaFlow); Smith and Gray 2018,
"opt_einsum".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from ....ir.expr.value import Load
from ....ir.graph.facts import makers_of
from ....ir.graph.graph import Compute
from ...facts.definitions import Definitions
from ..products.operands import Product
from .einsum import Einsum
from .rewrite import Rewrite
from .sites import ProductSites, Root
from .terms import MOST_TERMS, parts, terms


def narrow_product(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """A part of a product, of which nobody reads the rest, made alone."""
    for root in sites.roots(product):
        if root.node is not product.node and not root.summed and sites.is_narrower(root):
            yield from sites.rewrite(root, [sites.whole(root)], frozenset())


def sum_first(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """What is summed of a product's results, of operands that were summed before, in whatever order."""
    for root in sites.roots(product):
        if root.summed:
            goes = sites.goes(product)
            e = sites.reader.expanded(sites.whole(root), goes)
            yield from sites.rewrite(root, [e], goes)


def reorder(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """The product's factors in their fastest order, where it has more than two."""
    goes = sites.goes(product)
    for root in _roots(sites, product) if goes else ():
        e = sites.reader.expanded(sites.whole(root), goes)
        if len(e.factors) > 2:
            yield from sites.rewrite(root, [e], goes)


def distribute(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """The product as several, of which each has a term of an operand that is a sum, or a part of one that is a
    concatenation; where a term is a product itself, or the same along an axis of the operand."""
    goes = sites.goes(product)
    for root in _roots(sites, product) if goes else ():
        e = sites.whole(root)
        for k in range(len(e.factors)):
            several = _several(sites, e, k, goes)
            if several is not None:
                yield from sites.rewrite(root, several, goes)


def _roots(sites: ProductSites, product: Product) -> Iterator[Root]:
    return (r for r in sites.roots(product) if not r.summed)


def _several(sites: ProductSites, e: Einsum, k: int, goes: frozenset[str]) -> list[Einsum] | None:
    """The sum as several, by the terms of one factor."""
    f, made = e.factors[k], makers_of(sites.graph).get(e.factors[k].buffer)
    if f.buffer not in goes or not isinstance(made, Compute):
        return None
    value = Definitions(sites.graph, e.extents).moved(made.value, made.axes, f.indices)
    found = list(terms(value))
    if 2 <= len(found) <= MOST_TERMS and None not in found:
        sums = [_with(e, k, *t) for t in found if t is not None]
    elif (joined := parts(value)) is not None and joined[0] in e.summed:
        sums = list(_cut(sites, e, k, *joined))
    else:
        return None
    sums = [sites.reader.through_views(s) for s in sums]
    along = e.axes_of(f)
    is_less = any(s.axes_of(s.factors[k]) < along for s in sums) if found[0] is not None else _is_spread(sites, sums, k)
    sums = [sites.reader.expanded(s, goes) for s in sums]
    return sums if is_less or any(len(s.factors) > len(e.factors) for s in sums) else None


def _with(e: Einsum, k: int, load: Load, scale: float) -> Einsum:
    return replace(e, factors=(*e.factors[:k], load, *e.factors[k + 1 :]), scale=e.scale * scale)


def _cut(
    sites: ProductSites, e: Einsum, k: int, axis: sympy.Symbol, joined: list[tuple[sympy.Expr, Load]]
) -> Iterator[Einsum]:
    """A sum along an axis as sums along parts of it, one for each load that a factor is there."""
    start: sympy.Expr = sympy.S.Zero
    for end, load in joined:
        end = end if end != 0 else e.extents[axis]
        (own,) = sites.reader.fresh(1)
        extents = {s: n for s, n in e.extents.items() if s != axis} | {own: end - start}
        found = Definitions(sites.graph, extents)
        factors = [found.moved(load if j == k else f, (axis,), (own + start,)) for j, f in enumerate(e.factors)]
        summed = tuple(own if s == axis else s for s in e.summed)
        yield replace(e, summed=summed, extents=extents, factors=tuple(factors))  # type: ignore[arg-type]
        start = end


def _is_spread(sites: ProductSites, sums: list[Einsum], k: int) -> bool:
    """Whether a part of a concatenation is the same along an axis along which others vary."""
    along = [frozenset(s for s in e.axes_of(e.factors[k]) if s in e.axes) for e in sums]
    return any(a != frozenset().union(*along) for a in along)
