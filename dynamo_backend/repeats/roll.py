"""The fused graph of a few layers to that of all: one of them becomes a region, which is called for all that are alike.

Everything that a layer makes or is given has to have the same readers in each. What a layer has from the one before it
is carried from one call to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ...ir.graph.graph import CallRegion, Graph, Input, Node, View, uses
from ...ir.graph.regions import write_out_regions
from ...ir.graph.rename import renamed
from ...scheduler.passes.canonical.names import fresh_name
from .layers import HEAD
from .repeating import NotAlike, Repeating


def roll(short: Repeating) -> Graph:
    """The graph of all layers, with a call of a region. Raises NotAlike."""
    return _Roller(short).run()


def unroll(short: Repeating) -> Graph:
    """The graph of all layers, each written out under the names of its own nodes. Raises NotAlike."""
    graph = write_out_regions(roll(short), lambda name, call: short.each(name)[call])
    # Views that are there for the sake of who called stand at the end, in the order of the results.
    views = short.outputs()[1]
    seen = {v.name for v in views}
    return replace(graph, nodes=(*(n for n in graph.nodes if seen.isdisjoint(n.names)), *views))


@dataclass
class _Roller:
    short: Repeating
    # Nodes before the layer that stands for all, of it, and behind it, up to the views that are made for the caller.
    before: tuple[Node, ...] = ()
    layer: tuple[Node, ...] = ()
    behind: tuple[Node, ...] = ()
    # Names that the layer reads from outside, and those that it makes.
    read: dict[str, None] = field(default_factory=dict)
    made: dict[str, None] = field(default_factory=dict)
    # By name what it is in the next layer, where that is carried; and inputs by what they are in each.
    next: dict[str, str] = field(default_factory=dict)
    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # What leaves the graph of what is made, by what it is called in the layer.
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def run(self) -> Graph:
        short = self.short
        start, period = short.window
        body = short.body
        self.before, self.layer, self.behind = body[:start], body[start : start + period], body[start + period :]
        self.hand_on()
        self.check_readers()
        self.check_layers()
        seen, views = self.leaving()
        carried = [pair for chain in self.chains() for pair in pairwise(chain)]
        last = {self.now(b): self.last(b) for _, b in carried}
        call = self.call(carried, seen, [last[self.now(b)] for _, b in carried])
        behind = (renamed(short.moved(n, short.left_out), lambda n: last.get(n, n)) for n in self.behind)
        nodes = (*(short.moved(n, 0) for n in self.before), call, *behind, *views)
        return replace(short.graph, inputs=short.inputs, nodes=nodes, outputs=short.outputs()[0])

    def call(self, carried: list[tuple[str, str]], seen: list[View], last: list[str]) -> CallRegion:
        """The call of the layer; what it carries is called ``last`` behind it."""
        short = self.short
        types = short.graph.types()
        given = {i.name: i for i in short.graph.inputs if isinstance(i, Input)}
        shared = [n for n in self.read if n not in self.next and n not in self.taken]
        names = (*(a for a, _ in carried), *self.taken, *shared)
        inputs = tuple(given.get(n) or Input(n, types[n]) for n in names)
        outputs = (*(b for _, b in carried), *self.kept)
        region = replace(short.graph, name="layer", inputs=inputs, nodes=(*self.layer, *seen), outputs=outputs)
        results = (*last, *(n for row in self.kept.values() for n in row))
        handed = tuple(a for a, _ in carried)
        return CallRegion(results, region, short.left_out + 1, handed, tuple(self.taken.values()), tuple(shared))

    def hand_on(self) -> None:
        """Find what the layer takes from outside, and what of that it has from the one before."""
        types, earlier = self.short.graph.types(), _readers(self.before)
        for node in self.layer:
            self.read.update(dict.fromkeys(n for n in uses(node) if n not in self.made))
            self.made.update(dict.fromkeys(node.names))
        inputs = {i.name for i in self.short.graph.inputs if isinstance(i, Input)}
        for name in self.read:
            if name not in types:
                raise NotAlike
            if self.short.places[name] is None:
                continue
            following = self.short.name_of(name, 1)
            if following in self.made or following in self.read:
                self.next[name] = following
            elif name in inputs and name not in earlier:
                self.taken[name] = self.short.each(name)
            else:
                raise NotAlike

    def chains(self) -> list[list[str]]:
        """Names of the layer, each with what it becomes in the layers behind, as far as that is carried."""
        found = []
        handed = set(self.next.values())
        for name in (n for n in (*self.read, *self.made) if n not in handed):
            chain = [name]
            while chain[-1] in self.next:
                chain.append(self.next[chain[-1]])
            found.append(chain)
        return found

    def now(self, name: str) -> str:
        """What something of the layer is called in the last layer that it stands for."""
        return self.short.each(name)[-1]

    def last(self, name: str) -> str:
        """What something that is carried is called behind the calls: as in the last layer, where nothing else is."""
        now = self.now(name)
        return fresh_name(f"{now}_last", self.names) if name in self.kept or name in self.taken else now

    @cached_property
    def names(self) -> set[str]:
        """All names of the graph of all layers but those that are carried."""
        short = self.short
        inside = (name for row in map(short.each, (*self.made, *self.taken)) for name in row)
        around = (short.moved(n, by) for nodes, by in ((self.before, 0), (self.behind, short.left_out)) for n in nodes)
        views = (v.name for v in short.outputs()[1])
        return {*(i.name for i in short.inputs), *inside, *(name for n in around for name in n.names), *views}

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_readers(self) -> None:
        """What is made or taken in each layer is read behind them as often as it is in the layers that follow.

        Passes make one sum of many (a gradient that all layers share) of those layers that they see, behind the last.
        """
        inside, behind = _readers(self.layer), _readers(self.behind)
        for chain in self.chains():
            times = 0
            for name in chain if self.short.places[chain[0]] is not None else ():
                if behind[name] != times:
                    raise NotAlike
                times += inside[name]

    def check_layers(self) -> None:
        """What is made or read before the layer belongs to layers in front of it, what is behind it to later ones."""
        at_layer = {(at.slot, at.which): at.layer for n in (*self.made, *self.taken) if (at := self.short.places[n])}
        earlier = {**_makers(self.before), **_readers(self.before)}
        later = {**_makers(self.behind), **_readers(self.behind)}.keys() - {*self.made, *self.read}
        for names, is_later in ((earlier.keys(), False), (later, True)):
            for at in filter(None, map(self.short.places.__getitem__, names)):
                middle = at_layer.get((at.slot, at.which))
                is_in_place = (at.layer >= HEAD) == is_later if middle is None else (at.layer > middle) == is_later
                if not is_in_place or at.layer == middle:
                    raise NotAlike

    # --- what leaves ------------------------------------------------------------------------------------------------

    def leaving(self) -> tuple[list[View], list[View]]:
        """Views for the caller, of what the layer makes and of the rest; and find what is kept of each layer."""
        outputs, views = self.short.outputs()
        wanted = {o for o in outputs if isinstance(o, str)}
        sources = wanted | {v.source for v in views}
        if any(v.source in {u.name for u in views} for v in views):
            raise NotAlike
        rows = {name: self.short.each(name) for name in (*self.made, *self.taken)}
        rows = {name: row for name, row in rows.items() if not sources.isdisjoint(row)}
        left = {name: row for name, row in rows.items() if not wanted.isdisjoint(row)}
        self.kept = {name: row for name, row in left.items() if name in self.made}
        at = {whole: (name, call) for name, row in rows.items() for call, whole in enumerate(row)}
        inside: dict[str, list[list[View]]] = {}
        for view in (v for v in views if v.source in at):
            name, call = at[view.source]
            inside.setdefault(name, [[] for _ in rows[name]])[call].append(view)
        seen: list[View] = []
        for name, by_call in inside.items():
            if any(len(row) != len(by_call[0]) for row in by_call):
                raise NotAlike
            for like in zip(*by_call, strict=True):
                one = replace(like[0], source=name)
                if any(replace(v, name=one.name, source=name) != one for v in like):
                    raise NotAlike
                seen.append(one)
                self.kept[one.name] = left[one.name] = tuple(v.name for v in like)
        if any(not wanted.issuperset(row) for row in left.values()):
            raise NotAlike  # only some of them leave
        return seen, [v for v in views if v.source not in at]


def _readers(nodes: Iterable[Node]) -> Counter[str]:
    """How often nodes read what is called so."""
    return Counter(n for node in nodes for n in uses(node))


def _makers(nodes: Iterable[Node]) -> dict[str, None]:
    """What nodes make."""
    return dict.fromkeys(n for node in nodes for n in node.names)
