"""A rule for products that share an operand: they are one product, of which each result is a part.

The other operands are parts of one tensor that lie evenly, as the steps of a sequence do, and are read as they lie; or
they are put side by side, which is a copy. A copy that is there already, for other products, costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, IndexValue, Load, Select, call, const, is_value, symbol
from ....ir.graph.facts import makers_of, places_of
from ....ir.graph.graph import Compute, Library, Node, TensorType, uses
from ....ir.nest.loops import contiguous_strides
from ...cost.products.substitutions import gain_of, joins_copies, pass_time
from ...facts.definitions import Definitions
from ...facts.views import readers_of, results_of
from ..canonical.names import fresh_name
from ..products.operands import Product, product_of
from .einsum import Einsum
from .rewrite import Rewrite, rewrite_of
from .sites import ProductSites, Root

ROW, COLUMN, TERM, PART = (symbol(f"join_{s}") for s in ("row", "column", "term", "part"))
# More products are not put side by side: what makes the copy asks for each element which of them it is from.
MOST_COPIED = 32


@dataclass(frozen=True, slots=True)
class Family:
    """Products of one size that share their right operand (``by_rows``) or their left one, which is ``shared``; the
    other ones are ``loads`` in rows, columns and terms."""

    members: tuple[Product, ...]
    by_rows: bool
    shared: Load
    loads: tuple[Load, ...]
    extents: dict[sympy.Symbol, sympy.Expr]

    @property
    def own(self) -> sympy.Symbol:
        """The axis along which members are parts of the joint product."""
        return ROW if self.by_rows else COLUMN


def join_products(sites: ProductSites, product: Product) -> Iterator[Rewrite]:
    """All products that share an operand with this one, which is the first of them, as one."""
    for family in families(sites).get(product.name, ()):
        yield from _joined(sites, family)


def families(sites: ProductSites) -> dict[str, list[Family]]:
    """Products that may be joined, by the first of each family."""
    if sites.families is None:
        sites.families = {}
        for family in _families(sites):
            sites.families.setdefault(family.members[0].name, []).append(family)
    return sites.families


def _families(sites: ProductSites) -> Iterator[Family]:
    found: dict[tuple[object, ...], list[tuple[Product, Load, Load, dict[sympy.Symbol, sympy.Expr]]]] = {}
    for node in sites.graph.nodes:
        p = product_of(node)
        if p is None or p.rank != 2 or not sites.may_change(p) or sites.attends(p) or p.name in results_of(sites.graph):
            continue
        rows, columns = p.type.shape
        extents = {ROW: rows, COLUMN: columns, TERM: sites.reader.types[p.left].shape[-1]}
        here = Definitions(sites.graph, extents)
        left, right = (
            here.base(Load(n, at, p.type.dtype)) for n, at in ((p.left, (ROW, TERM)), (p.right, (TERM, COLUMN)))
        )
        size = (*extents.values(), p.type.dtype, p.type.device, p.alpha, p.beta, p.node.rounded)
        found.setdefault((*size, "rows", right), []).append((p, right, left, extents))
        found.setdefault((*size, "columns", left), []).append((p, left, right, extents))
    for key, members in found.items():
        if len(members) > 1 and _may_move(sites, [m[0] for m in members]):
            loads = tuple(m[2] for m in members)
            if len(set(loads)) == len(loads):
                products = tuple(m[0] for m in members)
                yield Family(products, "rows" in key, members[0][1], loads, members[0][3])


def _may_move(sites: ProductSites, members: Sequence[Product]) -> bool:
    """Whether all may be made at once: none needs another, and nothing is written between them."""
    places, makers = places_of(sites.graph), makers_of(sites.graph)
    own = {p.name for p in members}
    first, last = min(places[n] for n in own), max(places[n] for n in own)
    if any(first < k < last for k in sites.effects):
        return False
    waiting = [u for p in members for u in uses(p.node)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in own:
            return False
        if name not in seen and places.get(name, -1) > first:
            seen.add(name)
            waiting += uses(makers[name])
    return True


def _joined(sites: ProductSites, family: Family) -> Iterator[Rewrite]:
    """One product for a family, and its parts."""
    members, kind = family.members, family.members[0].type
    machine = sites.context.target_of(kind.device).machine
    order, load = _as_it_lies(family)
    nodes: list[Node] = []
    copied = 0.0
    if load is None:
        if len(members) > MOST_COPIED or not joins_copies(family.by_rows, machine):
            return
        made, load, is_new = _side_by_side(sites, family)
        if is_new:
            nodes.append(made)
            sites.reader.types[made.name] = made.type
            copied = pass_time(2 * sites.nbytes(made.type), machine)
    extents = {**family.extents, PART: sympy.Integer(len(members))}
    factors = (load, family.shared) if family.by_rows else (family.shared, load)
    axes = (PART, ROW, COLUMN) if family.by_rows else (ROW, PART, COLUMN)
    e = Einsum(axes, (TERM,), extents, factors, members[0].alpha, replaced=tuple(p.name for p in members))
    if e.is_empty:
        return
    e = sites.reader.refined(sites.reader.without_ones(e))
    step = sites.order(e, kind.dtype, machine)
    read = sum(pass_time(2 * sites.nbytes(kind), machine) for p in members if _is_in_memory(sites, p.name))
    before = sum(sites.product_time(p, machine) for p in members)
    after = step.time + copied + read
    # A copy that pays for itself in several families alone is a loss in the first.
    gain, sharing = gain_of(before, after), _sharing(sites, family) if copied else [family]
    if gain < 0.0:
        pays_together = sharing[0] is family and len(sharing) * (gain + copied) > copied
        if not pays_together or gain < sites.least():
            return
    at = (symbol("i0"), symbol("i1"))
    root = Root(members[0].node, members[0], at, (), dict(zip(at, kind.shape, strict=True)), at)
    writer = sites.writer(root, e)
    whole = writer.written(step)
    shape = tuple(extents[s] for s in axes)
    over = tuple(symbol(f"t{k}") for k in range(3))
    value = writer.value(whole, over, shape)
    changed: dict[str, tuple[Node, ...]] = {}
    for k, p in zip(order, members, strict=True):
        own = Root(p.node, p, at, (), root.extents, at)
        here = dict(zip(axes, over, strict=True))
        env = {here[PART]: sympy.Integer(k), here[ROW]: at[0], here[COLUMN]: at[1]}
        moved = Definitions(sites.graph, root.extents).moved(value, tuple(env), tuple(env.values()))
        assert isinstance(moved, Load)
        last = sites.last(own, at, [(moved, e.scale)], copies=True)
        changed[p.name] = (*nodes, *writer.nodes, last) if p is members[0] else (last,)
    yield rewrite_of(changed, before, after, [p.name for p in members])


def _sharing(sites: ProductSites, family: Family) -> list[Family]:
    """The families that would read one copy."""
    return [f for row in families(sites).values() for f in row if f.loads == family.loads]


def _is_in_memory(sites: ProductSites, name: str) -> bool:
    """Whether a library reads a result, so that a part of another would be copied for it."""
    return any(isinstance(r, Library) for r in readers_of(sites.graph).get(name, ()))


def _as_it_lies(family: Family) -> tuple[tuple[int, ...], Load | None]:
    """The members' own places along the axis of parts, and one load for all of them; None where they are not evenly in
    one tensor."""
    count = tuple(range(len(family.loads)))
    first = family.loads[0]
    if any(ld.buffer != first.buffer or any(map(is_value, ld.indices)) for ld in family.loads):
        return count, None
    apart = [
        tuple(sympy.expand(i - j) for i, j in zip(ld.indices, first.indices, strict=True)) for ld in family.loads
    ]  # fmt: skip
    along = {d for steps in apart for d, s in enumerate(steps) if s != 0}
    if len(along) != 1:
        return count, None
    (d,) = along
    offsets = [steps[d] for steps in apart]
    if not all(o.is_Integer for o in offsets):
        return count, None
    ordered = sorted(offsets)
    step = ordered[1] - ordered[0]
    if any(b - a != step for a, b in pairwise(ordered)):
        return count, None
    index = sympy.expand(first.indices[d] + ordered[0] + step * PART)
    load = Load(first.buffer, (*first.indices[:d], index, *first.indices[d + 1 :]), first.dtype)
    return tuple(ordered.index(o) for o in offsets), load


def _side_by_side(sites: ProductSites, family: Family) -> tuple[Compute, Load, bool]:
    """A copy of the members' operands one behind the other, the load of it, and whether it was not there yet."""
    first, own = family.members[0], family.own
    size, count = family.extents[own], len(family.members)
    # As most of the operands lie, so that the copy goes along rows of both.
    lies_across = family.loads[0].indices == (COLUMN, TERM)
    order = (COLUMN, TERM) if lies_across else (ROW, TERM) if family.by_rows else (TERM, COLUMN)
    shape = tuple(family.extents[s] * (count if s == own else 1) for s in order)
    at = (symbol("i0"), symbol("i1"))
    along = at[order.index(own)]
    value: Expr | None = None
    for k in reversed(range(count)):
        p = family.members[k]
        name, axes = (p.left, (ROW, TERM)) if family.by_rows else (p.right, (TERM, COLUMN))
        place = {own: along - k * size, TERM: at[order.index(TERM)]}
        load = Load(name, tuple(sympy.expand(place[s]) for s in axes), first.type.dtype)
        end = const(0, DType.INT64) if value is None else IndexValue(sympy.expand((k + 1) * size), DType.INT64)
        if isinstance(end, IndexValue) and end.index.is_Integer:
            end = const(int(end.index), DType.INT64)
        value = load if value is None else Select(call("lt", IndexValue(along, DType.INT64), end), load, value)
    assert value is not None
    kind = TensorType(shape, contiguous_strides(shape), first.type.dtype, first.type.device)
    here = {own: sympy.expand(PART * size + own), TERM: TERM}
    same = next(
        (
            n
            for n in sites.graph.nodes
            # Few nodes are choices, and types are long to compare.
            if isinstance(n, Compute)
            and isinstance(n.value, Select)
            and n.type == kind
            and n.axes == at
            and n.value == value
        ),
        None,
    )
    name = same.name if same is not None else fresh_name(f"{first.name}_joined", sites.taken)
    made = same or Compute(name, kind, at, value, first.node.origins)
    return made, Load(name, tuple(here[s] for s in order), kind.dtype), same is None


__all__ = ["Family", "families", "join_products"]
