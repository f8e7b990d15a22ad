"""Prologues: what a chain is told of each of its rows, reduced from that row's own elements before the chain begins.

The backward of attention takes off each score's gradient the sum over its row of output times gradient. The function
whose rows are those rows makes that sum itself and writes it for the functions that read it by their columns: neither a
kernel nor a visit of two tensors is left of it, but those functions now wait for this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from ...ir.expr.index import simplify
from ...ir.expr.monoid import WEIGHTED
from ...ir.expr.value import Expr, Index, Load, flops, is_value, loads, rewrite
from ...ir.graph.facts import makers_of
from ...ir.graph.graph import Compute, Graph, Node, Reduction, View, node_values, uses
from ...ir.target import TargetOf
from ..cost.attention import WIDEST
from ..facts.domain import Binding, Domain, bind_access
from ..facts.order import waits
from ..facts.views import map_value
from ..rules import Capability, can
from .chain import Chain, is_contraction, is_total, row_axes

# Element-wise operands of a prologue that it computes itself.
MOST_OPERANDS = 16


@dataclass(frozen=True, slots=True)
class _Prologue:
    """A reduction, its value with element-wise operands in place, and its axes in terms of the first start's."""

    node: Reduction
    value: Expr
    places: Mapping[sympy.Symbol, sympy.Expr]


def take_prologues(graph: Graph, chains: Sequence[Chain], target_of: TargetOf) -> None:
    """Give chains whose rules can take them the reductions of their rows, each to the first that can have it, where
    none would have to wait for itself."""
    able = [s for s in chains if can(target_of(s.starts[0].types[0].device), Capability.FIRST_ROWS)]
    if not able:
        return
    makers = makers_of(graph)
    known = {n for s in chains for n in s.taken}
    given: dict[str, Chain] = {}
    for chain in able:
        for found in _found(chain, makers, known):
            if found.node.names[0] not in given:
                given[found.node.names[0]] = chain
                _take(chain, found)
    while given:
        late = _waiting(graph, chains)
        refused = [(name, s) for name, s in given.items() if any(s is x for x in late)]
        if not refused:
            return
        for name, chain in refused:
            _give_back(chain, name)
            del given[name]


def _take(chain: Chain, found: _Prologue) -> None:
    name = found.node.names[0]
    chain.nodes.insert(0, found.node)
    chain.values[name] = (found.value,)
    chain.prologues[name] = found.places
    chain.taken.add(name)
    inside = {n for m in chain.nodes for n in m.names}
    if name in chain.needed or any(inside.isdisjoint(r.names) for r in chain.readers[name]):
        chain.outputs.append(name)


def _give_back(chain: Chain, name: str) -> None:
    chain.nodes = [m for m in chain.nodes if name not in m.names]
    del chain.values[name], chain.prologues[name]
    chain.taken.discard(name)
    chain.outputs = [o for o in chain.outputs if o != name]


# --- finding them -----------------------------------------------------------------------------------------------------


def _found(chain: Chain, makers: Mapping[str, Node], known: set[str]) -> Iterator[_Prologue]:
    start = chain.starts[0]
    if start.monoid is not WEIGHTED or any(map(is_total, chain.starts)):
        return
    extents = dict(zip(start.axes, start.types[0].shape, strict=True))
    rows = {a: extents[a] for a in start.axes if a in row_axes(start)}
    sites: dict[str, set[tuple[Index, ...]]] = {}
    speakers = set()
    for node, at in _points(chain):
        speakers.add(node.name)
        own = dict(zip(node.axes, node.type.shape, strict=True))
        for ld in loads(chain.views.resolve(node.value, own)):
            sites.setdefault(ld.buffer, set()).add(tuple(i if is_value(i) else i.xreplace(at) for i in ld.indices))
    elsewhere = {chain.views.base(u) for m in chain.nodes if m.names[0] not in speakers for u in uses(m)}
    elsewhere |= {ld.buffer for values in chain.values.values() for v in values for ld in loads(v)}
    for name, places in sites.items():
        made = makers.get(name)
        if not isinstance(made, Reduction) or len(places) != 1 or name in known or name in elsewhere:
            continue
        (indices,) = places
        if _is_row(made, indices, rows) and (value := _value(chain, made, makers)) is not None:
            yield _Prologue(made, value, dict(zip(made.axes, indices, strict=True)))  # type: ignore[arg-type]


