"""An order of the nodes of a fused graph in which less memory is held at once.

What frees no less than it takes is done at once, and what takes more as late as it can be; of the orders that this
gives, forwards and backwards, the one with the lowest peak is taken where that is lower than in the graph's own order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import sympy

from ...ir.graph.copies import COPY
from ...ir.graph.effects import has_effect, written
from ...ir.graph.facts import aliases_of, places_of
from ...ir.graph.graph import CONSTANT, CallTensor, Graph, Input, Library, Node, View, size_makers, uses
from ...ir.graph.sequences import sequence_of
from ...ir.graph.slices import JOINED
from ..context import PassContext
from ..cost.calls import MORE, WORTH
from ..fusion.early_errors import checks_before_writes
from ..fusion.fusion import Fusion

_SEEDS = "mlc::seeds"


def order_for_memory(fusion: Fusion, context: PassContext) -> Fusion:
    """The nodes of the graph in such an order.

    Nodes that write memory keep their place among those that look at it, and behind those that look at data which may
    be an error, as their ``functions`` tell; random calls keep theirs among each other.
    Graphs with calls whose effects are not known, or with sizes that data decide, stay as they are.
    """
    graph = fusion.graph
    if size_makers(graph) or any(_is_fixed(n) for n in graph.nodes):
        return fusion
    flow = _Flow.of(graph, context.given)
    for k, checks in checks_before_writes(graph, fusion.functions).items() if fusion.functions else ():
        flow.follow(k, checks)
    worth = WORTH * flow.peak(range(len(graph.nodes)))
    if flow.least() >= worth:
        return fusion
    peak, best = min((flow.peak(order), order) for order in (flow.eager(), flow.late()))
    if peak >= worth:
        return fusion
    return replace(fusion, graph=replace(graph, nodes=tuple(graph.nodes[k] for k in best)))


@dataclass(slots=True)
class Held:
    """Bytes that results are held in at each node, in the order of a graph and at typical sizes."""

    bytes: list[int]
    most: float
    # Of what nodes make: the positions of the node that makes it and of the last that looks at it, and how large it is.
    lives: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, graph: Graph) -> Held:
        end = len(graph.nodes)
        last = {name: readers[-1] for name, readers in aliases_of(graph).readers.items()}
        last.update(dict.fromkeys(aliases_of(graph).leaving, end))
        lives = {}
        change = [0] * (end + 2)
        for k, node in enumerate(graph.nodes):
            for name, nbytes in _made(node, graph.symbols.hint):
                lives[name] = k, last.get(name, k), nbytes
                change[k] += nbytes
                change[lives[name][1] + 1] -= nbytes
        held = list(accumulate(change))
        return cls(held, MORE * max(held), lives)

    def join(self, whole: str, parts: Collection[str]) -> bool:
        """Let parts lie in a tensor that has been made of them, from the first of them on; whether the peak allows it,
        else nothing changes."""
        begin = min(self.lives[p][0] for p in parts)
        until = max(self.lives[p][1] for p in (whole, *parts))
        change = [0] * (until - begin + 2)

        def add(first: int, last: int, nbytes: int) -> None:
            change[first - begin] += nbytes
            change[last + 1 - begin] -= nbytes

        add(begin, until, self.lives[whole][2])
        for first, last, nbytes in (self.lives[name] for name in (whole, *parts)):
            add(first, last, -nbytes)
        held = [a + b for a, b in zip(self.bytes[begin : until + 1], accumulate(change), strict=False)]
        if max(held) > self.most:
            return False
        self.bytes[begin : until + 1] = held
        return True


def _is_fixed(node: Node) -> bool:
    """Whether a node does something that no name tells."""
    return has_effect(node) and isinstance(node, Library) and node.target not in (COPY, _SEEDS, CONSTANT)


@dataclass(slots=True)
class _Flow:
    """Nodes by position: what stands before and after each, and which memory, by number, it looks at and makes."""

    before: list[set[int]]
    after: list[set[int]]
    looks: list[list[int]]
    makes: list[list[int]]
    # By memory: bytes (none of what others hold), who looks at it, and whether it is there from the beginning, or to
    # the end.
    nbytes: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, given: Collection[str]) -> _Flow:
        nodes, hint = graph.nodes, graph.symbols.hint
        shared, made_at = aliases_of(graph), places_of(graph)
        flow = cls([set() for _ in nodes], [set() for _ in nodes], [[] for _ in nodes], [[] for _ in nodes])
        flow.kept = {flow.number(base) for base in shared.leaving}
        for i in graph.inputs:
            if isinstance(i, Input) and i.name in given:
                base = flow.number(i.name)
                flow.given.add(base)
                flow.nbytes[base] = hint(i.type.nbytes)
        over: dict[int, int] = {}
        last: dict[str, int] = {}
        for k, node in enumerate(nodes):
            read = uses(node)
            flow.follow(k, (made_at[u] for u in read if u in made_at))
            bases = list(dict.fromkeys([flow.number(b) for u in read for b in shared[u]]))
            if over:
                flow.follow(k, (over[base] for base in bases if base in over))
            for base in {flow.number(b) for t in written(node) for b in shared[t]}:
                flow.follow(k, flow.readers[base])
                over[base] = k
            for base in bases:
                flow.readers[base].append(k)
            flow.looks[k] = bases
            # Seeds come from the generator that the calls of a random sequence draw from.
            sequence = "random" if isinstance(node, Library) and node.target == _SEEDS else sequence_of(node)
            if sequence is not None:
                flow.follow(k, (last[sequence],) if sequence in last else ())
                last[sequence] = k
            for name, nbytes in _made(node, hint):
                base = flow.number(name)
                flow.makes[k].append(base)
                flow.nbytes[base] = nbytes
        return flow

    def number(self, base: str) -> int:
        """The number of some memory, named as it was when it was made."""
        found = self.numbers.setdefault(base, len(self.numbers))
        if found == len(self.nbytes):
            self.nbytes.append(0)
            self.readers.append([])
        return found

    def follow(self, at: int, earlier: Iterable[int]) -> None:
        for k in earlier:
            if k != at:
                self.before[at].add(k)
                self.after[k].add(at)

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes held at once."""
        nbytes, kept = self.nbytes, self.kept
        left = [len(readers) for readers in self.readers]
        now = most = sum([nbytes[base] for base in self.given])
        for k in order:
            for base in self.makes[k]:
                now += nbytes[base]
            most = max(most, now)
            for base in self.looks[k]:
                left[base] -= 1
                if not left[base] and base not in kept:
                    now -= nbytes[base]
            for base in self.makes[k]:
                if not self.readers[base] and base not in kept:
                    now -= nbytes[base]
        return most

    def least(self) -> int:
        """No order holds less: what a node makes and looks at is there at once."""
        nbytes = self.nbytes
        both = ({*made, *read} for made, read in zip(self.makes, self.looks, strict=True))
        return max((sum([nbytes[base] for base in bases]) for bases in both), default=0)

    def eager(self) -> list[int]:
        """From the first node on: what frees no less than it takes before anything else."""
        # What nobody frees has no readers here.
        left = [set() if base in self.kept else set(readers) for base, readers in enumerate(self.readers)]
        there = [bool(readers) or base in self.kept for base, readers in enumerate(self.readers)]
        gain = [-sum([self.nbytes[n] for n in made if there[n]]) for made in self.makes]

        def frees(base: int) -> Iterable[int]:
            """Who is left as the only one to look at some memory frees it."""
            if len(left[base]) == 1:
                (reader,) = left[base]
                gain[reader] += self.nbytes[base]
                return (reader,)
            return ()

        def ran(k: int) -> Iterable[int]:
            found: list[int] = []
            for base in self.looks[k]:
                left[base].discard(k)
                found += frees(base)
            return found

        for base in range(len(left)):
            frees(base)
        return _listed(self.before, self.after, gain, ran, 1)

    def late(self) -> list[int]:
        """From the last node on: what frees no less than it takes, seen backwards, before anything else."""
        there, nbytes = set(self.kept), self.nbytes
        gain = [
            sum([nbytes[n] for n in made if n in there]) - sum([nbytes[b] for b in read if b not in there])
            for made, read in zip(self.makes, self.looks, strict=True)
        ]
        makers = {base: k for k, made in enumerate(self.makes) for base in made}

        def ran(k: int) -> Iterable[int]:
            found: list[int] = []
            for base in self.looks[k]:
                if base not in there:
                    there.add(base)
                    others = (*self.readers[base], makers[base]) if base in makers else self.readers[base]
                    for other in others:
                        gain[other] += nbytes[base]
                    found += others
            return found

        return _listed(self.after, self.before, gain, ran, -1)[::-1]


