"""Facts of a graph: who makes and who reads what, and which names share memory. Each is computed when it is first asked
for, and kept with the graph while that stands: graphs do not change.

Whoever changes what a fact gives makes a copy first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar, cast

from .begun import in_flight, passed_on
from .copies import COPY
from .effects import may_alias
from .graph import CallRegion, CallTensor, Graph, Input, Library, Node, View, uses
from .slices import JOINED

T = TypeVar("T")


def fact(compute: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """A function of a graph, computed once for each graph."""

    @wraps(compute)
    def asked(graph: Graph) -> T:
        if compute not in graph.known:
            graph.known[compute] = compute(graph)
        return cast(T, graph.known[compute])

    return asked


@fact
def makers_of(graph: Graph) -> Mapping[str, Node]:
    """The node that makes each result."""
    return {name: node for node in graph.nodes for name in node.names}


@fact
def places_of(graph: Graph) -> Mapping[str, int]:
    """The position of the node that makes each result."""
    return {name: k for k, node in enumerate(graph.nodes) for name in node.names}


@fact
def users_of(graph: Graph) -> Mapping[str, Sequence[int]]:
    """The positions of the nodes that read each tensor by its own name."""
    found: dict[str, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for name in uses(node):
            found.setdefault(name, []).append(k)
    return found


@fact
def names_in(graph: Graph) -> frozenset[str]:
    """The names of inputs and results."""
    return frozenset({i.name for i in graph.inputs} | places_of(graph).keys())


@dataclass(frozen=True, slots=True)
class Aliases:
    """Which names of a graph may share memory with which inputs or results: views, and what libraries may pass on.

    ``readers`` has for each memory, by the name that it was made under, the positions of the nodes that read any name
    for it; a wait is the last read of what it waits for was given. ``leaving`` is memory that results of the graph
    may lie in, or that something reads when the graph has run.
    """

    bases: Mapping[str, frozenset[str]]
    readers: Mapping[str, Sequence[int]]
    leaving: frozenset[str]

    def __getitem__(self, name: str) -> frozenset[str]:
        return self.bases.get(name, frozenset())  # what is no tensor has no memory


@fact
def aliases_of(graph: Graph) -> Aliases:
    """What may share memory, and who reads it."""
    bases = _bases(graph)
    flying = in_flight(graph)
    reading: dict[str, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for base in {b for u in (*uses(node), *flying.get(k, ())) for b in bases.get(u, ())}:
            reading.setdefault(base, []).append(k)
    last = [*(o for o in graph.outputs if isinstance(o, str)), *flying.get(len(graph.nodes), ())]
    return Aliases(bases, reading, frozenset(b for name in last for b in bases.get(name, ())))


def _bases(graph: Graph) -> dict[str, frozenset[str]]:
    found = {i.name: frozenset((i.name,)) for i in graph.inputs if isinstance(i, Input)}
    for node in graph.nodes:
        shared: frozenset[str] = frozenset()
        match node:
            case View():
                found[node.name] = found.get(node.source, shared)
                continue
            case Library(target=target) if target == JOINED:
                found[node.names[0]] = found.get(node.args[0].name, shared)
                continue
            case Library() if passed := passed_on(node):
                found.update((name, found.get(source, shared) | {name}) for name, source in passed.items())
                continue
            case Library(target=target) if target != COPY and may_alias(target):
                shared = shared.union(*(found.get(u, shared) for u in uses(node)))
            case CallRegion():
                shared = shared.union(*(found.get(u, shared) for u in uses(node)))
            case CallTensor() if node.into:
                for name, into in zip(node.names, node.into, strict=True):
                    found[name] = frozenset((name,)) | (found.get(into, shared) if into is not None else shared)
                continue
        found.update({name: shared | {name} for name in node.names})
    return found


__all__ = ["Aliases", "aliases_of", "fact", "makers_of", "names_in", "places_of", "users_of"]
