"""Layers that repeat: where an ATen graph is the same nodes again and again, a few of them are imported, rewritten and
fused, and ``roll.py`` has one that came out stand for the rest.

A layer is a row of calls. One is like the one before where each call is the same but for the tensors that it reads, and
those are the like ones of the layer itself or the layer before, the same for all layers, or inputs of the graph that
belong to a layer as its weights do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch._ops import HigherOrderOperator

from ..converters.context import KEEPS_ROUNDING
from ..importing.graph_key import GraphKey
from ..tracing.origins import origins_of

# So many layers are kept at the front and at the end; between them, two at least have nothing but layers around.
HEAD, TAIL = 3, 2
# From so many layers on it is worth it.
FEWEST = HEAD + TAIL + 3
# So many lengths of a layer are tried, those that most nodes speak for.
_TRIED = 8


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a graph. ``slots`` says of the nodes of layers, by name, which of a layer's nodes they are and of
    which layer; ``names`` has the name of each slot in each layer, None where there is none.

    ``skipped`` are the nodes of the layers between head and tail, and what stands for those that the tail reads.
    """

    count: int
    slots: Mapping[str, tuple[int, int]]
    names: Sequence[Sequence[str | None]]
    skipped: Mapping[fx.Node, fx.Node | None]

    @property
    def left_out(self) -> int:
        """How many layers are skipped."""
        return self.count - HEAD - TAIL


def find_layers(gm: fx.GraphModule, key: GraphKey) -> Layers | None:
    """The layers of a graph, where there are at least ``FEWEST`` and all but the first and the last are alike."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    if any(isinstance(n.target, HigherOrderOperator) for n in calls):
        return None
    kinds: dict[object, int] = {}
    row = [kinds.setdefault(_kind(n, key), len(kinds)) for n in calls]
    found = _longest(row)
    if found is None:
        return None
    start, period, count = found
    return _Finder(gm, key, calls, start, period, count).layers()


def _kind(node: fx.Node, key: GraphKey) -> tuple[object, ...]:
    """What a call is but for the tensors that it reads."""
    rounds, note = node.meta.get(KEEPS_ROUNDING), node.meta.get("mlc_note")
    return (key.nodes[node][0], rounds, note, origins_of(node, ""))


def _longest(row: Sequence[int]) -> tuple[int, int, int] | None:
    """Start, length and number of the layers that cover most of a row of kinds."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for k, kind in enumerate(row):
        if kind in last:
            distances[k - last[kind]] += 1
        last[kind] = k
    best = (0, 0, 0, 0)
    for period, _ in distances.most_common(_TRIED):
        run, longest, end = 0, 0, 0
        for k in range(len(row) - period):
            run = run + 1 if row[k] == row[k + period] else 0
            if run > longest:
                longest, end = run, k + 1
        count = (longest + period) // period
        best = max(best, (count * period if count >= FEWEST else 0, -period, end - longest, count))
    covered, period, start, count = best
    return (start, -period, count) if covered else None


