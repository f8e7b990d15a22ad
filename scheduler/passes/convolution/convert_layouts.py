"""Let convolutions compute with channels innermost in memory ("channels last") where that saves time.

oneDNN reorders the images of a convolution into a layout of its own and back, unless their channels are innermost;
filters are reordered at each call either way, and for longer with such images. So a large image under a small filter
gains, and a small one under a large filter loses. cuDNN copies images of half types in the same way, so that on a GPU
each convolution gains, and a lone one between images that stay no more than it costs. What lies between two
convolutions can be written in either layout, and what the caller sees has the one that eager gives it: which
convolutions change is a cut of least cost through the graph, between what has to stay and what gains (``_cost`` of a
convolution against an element brought from one layout into the other).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from ....ir.expr.value import Load, loads
from ....ir.graph.effects import CONVOLUTIONS
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Input, Library, Node, Origin, Reduction, Ref, TensorType, View, uses
from ....ir.nest.loops import contiguous_strides
from ....ir.target import TargetOf
from ...context import USUAL, PassContext
from ...cost.layouts import are_known, channels_last_time, transposing_time
from ...decisions import Alternative, place_key, text_key
from ...facts.convolution import FORWARD, Convolution, axes_of, convolution
from ..canonical.names import fresh_name

# Convolutions of images: oneDNN's are fast with channels innermost in more dimensions too, but were not measured.
RANK = 4

_PLAIN, _LAST = "plain", "channels last"
# An image, or by its result a convolution: what is in one layout or the other.
Vertex: TypeAlias = tuple[str, str]
# The layout of what products of ours read and make.
_INNERMOST: Vertex = (_LAST, "layout")


def convert_layouts(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Give images between convolutions the layout in which all of them together take the least time."""
    types = graph.types()
    found = {n.names[0]: c for n in graph.nodes if (c := _candidate(n, types, context.target_of)) is not None}
    gains = any(_cost(c, graph, context.target_of) < 0 for c in found.values())
    copies = {n.names[0]: source for n in graph.nodes if (source := _copied(n, types, context.target_of))}
    forced = bool(copies) or any(_is_last(n) for n in graph.nodes)
    if not gains and not forced and (context.decider is None or not found):
        return graph
    seen = _Images(graph, types, found, copies, context.target_of)
    images, calls = _decided(seen, context)
    changes = calls or any(_layout(types[name]) is _PLAIN for name in images)
    return _written(seen, images, calls) if changes else graph


def _decided(seen: _Images, context: PassContext) -> tuple[frozenset[str], frozenset[str]]:
    """Images and convolutions that change: those of the cheapest cut, none, or as many convolutions as may."""
    images, calls = seen.cut()
    if context.decider is None or not seen.found:
        return images, calls
    nothing = frozenset[str](), frozenset[str]()
    ways = {_PLAIN: nothing, _LAST: seen.cut(all_last=True)}
    default = next((name for name, way in ways.items() if way == (images, calls)), "cut")
    ways.setdefault(default, (images, calls))
    graph, hint = seen.graph, seen.graph.symbols.hint
    times = {name: seen.time(*way) for name, way in ways.items()}
    least = min(times.values())
    chosen = context.decide(
        "layout", lambda: text_key(place_key(graph, (name,), back=1) for name in seen.found),
        [Alternative(name, time - least) for name, time in times.items()], default, at=next(iter(seen.found)),
        nbytes=sum(hint(c.input.nbytes) + hint(c.output.nbytes) for c in seen.found.values()),
        reason=f"channels innermost in {len(calls)} of {len(seen.found)} convolutions by the cheapest cut",
    )  # fmt: skip
    return ways[chosen]


