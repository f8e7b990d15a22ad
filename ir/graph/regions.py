"""Calls of regions written out: what a region does once for each call, in the graph around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from .facts import names_in
from .graph import CallRegion, Graph, GraphOutput, Node, uses
from .rename import renamed

# What something of a region is called in one of its calls.
Called: TypeAlias = Callable[[str, int], str]


def write_out_regions(graph: Graph, called: Called | None = None) -> Graph:
    """The graph with the nodes of each region once a call; itself where it calls none.

    ``called`` gives names that nothing else of the graph has; without it, they are made up.
    """
    if not any(isinstance(n, CallRegion) for n in graph.nodes):
        return graph
    writer = _Writer(called or _made_up(graph))
    for node in graph.nodes:
        if isinstance(node, CallRegion):
            writer.write(node)
        else:
            is_same = writer.known.keys().isdisjoint(uses(node))
            writer.nodes.append(node if is_same else renamed(node, writer.name))
    return replace(graph, nodes=tuple(writer.nodes), outputs=tuple(map(writer.left, graph.outputs)))


class _Writer:
    def __init__(self, called: Called) -> None:
        self.called = called
        self.nodes: list[Node] = []
        # What results of calls are that no node of a region makes under their names.
        self.known: dict[str, str] = {}

    def name(self, name: str) -> str:
        return self.known.get(name, name)

    def left(self, output: GraphOutput) -> GraphOutput:
        return self.name(output) if isinstance(output, str) else output

    def write(self, node: CallRegion) -> None:
        region, carries = write_out_regions(node.region), len(node.carried)
        outputs = tuple(str(o) for o in region.outputs)
        kept = dict(zip(outputs[carries:], node.kept, strict=True))
        carried = tuple(map(self.name, node.carried))
        for call in range(node.times):
            here = dict(
                zip((i.name for i in region.inputs), (*carried, *map(self.name, node.given(call))), strict=True)
            )
            for inner in region.nodes:
                here.update((n, kept[n][call] if n in kept else self.called(n, call)) for n in inner.names)
                self.nodes.append(renamed(inner, here.__getitem__))
            carried = tuple(here[o] for o in outputs[:carries])
            self.known.update((row[call], here[o]) for o, row in kept.items() if row[call] != here[o])
        self.known.update(zip(node.names[:carries], carried, strict=True))


def _made_up(graph: Graph) -> Called:
    taken = set(names_in(graph))

    def called(name: str, call: int) -> str:
        found = f"{name}_{call}" if call else name
        while found in taken:
            found += "_"
        taken.add(found)
        return found

    return called


def handed_on(node: CallRegion) -> list[tuple[str, str, str]]:
    """What a region carries: the input, the output that is the input in the next call, and the value before all calls.

    They are in such an order that one after the other an input may become what the output was. Those that are left out
    hand inputs on to each other in a circle.
    """
    inputs, outputs = (i.name for i in node.region.inputs), map(str, node.region.outputs)
    waiting = list(zip(inputs, outputs, node.carried, strict=False))
    found: list[tuple[str, str, str]] = []
    while waiting:
        read = {output for name, output, _ in waiting if name != output}
        ready = [one for one in waiting if one[0] not in read]
        if not ready:
            break
        found += ready
        waiting = [one for one in waiting if one not in ready]
    return found


__all__ = ["Called", "handed_on", "write_out_regions"]