def _listed(
    before: Sequence[set[int]],
    after: Sequence[set[int]],
    gain: list[int],
    ran: Callable[[int], Iterable[int]],
    direction: int,
) -> list[int]:
    """All positions, each after those ``before`` it: those that gain first, and otherwise in the order of the graph.

    ``ran`` is told of each in turn, and tells whose gain has changed.
    """
    waiting = [len(b) for b in before]
    gaining: list[int] = []
    others: list[int] = []
    order: list[int] = []
    done = [False] * len(before)

    def ready(k: int) -> None:
        heapq.heappush(gaining if gain[k] >= 0 else others, direction * k)

    for k, count in enumerate(waiting):
        if not count:
            ready(k)
    while gaining or others:
        k = direction * heapq.heappop(gaining or others)
        if done[k]:
            continue
        done[k] = True
        order.append(k)
        for other in ran(k):
            if not done[other] and not waiting[other] and gain[other] >= 0:
                ready(other)
        for other in after[k]:
            waiting[other] -= 1
            if not waiting[other]:
                ready(other)
    return order


def _made(node: Node, hint: Callable[[sympy.Expr], int]) -> list[tuple[str, int]]:
    """The names that a node makes memory for, and its bytes."""
    match node:
        case View():
            return []
        case CallTensor():
            new = zip(node.names, node.types, node.fresh, strict=True)
            return [(name, hint(kind.nbytes)) for name, kind, fresh in new if fresh]
        case Library(target=target) if target in (CONSTANT, COPY, JOINED):
            return []
        case Library():
            return [(n, hint(t.nbytes)) for n, t in zip(node.names, node.types, strict=True) if t is not None]
    return []
