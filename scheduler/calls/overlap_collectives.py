"""Collectives run beside what does not wait for them: each is begun so early, and waited for so late, that the calls
between the two take as long as it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...ir.graph.collectives import is_collective, is_wait
from ...ir.graph.copies import COPY
from ...ir.graph.effects import has_effect
from ...ir.graph.graph import CONSTANT, Graph, Library, Node, size_makers, uses
from ..context import PassContext
from ..cost.calls import MORE
from ..cost.collectives import Times
from ..fusion.fusion import Fusion
from .flow import SEEDS, CallFlow


def overlap_collectives(fusion: Fusion, context: PassContext) -> Fusion:
    """The nodes of the graph in an order in which collectives are hidden by other calls, where these and memory allow.

    Fused graphs begin a collective where the model does, and wait for it before its first reader. Here more calls come
    between the two. First the collective moves up, with the calls whose results it is given; where that is not enough,
    the wait moves down with what reads it. Collectives keep their order, which all processes of a group share, and no
    more memory is held than before (``cost/calls.py`` says how much more is the same).
    Graphs with calls whose effects are not known, or with sizes that data decide, stay as they are.
    """
    graph = fusion.graph
    if not any(is_collective(n) for n in graph.nodes) or size_makers(graph) or any(map(_is_fixed, graph.nodes)):
        return fusion
    flow = CallFlow.of(fusion, context.given)
    machine = context.target_of(_device(graph)).machine
    times = Times(graph, {**fusion.functions, **fusion.given}, machine)
    as_is = list(range(len(graph.nodes)))
    waits = _waits(graph)
    order = _OverlapOrder(flow, [times.of(n) for n in graph.nodes], waits, as_is, MORE * flow.peak(as_is))
    for start, wait in waits.items():
        order.begin_early(start, wait)
    for start, wait in reversed(waits.items()):
        order.wait_late(start, wait)
    if order.nodes == as_is:
        return fusion
    return replace(fusion, graph=replace(graph, nodes=tuple(graph.nodes[k] for k in order.nodes)))


def _is_fixed(node: Node) -> bool:
    """Whether a node does something that no name tells, other than to take part in a collective."""
    if not isinstance(node, Library) or is_collective(node) or is_wait(node):
        return False
    return has_effect(node) and node.target not in (COPY, SEEDS, CONSTANT)


def _device(graph: Graph) -> str:
    """Where the first collective's results lie."""
    kinds = (t for n in graph.nodes if is_collective(n) for t in n.types)
    return next((t.device for t in kinds if t is not None), "cpu")


def _waits(graph: Graph) -> dict[int, int]:
    """By the position of each collective for which the graph waits, that of the first wait."""
    makers = {name: k for k, n in enumerate(graph.nodes) if is_collective(n) for name in n.names}
    found: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        if is_wait(node):
            for name in uses(node):
                if name in makers:
                    found.setdefault(makers[name], k)
    return dict(sorted(found.items()))


@dataclass(slots=True)
class _OverlapOrder:
    """Positions of nodes in the order that is being made of them; ``most`` bytes may be held.

    ``time`` are nanoseconds by a clock of two streams: calls run one after the other, and collectives beside them.
    """

    flow: CallFlow
    times: list[float]
    waits: dict[int, int]
    nodes: list[int]
    most: float
    time: float = 0.0

    def __post_init__(self) -> None:
        self.time = self._clock(self.nodes)

    def begin_early(self, start: int, wait: int) -> None:
        """Move a collective up, past calls that it does not need; those that it needs move with it."""
        at = self.nodes.index(start)
        ahead, missing = self.nodes[:at][::-1], self._missing(start, wait)
        behind = self.nodes[at + 1 :]
        for count in _fewer(self._reach(start, ahead, self.flow.before, missing)):
            moved, passed = _apart(start, ahead[:count], self.flow.before)
            if self._take([*ahead[count:][::-1], *moved[::-1], *passed[::-1], *behind]):
                return

    def wait_late(self, start: int, wait: int) -> None:
        """Move a wait down, past calls that do not need it; those that do move with it."""
        at = self.nodes.index(wait)
        behind, missing = self.nodes[at + 1 :], self._missing(start, wait)
        ahead = self.nodes[:at]
        for count in _fewer(self._reach(wait, behind, self.flow.after, missing)):
            moved, passed = _apart(wait, behind[:count], self.flow.after)
            if self._take([*ahead, *passed, *moved, *behind[count:]]):
                return

    def _missing(self, start: int, wait: int) -> float:
        """How much longer a collective takes than what stands between it and its wait."""
        between = self.nodes[self.nodes.index(start) + 1 : self.nodes.index(wait)]
        return self.times[start] - sum(self.times[k] for k in between)

    def _reach(self, moving: int, others: list[int], needs: list[set[int]], missing: float) -> int:
        """How many of the others, the nearest first, it takes to pass calls of ``missing`` nanoseconds."""
        wanted = set(needs[moving])
        reach = 0
        for count, k in enumerate(others, 1):
            if missing <= 0:
                break
            if k in wanted:
                wanted |= needs[k]
            else:
                missing -= self.times[k]
                reach = count
        return reach

    def _take(self, nodes: list[int]) -> bool:
        """Take another order where it is done earlier and holds no more."""
        time = self._clock(nodes)
        if time >= self.time or self.flow.peak(nodes) > self.most:
            return False
        self.nodes, self.time = nodes, time
        return True

    def _clock(self, nodes: list[int]) -> float:
        starts = {wait: start for start, wait in self.waits.items()}
        done: dict[int, float] = {}
        calls = sent = 0.0
        for k in nodes:
            if k in self.waits:
                done[k] = sent = max(sent, calls) + self.times[k]
            elif k in starts:
                calls = max(calls, done[starts[k]])
            else:
                calls += self.times[k]
        return max(calls, sent)


def _apart(moving: int, others: list[int], needs: list[set[int]]) -> tuple[list[int], list[int]]:
    """What moves together, and what it passes."""
    wanted = set(needs[moving])
    moved, passed = [moving], []
    for k in others:
        if k in wanted:
            wanted |= needs[k]
            moved.append(k)
        else:
            passed.append(k)
    return moved, passed


def _fewer(count: int) -> Iterator[int]:
    """A count and its halves, down to 1."""
    while count:
        yield count
        count //= 2
