"""An order of the nodes of a fused graph in which less memory is held at once.

What frees no less than it takes is done at once, and what takes more as late as it can be; of the orders that this
gives, forwards and backwards, the one with the lowest peak is taken where that is lower than in the graph's own order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ...ir.graph.copies import COPY
from ...ir.graph.effects import has_effect
from ...ir.graph.facts import aliases_of
from ...ir.graph.graph import CONSTANT, Graph, Library, Node, size_makers
from ...ir.text.structure import structural_key
from ..context import PassContext
from ..cost.calls import MORE, WORTH
from ..decisions import ORDER, Alternative, text_key
from ..fusion.fusion import Fusion
from .flow import SEEDS, CallFlow, made_by

# The ways of an order: the graph's own, what frees memory as early as it can, what takes it as late as it can.
AS_WRITTEN, EARLY, LATE = "as written", "freeing early", "taking late"


def order_for_memory(fusion: Fusion, context: PassContext) -> Fusion:
    """The nodes of the graph in such an order.

    Nodes that write memory keep their place among those that look at it, and behind those that look at data which may
    be an error, as their ``functions`` tell; random calls keep theirs among each other.
    Graphs with calls whose effects are not known, or with sizes that data decide, stay as they are.
    """
    graph = fusion.graph
    if size_makers(graph) or any(_is_fixed(n) for n in graph.nodes):
        return fusion
    flow = CallFlow.of(fusion, context.given)
    worth = WORTH * flow.peak(range(len(graph.nodes)))
    orders = {EARLY: partial(_eager, flow), LATE: partial(_late, flow)}
    if flow.least() >= worth:
        by_cost, best = AS_WRITTEN, None
    else:
        peak, best, by_cost = min((flow.peak(order), order, way) for way, of in orders.items() for order in (of(),))
        if peak >= worth:
            by_cost, best = AS_WRITTEN, None
    chosen = context.decide(
        ORDER, lambda: text_key([structural_key(graph, fusion.module)]),
        [Alternative(way) for way in (AS_WRITTEN, *orders)], by_cost, reason="the lowest peak",
    )  # fmt: skip
    if chosen == AS_WRITTEN:
        return fusion
    if chosen != by_cost or best is None:
        best = orders[chosen]()
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
            for name, nbytes in made_by(node, graph.symbols.hint):
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
    return has_effect(node) and isinstance(node, Library) and node.target not in (COPY, SEEDS, CONSTANT)


def _eager(flow: CallFlow) -> list[int]:
    """From the first node on: what frees no less than it takes before anything else."""
    # What nobody frees has no readers here.
    left = [set() if base in flow.kept else set(readers) for base, readers in enumerate(flow.readers)]
    there = [bool(readers) or base in flow.kept for base, readers in enumerate(flow.readers)]
    gain = [-sum([flow.nbytes[n] for n in made if there[n]]) for made in flow.makes]

    def frees(base: int) -> Iterable[int]:
        """Who is left as the only one to look at some memory frees it."""
        if len(left[base]) == 1:
            (reader,) = left[base]
            gain[reader] += flow.nbytes[base]
            return (reader,)
        return ()

    def ran(k: int) -> Iterable[int]:
        found: list[int] = []
        for base in flow.looks[k]:
            left[base].discard(k)
            found += frees(base)
        return found

    for base in range(len(left)):
        frees(base)
    return _listed(flow.before, flow.after, gain, ran, 1)


def _late(flow: CallFlow) -> list[int]:
    """From the last node on: what frees no less than it takes, seen backwards, before anything else."""
    there, nbytes = set(flow.kept), flow.nbytes
    gain = [
        sum([nbytes[n] for n in made if n in there]) - sum([nbytes[b] for b in read if b not in there])
        for made, read in zip(flow.makes, flow.looks, strict=True)
    ]
    makers = {base: k for k, made in enumerate(flow.makes) for base in made}

    def ran(k: int) -> Iterable[int]:
        found: list[int] = []
        for base in flow.looks[k]:
            if base not in there:
                there.add(base)
                others = (*flow.readers[base], makers[base]) if base in makers else flow.readers[base]
                for other in others:
                    gain[other] += nbytes[base]
                found += others
        return found

    return _listed(flow.after, flow.before, gain, ran, -1)[::-1]


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