@dataclass(slots=True)
class _Finder:
    gm: fx.GraphModule
    key: GraphKey
    calls: list[fx.Node]
    start: int
    period: int
    count: int

    def layers(self) -> Layers | None:
        """The layers, None where they are not alike."""
        inside = self.calls[self.start : self.start + self.period * self.count]
        place = {n: divmod(k, self.period) for k, n in enumerate(inside)}
        following = self.following(place)
        if following is None:
            return None
        slots: dict[fx.Node, tuple[int, int]] = {n: (slot, layer) for n, (layer, slot) in place.items()}
        names: list[list[str | None]] = [
            [inside[layer * self.period + slot].name for layer in range(self.count)] for slot in range(self.period)
        ]
        for first in following.keys() - set(following.values()):
            owned: list[str | None] = [None] * self.count
            given: fx.Node | None = first
            while given is not None:
                layer = min(place[u][0] for u in given.users if u in place)
                if owned[layer] is not None:
                    return None
                owned[layer], slots[given] = given.name, (len(names), layer)
                given = following.get(given)
            names.append(owned)
        if any(given not in slots for given in following):
            return None  # they go round
        self.take_in(slots, names)
        if not self.leave_alike(slots):
            return None
        return Layers(self.count, {n.name: at for n, at in slots.items()}, names, self.skipped(slots, names))

    def following(self, place: Mapping[fx.Node, tuple[int, int]]) -> dict[fx.Node, fx.Node] | None:
        """The input of the next layer that is what an input is to its own; None where layers read what is not alike.
        The first layer may read anything."""
        found: dict[fx.Node, fx.Node] = {}
        shared: set[fx.Node] = set()
        for node, (layer, _) in place.items():
            if layer < 2:
                continue
            before = self.calls[self.start + (layer - 1) * self.period + place[node][1]]
            for old, new in zip(self.key.nodes[before][1], self.key.nodes[node][1], strict=True):
                if new in place:
                    at, slot = place[new]
                    if place.get(old) != (at - 1, slot) or layer - at > 1:
                        return None
                elif old is new:
                    shared.add(old)
                elif not self.are_inputs_alike(old, new) or found.setdefault(old, new) is not new:
                    return None
        alone = len(set(found.values())) == len(found) and shared.isdisjoint({*found, *found.values()})
        return found if alone else None

    def are_inputs_alike(self, a: fx.Node, b: fx.Node) -> bool:
        return a.op == b.op == "placeholder" and self.key.nodes[a][0] == self.key.nodes[b][0]

    def take_in(self, slots: dict[fx.Node, tuple[int, int]], names: list[list[str | None]]) -> None:
        """Calls behind the layers that read one of them alone (tensors that are saved for the backward are detached
        there) are part of it where each layer has the like."""
        like: dict[tuple[object, ...], tuple[int, dict[int, fx.Node]]] = {}
        found = dict(slots)
        for node in self.calls[self.start + self.period * self.count :]:
            reads = self.key.nodes[node][1]
            layers = {found[r][1] for r in reads if r in found}
            if len(layers) != 1:
                continue
            what = (_kind(node, self.key), *(found[r][0] if r in found else r for r in reads))
            slot, nodes = like.setdefault(what, (len(names) + len(like), {}))
            layer = layers.pop()
            if layer not in nodes:
                nodes[layer], found[node] = node, (slot, layer)
        for _, nodes in like.values():
            row = [nodes.get(layer) for layer in range(self.count)]
            names.append([None if n is None else n.name for n in row])
            if all(n is not None for n in row[1:-1]):
                slots.update((n, found[n]) for n in nodes.values())

    def leave_alike(self, slots: Mapping[fx.Node, tuple[int, int]]) -> bool:
        """Whether the same of each layer leaves the graph, and nothing else outside of the layers reads what is in
        those that are skipped."""
        (output,) = self.gm.graph.find_nodes(op="output")
        leaving = Counter(self.key.nodes[output][1])
        times: dict[int, int] = {}
        for node, (slot, layer) in slots.items():
            if 0 < layer < self.count - 1 and times.setdefault(slot, leaving[node]) != leaving[node]:
                return False
            if HEAD <= layer < self.count - TAIL and any(u not in slots and u is not output for u in node.users):
                return False
        return True

    def skipped(
        self, slots: Mapping[fx.Node, tuple[int, int]], names: Sequence[Sequence[str | None]]
    ) -> dict[fx.Node, fx.Node | None]:
        """The nodes between head and tail, in the graph's order; for those of the last of these layers, what is the
        same of the last one of the head."""
        by_name = {n.name: n for n in slots}
        found: dict[fx.Node, fx.Node | None] = {}
        for node, (slot, layer) in slots.items():
            if HEAD <= layer < self.count - TAIL:
                twin = names[slot][HEAD - 1] if layer == self.count - TAIL - 1 else None
                found[node] = None if twin is None else by_name[twin]
        return found
