"""Chains: a reduction that reads the results of a contraction as they are made, and what follows it row by row.

A contraction's results are many and wanted once, so a kernel makes a block of them, hands it to the reduction and
forgets it: the scores of an attention never exist in memory. Which nodes form a chain is decided before the greedy
search, since the search compares bytes of tensors that are there, and these never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from ...ir.expr.index import Extents, simplify
from ...ir.expr.monoid import WEIGHTED
from ...ir.expr.value import Call, Cast, Expr, Load, is_value, loads, rewrite
from ...ir.graph.facts import makers_of, places_of
from ...ir.graph.graph import Compute, Graph, Node, Reduction, node_values, uses
from ..facts.domain import Binding, Digits, Domain, bind_access
from ..facts.fusion_nodes import is_drawn
from ..facts.order import waits
from ..facts.views import ViewMap, map_value

# What follows a chain row by row and is taken in: at most so many nodes.
MAX_EPILOGUE = 16


def told(start: Reduction) -> list[Load]:
    """The loads that tell a start about each of its columns, apart from the vectors that it weighs."""
    value = start.values[0]
    if start.monoid is WEIGHTED and not is_total(start):
        assert isinstance(value, Call)
        value = value.args[0]
    return list(loads(value))


def is_total(start: Reduction) -> bool:
    """Whether a start sums up what a chain makes over some of its rows, and weighs nothing."""
    value = start.values[0]
    while isinstance(value, Cast):
        value = value.value
    return start.monoid is WEIGHTED and isinstance(value, Load)


def row_axes(start: Reduction) -> set[sympy.Symbol]:
    """The axes of a start that its scores have too."""
    scored = {x for ld in told(start) for i in ld.indices if not is_value(i) for x in i.free_symbols}
    return scored & set(start.axes)


@dataclass(slots=True)
class Others:
    """The chains of a graph so far, which nodes are theirs, where each node of the graph stands, and after which."""

    graph: Graph
    built: list[Chain] = field(default_factory=list)
    # Nodes of chains, and what they compute in place.
    claimed: set[str] = field(default_factory=set)
    # What starts make: nobody computes in place what reads it, since it may never be in memory.
    started: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if isinstance(node, Reduction) and any(c.vector for c in node.monoid.components):
                self.started.update(node.names)

    def add(self, chain: Chain) -> None:
        self.built.append(chain)
        self.claimed |= chain.taken

    def apart(self, chain: Chain, operands: Sequence[str]) -> bool:
        """Whether none of the operands, for which a chain would wait, waits for that chain.

        An earlier chain that reads what is made after this one began may wait for this one: nothing of it is read.
        """
        places, before = places_of(self.graph), waits(self.graph)
        first = min(places[n] for s in chain.starts for n in s.names)
        taken = set(chain.taken)
        for other in self.built:
            if other.latest >= first:
                taken |= other.taken
        forbidden = {places[n] for n in taken}
        floor = min(forbidden)
        stack, seen = [places[n] for n in operands if n in places], set[int]()
        while stack:
            place = stack.pop()
            if place in forbidden:
                return False
            if place > floor and place not in seen:
                seen.add(place)
                stack += before[place]
        return True


@dataclass(slots=True)
class Chain:
    """The nodes of one chain in topological order, and the axes of each as digits of the domain of its results."""

    graph: Graph
    views: ViewMap
    readers: Mapping[str, Sequence[Node]]
    needed: frozenset[str]
    starts: tuple[Reduction, ...]
    others: Others
    nodes: list[Compute | Reduction] = field(default_factory=list)
    # Nodes after the start, with their values read through views; the domain is that of the start's results.
    domain: Domain = field(default_factory=Domain)
    bindings: dict[str, Binding] = field(default_factory=dict)
    values: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    last: str = ""
    computes: dict[str, Compute] = field(default_factory=dict)
    # Nodes' names and those of nodes computed in place; those of the latter, by the node that reads them.
    taken: set[str] = field(default_factory=set)
    own: dict[str, set[str]] = field(default_factory=dict)
    # Nodes that reduce a row's own elements before the chain begins: their axes in terms of the first start's.
    prologues: dict[str, Mapping[sympy.Symbol, sympy.Expr]] = field(default_factory=dict)
    # Where the last of what the chain reads stands.
    latest: int = -1

    def grow(self) -> None:
        """Take in what leads from contractions to the starts, then what follows."""
        self.computes = {n.name: n for n in self.graph.nodes if isinstance(n, Compute)}
        self.nodes = [*self._sources(), *self.starts]
        self.taken = {n for m in self.nodes for n in m.names}
        rows: list[Digits] = []
        for start in self.column_starts or self.starts:
            binding: Binding = {}
            kept, found = row_axes(start), iter(rows)
            for axis, extent in zip(start.axes, start.types[0].shape, strict=True):
                if axis in kept and start is not self.starts[0]:
                    binding[axis] = next(found)
                else:
                    # What has one element has no digit: readers name it by 0, or not at all.
                    binding[axis] = (self.domain.add(extent),) if extent != 1 else ()
                if axis in kept and start is self.starts[0]:
                    rows.append(binding[axis])
            self.bindings[start.names[0]] = binding
        while len(self.bindings) <= MAX_EPILOGUE and self._follow():
            pass
        inside = {n for m in self.nodes for n in m.names}
        for m in self.nodes[self.nodes.index(self.starts[0]) :]:
            for name in m.names:
                outer = [r for r in self.readers.get(name, ()) if inside.isdisjoint(r.names)]
                if outer or name in self.needed:
                    self.outputs.append(name)
        self.last = self.nodes[-1].names[0]
        read = {u for m in self.nodes for u in uses(m)} | {
            ld.buffer for values in self.values.values() for v in values for ld in loads(v)
        }
        self.latest = max((places_of(self.graph).get(n, -1) for n in read - self.taken), default=-1)

    @property
    def column_starts(self) -> tuple[Reduction, ...]:
        """The starts that take columns up, which stand first."""
        return tuple(s for s in self.starts if not is_total(s))

    def _sources(self) -> list[Compute | Reduction]:
        """The nodes between a contraction and the start's first value, the contraction among them, in order."""
        makers = makers_of(self.graph)
        found: list[Compute | Reduction] = []
        inside = {n for s in self.starts for n in s.names}
        stack = [ld.buffer for s in self.starts for ld in told(s)]
        while stack:
            node = makers.get(stack.pop())
            if not isinstance(node, (Compute, Reduction)) or node.names[0] in inside:
                continue
            if node.names[0] in self.others.claimed:
                continue
            if isinstance(node, Compute) and not (is_drawn(node.value) or self._leads_back(node, makers)):
                continue
            if isinstance(node, Reduction) and not is_contraction(node):
                continue
            others = [r for n in node.names for r in self.readers.get(n, ()) if inside.isdisjoint(r.names)]
            if others or not self.needed.isdisjoint(node.names) or not self._is_read_plainly(node):
                continue
            inside.update(node.names)
            found.append(node)
            if isinstance(node, Compute):
                stack += [ld.buffer for ld in loads(node.value)]
        return [n for n in self.graph.nodes if any(n is m for m in found)]  # type: ignore[misc]

    def _is_read_plainly(self, node: Compute | Reduction) -> bool:
        """Whether each reader reads one element of a node, at axes of its own."""
        for name in node.names:
            for reader in self.readers.get(name, ()):
                assert isinstance(reader, (Compute, Reduction))
                at = {ld.indices for v in node_values(reader) for ld in loads(v) if ld.buffer == name}
                if len(at) != 1 or not all(isinstance(i, sympy.Symbol) for i in next(iter(at))):
                    return False
        return True

    def _leads_back(self, node: Compute, makers: Mapping[str, Node]) -> bool:
        """Whether a node reads a contraction's results, directly or through other element-wise nodes."""
        for name in {ld.buffer for ld in loads(node.value)}:
            made = makers.get(name)
            if isinstance(made, Reduction) and is_contraction(made):
                return True
            if isinstance(made, Compute) and self._leads_back(made, makers):
                return True
        return False

    def _follow(self) -> bool:
        """Take in one node that reads results of the chain, element by element, if all it reads is at hand."""
        made = {n: m for m in self.nodes[self.nodes.index(self.starts[0]) :] for n in m.names
                if m.names[0] in self.bindings}  # fmt: skip
        inside = {n for m in self.nodes for n in m.names}
        for node in (r for n in made for r in self.readers.get(n, ()) if isinstance(r, Compute)):
            if node.name in inside or node.name in self.others.claimed or not self._is_only_way(node, made):
                continue
            binding, values = self._bound(node, made)
            if binding is None:
                continue
            foreign = [b for ld in loads(values[0]) for b in [self.views.base(ld.buffer)] if b not in made]
            if not self.others.apart(self, foreign):
                continue
            self.nodes.append(node)
            self.taken |= {node.name, *self.own[node.name]}
            self.bindings[node.name], self.values[node.name] = binding, values
            return True
        return False

    def _is_only_way(self, node: Compute, made: dict[str, Compute | Reduction]) -> bool:
        """Whether nobody else reads the results that a node reads, so that they need not be written."""
        read = {self.views.base(u) for u in uses(node)} & made.keys()
        return all(
            n not in self.needed
            and all(r.names == node.names or (r.names and r.names[0] in made) or self._is_next(r, made)
                    for r in self.readers[n])
            for n in read
        )  # fmt: skip

    def _is_next(self, node: Node, made: dict[str, Compute | Reduction]) -> bool:
        """Whether a node reads results of the chain, and besides nothing that waits for it, so that it can be taken in
        whatever else is."""
        if not isinstance(node, Compute):
            return False
        foreign = [b for u in uses(node) if (b := self.views.base(u)) not in made]
        return self.others.apart(self, foreign) and self._bound(node, made)[0] is not None

    def _bound(
        self, node: Compute, made: dict[str, Compute | Reduction]
    ) -> tuple[Binding, tuple[Expr, ...]] | tuple[None, tuple[()]]:
        """The node's axes as digits of the domain, and its value read through views; None where it does not line
        up."""
        extents = dict(zip(node.axes, node.type.shape, strict=True))
        value = self._with_own_operands(self.views.resolve(node.value, extents), node, extents, made)
        trial, binding = self.domain.copy(), Binding()
        rows = {d for s in self.column_starts for a in row_axes(s) for d in self.bindings[s.names[0]][a]}
        whole: set[int] = set()
        for ld in loads(value):
            if ld.buffer not in made:
                continue
            if any(is_value(i) for i in ld.indices):
                return None, ()
            maker = made[ld.buffer]
            places = [self.bindings[maker.names[0]][a] for a in maker.axes]
            # Maxima and sums are those of a row whatever the feature: they may be read at the first. Elements of other
            # rows and features are not at hand.
            pairs = zip(ld.indices, places, strict=True)
            alike = not _is_vector(maker, ld.buffer)
            digits: list[Digits | None] = [() if i == 0 and alike and rows.isdisjoint(d) else d for i, d in pairs]
            whole.update(d for i, own in zip(ld.indices, places, strict=True) if i != 0 for d in own)
            if not bind_access(trial, ld.indices, digits, extents, binding):
                return None, ()
            if len(trial.splits) != len(self.domain.splits):
                return None, ()
        covered = [d for a in node.axes for d in binding.get(a, ())]
        missing = [a for a in node.axes if a not in binding and extents[a] != 1]
        if missing or sorted(covered) != sorted(whole):
            return None, ()
        return {a: binding.get(a, ()) for a in node.axes}, (value,)

    def _with_own_operands(
        self, value: Expr, node: Compute, extents: Extents, made: dict[str, Compute | Reduction]
    ) -> Expr:
        """The value with element-wise operands that nobody else reads computed in place: gates, biases."""
        mine = {node.name}

        def leaf(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer in made or e.buffer in self.needed or len(mine) > MAX_EPILOGUE:
                return None
            other = self.computes.get(e.buffer)
            if other is None or not all(r.names and mine.issuperset(r.names) for r in self.readers[e.buffer]):
                return None
            elsewhere = self.others.started - self.bindings.keys()
            if e.buffer in self.others.claimed or any(self.views.base(u) in elsewhere for u in uses(other)):
                return None
            mine.add(e.buffer)
            moved = map_value(other.value, dict(zip(other.axes, e.indices, strict=True)))
            moved = rewrite(moved, lambda _: None, lambda i: simplify(i, extents, self.views.table))
            return rewrite(self.views.resolve(moved, extents), leaf)

        result = rewrite(value, leaf)
        self.own[node.name] = mine
        return result


def _is_vector(maker: Compute | Reduction, name: str) -> bool:
    """Whether a result of a chain's node has a value of its own for each feature."""
    if not isinstance(maker, Reduction):
        return True
    return maker.monoid.components[maker.names.index(name)].vector


def is_contraction(node: Reduction) -> bool:
    """A sum over one axis of products of two operands, one of which lacks an axis of the result that the other has."""
    if node.monoid.name != "sum" or len(node.reduce_axes) != 1:
        return False
    (value,) = node.values
    while isinstance(value, Cast):
        value = value.value
    args = getattr(value, "args", ())
    if getattr(value, "fn", "") != "mul" or len(args) != 2:
        return False
    axes = set(node.axes)
    first, second = ({s for ld in loads(a) for i in ld.indices if not is_value(i) for s in i.free_symbols & axes}
                     for a in args)  # fmt: skip
    return first != second