def _points(chain: Chain) -> Iterator[tuple[Compute, dict[sympy.Symbol, sympy.Expr]]]:
    """The element-wise nodes that lead to the first start, with their axes as axes of that."""
    start = chain.starts[0]
    at = chain.nodes.index(start)
    places: dict[str, dict[sympy.Symbol, sympy.Expr]] = {start.names[0]: {}}
    for m in reversed(chain.nodes[:at]):
        reads = ((r, ld) for r in (*chain.nodes[:at], start) if r.names[0] in places
                 for v in node_values(r) for ld in loads(v) if ld.buffer in m.names)  # fmt: skip
        first = next(reads, None)
        if first is not None:
            env = places[first[0].names[0]]
            places[m.names[0]] = {a: i.xreplace(env) for a, i in zip(m.axes, first[1].indices, strict=True)}  # type: ignore[union-attr]
            if isinstance(m, Compute):
                yield m, places[m.names[0]]


def _is_row(made: Reduction, indices: tuple[Index, ...], rows: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether a reduction has one result for each row, and this is the row's."""
    if len(made.names) != 1 or made.monoid.components[0].vector or made.monoid is WEIGHTED or is_contraction(made):
        return False
    width = sympy.Mul(*made.reduce_shape)
    if len(made.reduce_axes) != 1 or not width.is_Integer or not 1 <= int(width) <= WIDEST:
        return False
    domain, binding = Domain(), Binding()
    places = [(domain.add(n),) if n != 1 else () for n in made.types[0].shape]
    if not bind_access(domain, indices, list(places), dict(rows), binding):
        return False
    covered = [d for a in rows for d in binding.get(a, ())]
    missing = [a for a in rows if a not in binding and rows[a] != 1]
    return not missing and sorted(covered) == sorted(domain.order)


def _value(chain: Chain, made: Reduction, makers: Mapping[str, Node]) -> Expr | None:
    """The value of a reduction with what nobody else reads computed in place; None where it would read what is in
    memory for its sake alone."""
    views, extents = chain.views, dict(zip((*made.axes, *made.reduce_axes), (*made.types[0].shape, *made.reduce_shape),
                                            strict=True))  # fmt: skip
    mine = {made.names[0]}
    read = {views.base(u) for m in chain.nodes for u in uses(m)}

    def leaf(e: Expr) -> Expr | None:
        other = makers.get(e.buffer) if isinstance(e, Load) else None
        if not isinstance(e, Load) or not isinstance(other, Compute) or e.buffer in chain.needed:
            return None
        alone = all(r.names and mine.issuperset(r.names) for r in chain.readers[e.buffer])
        if len(mine) > MOST_OPERANDS or not (alone or (e.buffer not in read and not flops(other.value))):
            return None
        if alone:
            mine.add(e.buffer)
        moved = map_value(other.value, dict(zip(other.axes, e.indices, strict=True)))
        moved = rewrite(moved, lambda _: None, lambda i: simplify(i, extents, views.table))
        return rewrite(views.resolve(moved, extents), leaf)

    (given,) = made.values
    value = rewrite(views.resolve(given, extents), leaf)
    for ld in loads(value):
        other = makers.get(ld.buffer)
        if isinstance(other, (Compute, Reduction)) and ld.buffer not in read and ld.buffer not in chain.needed:
            return None
    return value


# --- order ------------------------------------------------------------------------------------------------------------


def _waiting(graph: Graph, chains: Sequence[Chain]) -> list[Chain]:
    """The chains that wait for themselves where each is one call, and those between two such."""
    home = {n: s for s in chains for m in s.nodes for n in m.names}
    base = chains[0].views.base
    makers = makers_of(graph)

    def unit(node: Node) -> int:
        if isinstance(node, View):
            node = makers.get(base(node.name), node)
        return id(home.get(node.names[0], node) if node.names else node)

    waiting: dict[int, set[int]] = {}
    for node, before in zip(graph.nodes, waits(graph), strict=True):
        if not isinstance(node, View):
            waiting.setdefault(unit(node), set()).update(unit(graph.nodes[k]) for k in before)
    for s in chains:
        read = {ld.buffer for values in s.values.values() for v in values for ld in loads(v)}
        waiting[id(s)].update(unit(makers[n]) for n in read if n in makers)
    for key, units in waiting.items():
        units.intersection_update(waiting)  # not what is a view of an input
        units.discard(key)
    # What waits for nothing that is left, and then what nothing left waits for: cycles remain, and what is between.
    readers: dict[int, set[int]] = {key: set() for key in waiting}
    for key, units in waiting.items():
        for other in units:
            readers[other].add(key)
    _peel(waiting, readers)
    _peel(readers, waiting)
    return [s for s in chains if id(s) in waiting]


def _peel(waiting: dict[int, set[int]], readers: dict[int, set[int]]) -> None:
    """Take out of both what waits for nothing, then what waited for that alone, and so on."""
    ready = [key for key, before in waiting.items() if not before]
    while ready:
        done = ready.pop()
        del waiting[done]
        for key in readers.pop(done):
            waiting[key].discard(done)
            if not waiting[key]:
                ready.append(key)


__all__ = ["take_prologues"]
