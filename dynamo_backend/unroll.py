"""A fused graph of a few layers to that of all: what came out of one layer in the middle is written once for each layer
that was left out, under the names of its own nodes.

Nothing is assumed of what the passes and the planner did: their result has to repeat, call by call, from one layer of
the short graph to the next, or it is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from ..ir.expr import is_value, rename_loads
from ..ir.graph import CallTensor, Graph, GraphInput, GraphOutput, Input, Library, Node, Ref, View, uses
from ..scheduler.fuse import Fusion
from .layers import HEAD, TAIL, Layers


class _NotAlike(Exception):
    """The result does not repeat as the layers do."""


def unroll(
    fusion: Fusion, gm: fx.GraphModule, layers: Layers, static: Collection[int], called_after: Mapping[str, str]
) -> Fusion | None:
    """The fused graph of all layers of ``gm`` from that of the short one, None where it does not repeat.

    ``static`` are the positions of parameters among the inputs, ``called_after`` what the import of the short graph
    says of names. The report stays that of the short graph.
    """
    try:
        return replace(fusion, graph=_Unroller(fusion.graph, gm, layers, frozenset(static), called_after).run())
    except _NotAlike:
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """The slot that something is called after, which of what is called so it is, and the layer of the short graph."""

    slot: int
    which: int
    layer: int


class _Unroller:
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
        self.places: dict[str, _Place | None] = {}
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

    def run(self) -> Graph:
        """The whole graph. Raises _NotAlike."""
        start, period = self.window()
        cut = start + period
        whole = [self.moved(n, 0) for n in self.body[:cut]]
        whole += [self.moved(n, k) for k in range(1, self.left_out + 1) for n in self.body[start:cut]]
        whole += [self.moved(n, self.left_out) for n in self.body[cut:]]
        outputs, views = self.outputs()
        graph = replace(self.graph, inputs=self.inputs(), nodes=(*whole, *views), outputs=outputs)
        _check(graph)
        self.check_readers(graph, self.body[start:cut])
        return graph

    def window(self) -> tuple[int, int]:
        """Where a layer begins that is like the two behind it, and its length. It has everything that layers have."""
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
            raise _NotAlike
        start = end - longest
        places = [self.places[name] for n in body[start : start + period] for name in n.names]
        inside = Counter((at.slot, at.which) for at in places if at is not None)
        if None in places or any(made.get(layer) != inside for layer in range(1, HEAD + TAIL - 1)):
            raise _NotAlike
        return start, period

    def check_readers(self, whole: Graph, layer: Sequence[Node]) -> None:
        """What a layer makes or is given has as many readers in each of the layers that were written for one.

        Passes make one sum of many (a gradient that all layers share) of those layers that they see, behind the last.
        """
        before, after = _readers(self.graph), _readers(whole)
        made = [name for node in layer for name in node.names]
        given = [i.name for i in self.graph.inputs if (at := self.places[i.name]) is not None and at.layer == HEAD - 1]
        for name in (*made, *given):
            at = self.places[name]
            assert at is not None
            names = (self.name_at(at.slot, at.which, at.layer + k) for k in range(self.left_out + 1))
            if any(after[n] != before[name] for n in names):
                raise _NotAlike

    def is_next(self, node: Node, other: Node) -> bool:
        """Whether a node is what another is, one layer on."""
        if type(node) is not type(other):
            return False
        try:
            return _renamed(node, lambda name: self.name_of(name, 1)) == _renamed(other, lambda name: name)
        except _NotAlike:
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
        self.places[name] = _Place(slot, len(endings), layer)
        endings.append(name[len(node) :])

    def short(self, layer: int) -> int:
        """The layer of the short graph that one of the whole graph is."""
        if HEAD <= layer < self.count - TAIL:
            raise _NotAlike
        return layer if layer < HEAD else layer - self.left_out

    def name_at(self, slot: int, which: int, layer: int) -> str:
        """The name of something in a layer of the whole graph; in one that is left out it ends as in the tail."""
        base = self.layers.names[slot][layer] if 0 <= layer < self.count else None
        is_kept = layer < HEAD or layer >= self.count - TAIL
        endings = self.endings.get((slot, self.short(layer) if is_kept else HEAD), ())
        if base is None or which >= len(endings):
            raise _NotAlike
        return base + endings[which]

    def name_of(self, name: str, by: int) -> str:
        """The name in the short graph of what is so many layers on there."""
        at = self.places.get(name)
        if at is None:
            return name
        layer = at.layer + by
        return self.name_at(at.slot, at.which, layer if layer < HEAD else layer + self.left_out)

    def moved(self, node: Node, by: int) -> Node:
        """A node of the short graph as one of the whole one, where layers are counted on by so many."""

        def name(old: str) -> str:
            at = self.places.get(old)
            return old if at is None else self.name_at(at.slot, at.which, at.layer + by)

        return _renamed(node, name)

    # --- the ends of the graph ----------------------------------------------------------------------------------------

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
                raise _NotAlike
            result.append(replace(like, name=node.name))
        return tuple(result)

    def outputs(self) -> tuple[tuple[GraphOutput, ...], list[Node]]:
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
        views: dict[str, Node] = {}
        for k in range(len(values)):
            short, by = found[k]
            outputs.append(self.left_by(short, by))
            if isinstance(short, str) and short in self.views:
                view = _renamed(self.views[short], partial(self.left_by, by=by))
                views[view.names[0]] = view
        return tuple(outputs), list(views.values())

    def left_by(self, short: Any, by: int) -> Any:
        """What leaves the whole graph so many layers after where ``short`` leaves the short one."""
        at = self.places.get(short) if isinstance(short, str) else None
        if at is None:
            return short
        if by and at.layer >= HEAD:
            raise _NotAlike
        return self.name_at(at.slot, at.which, (at.layer if at.layer < HEAD else at.layer + self.left_out) + by)


def _renamed(node: Node, name: Callable[[str], str]) -> Node:
    """A node of a fused graph under other names, with what it reads."""
    match node:
        case CallTensor():
            into = tuple(None if t is None else name(t) for t in node.into)
            names, args = tuple(map(name, node.names)), tuple(map(name, node.args))
            return CallTensor(names, node.types, node.function, args, node.sizes, node.origins, into, node.count)
        case View():
            indices = node.indices
            if any(map(is_value, indices)):
                read = {ld: name(ld) for ld in uses(node)}
                indices = tuple(rename_loads(i, read) if is_value(i) else i for i in indices)
            return View(
                name(node.name), node.type, name(node.source), node.axes, indices, node.offset, node.origins
            )  # fmt: skip
        case Library():
            args = tuple(_argument(a, name) for a in node.args)
            kwargs = tuple((k, _argument(v, name)) for k, v in node.kwargs)
            names = tuple(map(name, node.names))
            return Library(names, node.types, node.target, args, kwargs, node.reason, node.origins)
    raise _NotAlike


def _argument(arg: Any, name: Callable[[str], str]) -> Any:
    match arg:
        case Ref(old):
            return Ref(name(old))
        case tuple():
            return tuple(_argument(a, name) for a in arg)
        case list():
            return [_argument(a, name) for a in arg]
        case dict():
            return {k: _argument(v, name) for k, v in arg.items()}
    return arg


def _readers(graph: Graph) -> Counter[str]:
    """How many nodes read a name, or how often it leaves the graph."""
    found = Counter(name for node in graph.nodes for name in uses(node))
    found.update(o for o in graph.outputs if isinstance(o, str))
    return found


def _check(graph: Graph) -> None:
    """Every name is given once, before it is read."""
    known = {i.name for i in graph.inputs}
    for node in graph.nodes:
        if not known.issuperset(uses(node)):
            raise _NotAlike
        for name in node.names:
            if name in known:
                raise _NotAlike
            known.add(name)
    if any(isinstance(o, str) and o not in known for o in graph.outputs):
        raise _NotAlike
