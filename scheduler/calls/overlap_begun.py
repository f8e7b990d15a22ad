"""Collectives and copies between devices run beside what does not wait for them: each is begun so early, and waited for
so late, that the calls between the two take as long as it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...ir.graph.begun import HOST, DeviceCopy, device_copies, is_begun, is_wait, joined_waits
from ...ir.graph.copies import COPY
from ...ir.graph.effects import has_effect, written
from ...ir.graph.facts import aliases_of, names_in, users_of
from ...ir.graph.graph import CONSTANT, Graph, Library, Node, size_makers, uses
from ..context import PassContext
from ..cost.begun import WORTH_BEGINNING, Times
from ..cost.calls import MORE
from ..fusion.fusion import Fusion
from .flow import SEEDS, CallFlow

# Ops by which a model names streams and events of its own.
_STREAMS = "streams::"


def overlap_begun(fusion: Fusion, context: PassContext) -> Fusion:
    """The nodes of the graph in an order in which collectives and copies between devices are hidden by other calls,
    where these and memory allow; such copies are begun, and waited for, by calls of their own.

    Fused graphs begin a collective where the model does, and wait for it before its first reader; a copy is one call.
    Here more calls come between the two. First what is begun moves up, with the calls whose results it is given; where
    that is not enough, the wait moves down with what reads it. The host waits for its copies as late as it can.
    Collectives keep their order, which all processes of a group share, and no device holds more memory than before
    (``cost/calls.py`` says how much more is the same). A copy that nothing hides stays one call.
    Graphs with calls whose effects are not known, or with sizes that data decide, stay as they are.
    """
    graph = fusion.graph
    copies = device_copies(graph) if context.copy_streams else {}
    if not copies and not any(map(is_begun, graph.nodes)):
        return fusion
    if size_makers(graph) or any(map(_is_fixed, graph.nodes)):
        return fusion
    parted, begun = _parted(graph, copies)
    most = _peaks(fusion, context)
    apart = replace(fusion, graph=parted)
    flow = CallFlow.of(apart, context.given)
    devices = {t.device for t in parted.types().values()}
    machines = {d: context.target_of(d).machine for d in devices}
    times = Times(parted, {**fusion.functions, **fusion.given}, machines[_device(parted)], machines)
    as_is = list(range(len(parted.nodes)))
    waits = _waits(parted)
    order = _OverlapOrder(
        flow, [times.of(n) for n in parted.nodes], [times.stream_of(n) for n in parted.nodes], waits, as_is,
        [(f, MORE * most.get(d, 0)) for d, f in _by_device(flow, parted).items()],
    )  # fmt: skip
    blocking = [w for s, w in waits.items() if s in begun and begun[s].to_host and begun[s].blocks]
    for wait in reversed(blocking):
        order.wait_last(wait)
    for start, wait in waits.items():
        order.begin_early(start, wait)
    for start, wait in reversed(waits.items()):
        order.wait_late(start, wait)
    better = _written_down(parted, order, begun)
    return fusion if better.nodes == graph.nodes else replace(fusion, graph=better)


def _is_fixed(node: Node) -> bool:
    """Whether a node does something that no name tells, other than to begin something or to wait for it."""
    if not isinstance(node, Library) or is_begun(node) or is_wait(node):
        return False
    return node.target.startswith(_STREAMS) or (has_effect(node) and node.target not in (COPY, SEEDS, CONSTANT))


def _device(graph: Graph) -> str:
    """Where what is begun first has its results, or what it reads, on a GPU if it is a copy."""
    types = graph.types()
    for node in graph.nodes:
        if is_begun(node):
            found = [types[n].device for n in (*node.names, *uses(node)) if n in types]
            return next((d for d in found if d != HOST), found[0] if found else HOST)
    return HOST


# --- copies as two calls ----------------------------------------------------------------------------------------------


def _parted(graph: Graph, copies: Mapping[int, DeviceCopy]) -> tuple[Graph, dict[int, DeviceCopy]]:
    """The graph with every copy as two calls, one right after the other, and the copies by where they are begun."""
    known = set(names_in(graph))
    nodes: list[Node] = []
    begun: dict[int, DeviceCopy] = {}
    for k, node in enumerate(graph.nodes):
        if k not in copies:
            nodes.append(node)
            continue
        name = f"{node.names[0]}_begun"
        while name in known:
            name += "_"
        known.add(name)
        begun[len(nodes)] = copies[k]
        nodes += copies[k].begun(name, host=True)
    return replace(graph, nodes=tuple(nodes)) if begun else graph, begun


def _written_down(graph: Graph, order: _OverlapOrder, begun: Mapping[int, DeviceCopy]) -> Graph:
    """The graph in an order, with copies that this does not hide as one call again."""
    hidden = {s for s in begun if order.hides(s) >= WORTH_BEGINNING}
    hidden |= _shared_waits(order, begun)
    wait_of = {order.waits[s]: s for s in begun}
    users, shared = users_of(graph), aliases_of(graph)
    nodes: list[Node] = []
    for at, k in enumerate(order.nodes):
        node = graph.nodes[k]
        start = wait_of.get(k)
        if start is not None and start not in hidden:
            nodes.append(begun[start].call)
        elif start is not None:
            copy = begun[start]
            assert isinstance(node, Library)
            if copy.to_host:
                soon = copy.call.names[0] in users
            else:
                later = (t for n in order.nodes[at + 1 :] for t in written(graph.nodes[n]))
                soon = any(not shared[t].isdisjoint(shared[copy.source]) for t in later)
            nodes.append(replace(node, args=(node.args[0], copy.blocks and soon)))
        elif k not in begun or k in hidden:
            nodes.append(node)
    return joined_waits(replace(graph, nodes=tuple(nodes)))


def _shared_waits(order: _OverlapOrder, begun: Mapping[int, DeviceCopy]) -> set[int]:
    """Copies to the host for which it waits one right after the other: begun, they share a wait."""
    wait_of = {order.waits[s]: s for s in begun if begun[s].to_host and begun[s].blocks}
    found: set[int] = set()
    for one, other in zip(order.nodes, order.nodes[1:], strict=False):
        if one in wait_of and other in wait_of:
            found |= {wait_of[one], wait_of[other]}
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def _peaks(fusion: Fusion, context: PassContext) -> dict[str, int]:
    """The most bytes that each device holds at once as the graph is."""
    flow = CallFlow.of(fusion, context.given)
    every = range(len(fusion.graph.nodes))
    return {device: f.peak(every) for device, f in _by_device(flow, fusion.graph).items()}


def _by_device(flow: CallFlow, graph: Graph) -> dict[str, CallFlow]:
    """What an order holds, device by device."""
    types = graph.types()
    where = {number: types[name].device for name, number in flow.numbers.items() if name in types}
    found = {}
    for device in sorted(set(where.values())):
        nbytes = [n if where.get(base) == device else 0 for base, n in enumerate(flow.nbytes)]
        found[device] = replace(flow, nbytes=nbytes)
    return found


# --- an order ---------------------------------------------------------------------------------------------------------


def _waits(graph: Graph) -> dict[int, int]:
    """By the position of each begun work for which the graph waits, that of the first wait."""
    makers = {name: k for k, n in enumerate(graph.nodes) if is_begun(n) for name in n.names}
    found: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        if is_wait(node):
            for name in uses(node):
                if name in makers:
                    found.setdefault(makers[name], k)
    return dict(sorted(found.items()))


@dataclass(slots=True)
class _OverlapOrder:
    """Positions of nodes in the order that is being made of them; ``most`` bytes may be held, for each device.

    ``time`` are nanoseconds by a clock of several streams: calls run one after the other, and what is begun beside
    them, one after the other on each of the ``streams``.
    """

    flow: CallFlow
    times: list[float]
    streams: list[str]
    waits: dict[int, int]
    nodes: list[int]
    most: list[tuple[CallFlow, float]]
    time: float = 0.0

    def __post_init__(self) -> None:
        self.time = self._clock(self.nodes)

    def wait_last(self, wait: int) -> None:
        """Move a wait right before the first that needs it, or as far as memory allows: it stops the host."""
        at = self.nodes.index(wait)
        ahead, behind = self.nodes[:at], self.nodes[at + 1 :]
        free = next((k for k, n in enumerate(behind) if wait in self.flow.before[n]), len(behind))
        for count in _fewer(free):
            if self._take([*ahead, *behind[:count], wait, *behind[count:]], later=True):
                return

    def begin_early(self, start: int, wait: int) -> None:
        """Move what is begun up, past calls that it does not need; those that it needs move with it."""
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

    def hides(self, start: int) -> float:
        """How much of what is begun runs beside calls, at most."""
        return min(self.times[start], self._between(start, self.waits[start]))

    def _between(self, start: int, wait: int) -> float:
        """How long the calls take that stand between what is begun and its wait."""
        between = self.nodes[self.nodes.index(start) + 1 : self.nodes.index(wait)]
        return sum(self.times[k] for k in between if not self.streams[k])

    def _missing(self, start: int, wait: int) -> float:
        """How much longer begun work takes than what stands between it and its wait."""
        return self.times[start] - self._between(start, wait)

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

    def _take(self, nodes: list[int], later: bool = False) -> bool:
        """Take another order where it is done earlier, or no ``later`` than before, and holds no more."""
        time = self._clock(nodes)
        if (time > self.time if later else time >= self.time) or any(f.peak(nodes) > most for f, most in self.most):
            return False
        self.nodes, self.time = nodes, time
        return True

    def _clock(self, nodes: list[int]) -> float:
        starts = {wait: start for start, wait in self.waits.items()}
        done: dict[int, float] = {}
        sent: dict[str, float] = {}
        calls = 0.0
        for k in nodes:
            if k in self.waits:
                stream = self.streams[k]
                done[k] = sent[stream] = max(sent.get(stream, 0.0), calls) + self.times[k]
            elif k in starts:
                calls = max(calls, done[starts[k]])
            else:
                calls += self.times[k]
        return max(calls, *sent.values()) if sent else calls


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