def channels_last(shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """Strides of an image ``[batch, channels, *size]`` with its channels innermost in memory, its batches outermost."""
    batch, *size, channels = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (batch, channels, *size)


def _layout(kind: TensorType) -> str | None:
    """The layout of an image; None for what is in neither, or is no image."""
    if len(kind.shape) != RANK or not kind.dtype.is_float:
        return None
    if kind.strides == contiguous_strides(kind.shape):
        return _PLAIN
    return _LAST if kind.strides == channels_last(kind.shape) else None


def _is_last(node: Node) -> bool:
    """Whether a library's call makes images with channels innermost, whatever else is decided: filters that it has put
    in order want those."""
    return isinstance(node, Library) and node.target in CONVOLUTIONS


def _copied(node: Node, types: Mapping[str, TensorType], target_of: TargetOf) -> str:
    """The image that a loop copies with its channels innermost, for a product of ours, whatever layout it has; "" where
    it does nothing of the kind."""
    if not isinstance(node, Compute) or len(node.axes) != RANK or _layout(node.type) is not _PLAIN:
        return ""
    if target_of(node.type.device).machine.calls_libraries:
        return ""
    read = list(loads(node.value))
    if len(read) != 1 or read[0].indices[1:2] != (node.axes[-1],) or _layout(types[read[0].buffer]) is None:
        return ""
    return read[0].buffer


def _sums_channels(node: Reduction, types: Mapping[str, TensorType]) -> bool:
    """Whether a sum goes over the channels of images, or of their copies: a product, which reads them as they lie."""
    read = [ld for v in node.values for ld in loads(v) if len(types[ld.buffer].shape) == RANK]
    return any(ld.indices[k] in node.reduce_axes for ld in read for k in (1, -1)) and len(read) > 1


def is_same(view: View, types: Mapping[str, TensorType]) -> bool:
    """Whether a view is its source under another name: what one element of several results is, a concat of one part."""
    source = types[view.source]
    same = view.axes == view.indices and view.offset == 0
    return same and (view.type.shape, view.type.strides) == (source.shape, source.strides)


def _candidate(node: Node, types: Mapping[str, TensorType], target_of: TargetOf) -> Convolution | None:
    """The node as a convolution that may change: of plain images, where the costs of both layouts are known."""
    if not isinstance(node, Library) or node.target != FORWARD:
        return None
    c = convolution(node, types)
    if c is None or c.groups != 1:
        return None
    if not are_known(target_of(c.input.device).machine, c.input.dtype, c.transposed):
        return None
    return c if _layout(c.input) == _layout(c.output) == _PLAIN and c.input.shape[1] > 1 else None


def _cost(c: Convolution, graph: Graph, target_of: TargetOf) -> float:
    """Nanoseconds that a convolution takes longer with channels innermost."""
    weight, images = (graph.symbols.hint(n) for n in (c.weight.numel, c.input.numel + c.output.numel))
    return channels_last_time(c, weight, images, target_of(c.input.device).machine)


@dataclass(frozen=True, slots=True)
class _Images:
    """The images of a graph and the convolutions that may change, and what it costs where two of them differ.
    ``copies`` are those with channels innermost that products of ours read, and what each is a copy of."""

    graph: Graph
    types: Mapping[str, TensorType]
    found: Mapping[str, Convolution]
    copies: Mapping[str, str]
    target_of: TargetOf

    def time(self, images: frozenset[str], calls: frozenset[str]) -> float:
        """Nanoseconds that convolutions and transpositions take more than where all stays plain and costs nothing."""
        changed: set[Vertex] = {(n, "image") for n in images} | {(n, "call") for n in calls} | {_INNERMOST}
        time = sum(_cost(self.found[n], self.graph, self.target_of) for n in calls)
        return time + sum(cost for a, b, cost in self.ties() if (a in changed) is not (b in changed))

    def cut(self, all_last: bool = False) -> tuple[frozenset[str], frozenset[str]]:
        """The images that get their channels innermost, and by their results the convolutions that compute so;
        ``all_last``: every one that may."""
        import networkx  # 0.2 s, which only graphs with convolutions take

        # What a cut leaves on the source's side changes: of all the cheapest ones, the least.
        net = networkx.Graph()
        net.add_nodes_from((_LAST, _PLAIN))
        net.add_edge(_INNERMOST, _LAST)
        for name in self.pinned():
            net.add_edge((name, "image"), _layout(self.types[name]))  # no capacity stands for an infinite one
        for one, other, cost in self.ties():
            known = net.edges[one, other]["capacity"] if net.has_edge(one, other) else 0.0
            net.add_edge(one, other, capacity=known + cost)
        for name, c in self.found.items():
            cost = _cost(c, self.graph, self.target_of)
            if all_last:
                net.add_edge((name, "call"), _LAST)
            else:
                net.add_edge((name, "call"), _PLAIN if cost > 0 else _LAST, capacity=abs(cost))
        changed = networkx.minimum_cut(net, _LAST, _PLAIN)[1][0] - {_LAST, _INNERMOST}
        by_kind = {kind: frozenset(name for name, k in changed if k == kind) for kind in ("image", "call")}
        return by_kind["image"], by_kind["call"]

    def pinned(self) -> set[str]:
        """Images that stay as they are: others than our loops and convolutions make, see or read them."""
        names = {i.name for i in self.graph.inputs if isinstance(i, Input)}
        names.update(o for o in self.graph.outputs if isinstance(o, str))
        for node in self.graph.nodes:
            match node:
                case Compute() if node.name in self.copies:
                    names.add(node.name)
                case Reduction() if self.copies and _sums_channels(node, self.types):
                    names.update(node.names, uses(node))
                case Compute() | Reduction():
                    pass
                case View() if is_same(node, self.types):
                    pass
                case Library() if (c := self.found.get(node.names[0])) is not None:
                    names.update(set(uses(node)) - {c.names["input"]})
                case _:
                    names.update(node.names, uses(node))
        return {n for n in names if n in self.types and _layout(self.types[n]) is not None}

    def ties(self) -> Iterator[tuple[Vertex, Vertex, float]]:
        """Pairs of what is in one layout or costs a transposition, in nanoseconds."""
        for node in self.graph.nodes:
            c = self.found.get(node.names[0])
            if c is not None:
                for name in (c.names["input"], node.names[0]):
                    yield (name, "image"), (node.names[0], "call"), self.transposition(name)
            elif isinstance(node, View) and is_same(node, self.types):
                if _layout(node.type) is not None:
                    yield (node.source, "image"), (node.name, "image"), math.inf
            elif node.names[0] in self.copies:
                source = self.copies[node.names[0]]
                yield (source, "image"), _INNERMOST, self.transposition(source)
            elif isinstance(node, (Compute, Reduction)) and _layout(self.types[node.names[0]]) is not None:
                for name in uses(node):
                    if _layout(self.types[name]) is not None:
                        yield (name, "image"), (node.names[0], "image"), self.transposition(name)
                for name in node.names[1:]:
                    yield (name, "image"), (node.names[0], "image"), self.transposition(name)

    def transposition(self, name: str) -> float:
        kind = self.types[name]
        machine = self.target_of(kind.device).machine
        return transposing_time(self.graph.symbols.hint(kind.numel), kind.dtype.itemsize, machine)


def _written(found: _Images, images: frozenset[str], calls: frozenset[str]) -> Graph:
    """The graph with ``images`` in their new layout, and the copies between them and what keeps the other one."""
    graph = found.graph
    taken = set(names_in(graph))
    copies: dict[tuple[str, bool], str] = {}
    nodes: list[Node] = []

    def changed(name: str, kind: TensorType) -> TensorType:
        return replace(kind, strides=channels_last(kind.shape)) if name in images else kind

    def copied(name: str, kind: TensorType, source: str, origins: tuple[Origin, ...]) -> None:
        axes = axes_of(len(kind.shape))
        nodes.append(Compute(name, kind, axes, Load(source, axes, kind.dtype), origins))

    for node in graph.nodes:
        c = found.found.get(node.names[0])
        if c is None:
            match node:
                case Compute() | View():
                    nodes.append(replace(node, type=changed(node.name, node.type)))
                case Reduction():
                    nodes.append(replace(node, types=tuple(map(changed, node.names, node.types))))
                case _:
                    nodes.append(node)
            continue
        name, source, last = node.names[0], c.names["input"], node.names[0] in calls
        if last is not (source in images):
            known = copies.get((source, last))
            if known is None:
                known = copies[source, last] = fresh_name(f"{source}_{'last' if last else 'plain'}", taken)
                strides = channels_last(c.input.shape) if last else contiguous_strides(c.input.shape)
                copied(known, replace(c.input, strides=strides), source, c.node.origins)
            source = known
        made = replace(c.output, strides=channels_last(c.output.shape)) if last else c.output
        result = name if last is (name in images) else fresh_name(f"{name}_made", taken)
        reason = f"{c.node.reason}; channels innermost in memory" if last else c.node.reason
        args = (Ref(source), *c.node.args[1:])
        nodes.append(replace(c.node, names=(result,), types=(made,), args=args, reason=reason))
        if result != name:
            copies[name, last] = result
            copied(name, changed(name, c.output), result, c.node.origins)
    return replace(graph, nodes=tuple(nodes))
