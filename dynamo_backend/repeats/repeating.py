"""Where a fused graph of a few layers repeats, and what that which it has of one layer is called in another.

Nothing is assumed of what the passes and the planner did: their result has to repeat, call by call, from one layer of
the short graph to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import fx

from ...ir.graph.graph import Graph, GraphInput, GraphOutput, Input, Node, View
from ...ir.graph.rename import renamed
from .layers import HEAD, TAIL, Layers


class NotAlike(Exception):
    """The result does not repeat as the layers do."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The slot that something is called after, which of what is called so it is, and the layer of the short graph."""

    slot: int
    which: int
    layer: int


class Repeating:
    """The fused graph of a few layers, what of it belongs to which layer, and what it is called in the others."""

    def __init__(
        self,
        graph: Graph,
        gm: fx.GraphModule,
        layers: Layers,
        static: frozenset[int],
        called_after: Mapping[str, str],
    ) -> None:
        self.graph, self.gm, self.layers, self.static = graph, gm, layers, static
        self.count, self.left_out = layers.count, layers.left_out
        # The node that a name is made of, by the name.
        self.nodes = {**called_after, **{n.name: n.name for n in gm.graph.nodes}}
        # Where what is made belongs, by name; how names go on behind that of a node, in the order in which they are
        # made, by slot and layer.
        self.places: dict[str, LayerPlace | None] = {}
        self.endings: dict[tuple[int, int], list[str]] = {}
        outputs = {o for o in graph.outputs if isinstance(o, str)}
        end = len(graph.nodes)
        while end and isinstance(node := graph.nodes[end - 1], View) and node.name in outputs:
            end -= 1
        # Views that are there for the sake of who called stand at the end.
        self.body = graph.nodes[:end]
        self.views = {n.name: n for n in graph.nodes[end:] if isinstance(n, View)}
        for i in graph.inputs:
            self.enter(i.name)
        for node in graph.nodes:
            for name in node.names:
                self.enter(name)
        # What all layers make alike is made in the first alone, and stays where it is.
        for name, at in self.places.items():
            if at is not None and at.layer == 0 and at.which >= len(self.endings.get((at.slot, 1), ())):
                self.places[name] = None

    @cached_property
    def window(self) -> tuple[int, int]:
        """Where a layer begins that is like the two behind it, and its length. It has everything that layers have.

        Raises NotAlike.
        """
        body = self.body
        made: dict[int, Counter[tuple[int, int]]] = {}
        for node in body:
            for name in node.names:
                if (at := self.places[name]) is not None:
                    made.setdefault(at.layer, Counter())[at.slot, at.which] += 1
        first = [self.places[n.names[0]] for n in body if n.names]
        period = sum(1 for at in first if at is not None and at.layer == HEAD - 1)
        run, longest, end = 0, 0, 0
        for k in range(len(body) - period if period else 0):
            run = run + 1 if self.is_next(body[k], body[k + period]) else 0
            if run > longest:
                longest, end = run, k + 1
        if not period or longest < 2 * period:
            raise NotAlike
        start = end - longest
        places = [self.places[name] for n in body[start : start + period] for name in n.names]
        inside = Counter((at.slot, at.which) for at in places if at is not None)
        if None in places or any(made.get(layer) != inside for layer in range(1, HEAD + TAIL - 1)):
            raise NotAlike
        return start, period

    def is_next(self, node: Node, other: Node) -> bool:
        """Whether a node is what another is, one layer on."""
        if type(node) is not type(other):
            return False
        try:
            return renamed(node, lambda name: self.name_of(name, 1)) == renamed(other, lambda name: name)
        except NotAlike:
            return False

    # --- names --------------------------------------------------------------------------------------------------------

    def enter(self, name: str) -> None:
        """Find the place of what is made. Passes call it after a node, with something behind its name."""
        base = name
        while base and base not in self.nodes:
            base = base.rpartition("_")[0]
        node = self.nodes.get(base, "")
        found = self.layers.slots.get(node)
        if found is None:
            self.places[name] = None
            return
        slot, layer = found
        layer = self.short(layer)
        endings = self.endings.setdefault((slot, layer), [])
        self.places[name] = LayerPlace(slot, len(endings), layer)
        endings.append(name[len(node) :])

    def short(self, layer: int) -> int:
        """The layer of the short graph that one of the whole graph is."""
        if HEAD <= layer < self.count - TAIL:
            raise NotAlike
        return layer if layer < HEAD else layer - self.left_out

    def name_at(self, slot: int, which: int, layer: int) -> str:
        """The name of something in a layer of the whole graph; in one that is left out it ends as in the tail."""
        base = self.layers.names[slot][layer] if 0 <= layer < self.count else None
        is_kept = layer < HEAD or layer >= self.count - TAIL
        endings = self.endings.get((slot, self.short(layer) if is_kept else HEAD), ())
        if base is None or which >= len(endings):
            raise NotAlike
        return base + endings[which]

    def name_of(self, name: str, by: int) -> str:
        """The name in the short graph of what is so many layers on there."""
        at = self.places.get(name)
        if at is None:
            return name
        layer = at.layer + by
        return self.name_at(at.slot, at.which, layer if layer < HEAD else layer + self.left_out)

    def each(self, name: str) -> tuple[str, ...]:
        """What something of a layer that comes before those left out is called there and in all of these."""
        at = self.places[name]
        assert at is not None
        return tuple(self.name_at(at.slot, at.which, at.layer + k) for k in range(self.left_out + 1))

    def moved(self, node: Node, by: int) -> Node:
        """A node of the short graph as one of the whole one, where layers are counted on by so many."""

        def name(old: str) -> str:
            at = self.places.get(old)
            return old if at is None else self.name_at(at.slot, at.which, at.layer + by)

        return renamed(node, name)

    # --- the ends of the graph ----------------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> tuple[GraphInput, ...]:
        """Those of all layers; one that was left out is of the type of the one of the layer before the gap."""
        known: dict[str, Any] = {i.name: i for i in self.graph.inputs}
        result: list[GraphInput] = []
        for position, node in enumerate(self.gm.graph.find_nodes(op="placeholder")):
            if node.name in known:
                result.append(known[node.name])
                continue
            slot, _ = self.layers.slots[node.name]
            like = known.get(self.name_at(slot, 0, HEAD - 1))
            if not isinstance(like, Input) or like.static != (position in self.static):
                raise NotAlike
            result.append(replace(like, name=node.name))
        return tuple(result)

    def outputs(self) -> tuple[tuple[GraphOutput, ...], list[View]]:
        """What leaves all layers, and the views that stand at the end for it; what was left out leaves as that of the
        layer before the gap does."""
        (output,) = self.gm.graph.find_nodes(op="output")
        values = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
        left = iter(self.graph.outputs)
        # For each output that of the short graph, and how many layers on it is; by slot, that of the layer before.
        found: dict[int, tuple[GraphOutput, int]] = {}
        before: dict[int, GraphOutput] = {}
        skipped: list[tuple[int, int, int]] = []
        for k, value in enumerate(values):
            at = self.layers.slots.get(value.name) if isinstance(value, fx.Node) else None
            if at is not None and value in self.layers.skipped:
                skipped.append((k, *at))
                continue
            found[k] = next(left), 0
            if at is not None and at[1] == HEAD - 1:
                before[at[0]] = found[k][0]
        for k, slot, layer in skipped:
            found[k] = before[slot], layer - (HEAD - 1)
        outputs: list[GraphOutput] = []
        views: dict[str, View] = {}
        for k in range(len(values)):
            short, by = found[k]
            outputs.append(self.left_by(short, by))
            if isinstance(short, str) and short in self.views:
                view = renamed(self.views[short], partial(self.left_by, by=by))
                assert isinstance(view, View)
                views[view.name] = view
        return tuple(outputs), list(views.values())

    def left_by(self, short: Any, by: int) -> Any:
        """What leaves the whole graph so many layers after where ``short`` leaves the short one."""
        at = self.places.get(short) if isinstance(short, str) else None
        if at is None:
            return short
        if by and at.layer >= HEAD:
            raise NotAlike
        return self.name_at(at.slot, at.which, (at.layer if at.layer < HEAD else at.layer + self.left_out) + by)
