"""A fused graph of a few layers to that of all: what came out of one layer in the middle is written once for each layer
that was left out, under the names of its own nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...ir.graph.facts import users_of
from ...ir.graph.graph import Graph, Node, uses
from .layers import HEAD
from .repeating import NotAlike, Repeating


def unroll(short: Repeating) -> Graph:
    """The fused graph of all layers. Raises NotAlike."""
    start, period = short.window
    cut, left_out = start + period, short.left_out
    whole = [short.moved(n, 0) for n in short.body[:cut]]
    whole += [short.moved(n, k) for k in range(1, left_out + 1) for n in short.body[start:cut]]
    whole += [short.moved(n, left_out) for n in short.body[cut:]]
    outputs, views = short.outputs()
    graph = replace(short.graph, inputs=short.inputs, nodes=(*whole, *views), outputs=outputs)
    _check(graph)
    _check_readers(short, graph, short.body[start:cut])
    return graph


def _check_readers(short: Repeating, whole: Graph, layer: Sequence[Node]) -> None:
    """What a layer makes or is given has as many readers in each of the layers that were written for one.

    Passes make one sum of many (a gradient that all layers share) of those layers that they see, behind the last.
    """
    before, after = _readers(short.graph), _readers(whole)
    made = [name for node in layer for name in node.names]
    given = [i.name for i in short.graph.inputs if (at := short.places[i.name]) is not None and at.layer == HEAD - 1]
    for name in (*made, *given):
        if any(after[n] != before[name] for n in short.each(name)):
            raise NotAlike


def _readers(graph: Graph) -> Counter[str]:
    """How many nodes read a name, or how often it leaves the graph."""
    found = Counter({name: len(users) for name, users in users_of(graph).items()})
    found.update(o for o in graph.outputs if isinstance(o, str))
    return found


def _check(graph: Graph) -> None:
    """Every name is given once, before it is read."""
    known = {i.name for i in graph.inputs}
    for node in graph.nodes:
        if not known.issuperset(uses(node)):
            raise NotAlike
        for name in node.names:
            if name in known:
                raise NotAlike
            known.add(name)
    if any(isinstance(o, str) and o not in known for o in graph.outputs):
        raise NotAlike
