"""One substitution at one place of a graph: what stands in the place of which nodes, and what that saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ....ir.graph.graph import Graph, Library, Node, uses
from ...cost.products.substitutions import gain_of
from ...facts.order import in_order
from ..canonical.eliminate_dead import eliminate_dead


@dataclass(frozen=True, slots=True)
class Rewrite:
    """``nodes`` in the place of each of some nodes, by their names; ``before`` and ``after`` are nanoseconds of what
    goes and of what comes. ``gone`` are products that nobody reads any more, ``read`` what the new nodes read."""

    nodes: Mapping[str, tuple[Node, ...]]
    before: float
    after: float
    gone: frozenset[str]
    read: frozenset[str]

    @property
    def gain(self) -> float:
        """Nanoseconds that are saved beyond what a rewrite has to save; below zero where it costs."""
        return gain_of(self.before, self.after)

    def meets(self, other: Rewrite) -> bool:
        """Whether one takes away what the other reads or replaces, so that they cannot both be applied."""
        return bool(
            self.nodes.keys() & other.nodes.keys()
            or self.gone & (other.gone | other.read)
            or self.read & other.gone
        )  # fmt: skip


def rewrite_of(nodes: Mapping[str, tuple[Node, ...]], before: float, after: float, gone: Iterable[str]) -> Rewrite:
    """A rewrite by the nodes that it writes, of which libraries are told what they stand for."""
    every = [n for made in nodes.values() for n in made]
    own = {name for n in every for name in n.names}
    return Rewrite(nodes, before, after, frozenset(gone), frozenset({u for n in every for u in uses(n)} - own))


def told(rewrite: Rewrite, rule: str) -> Rewrite:
    """The rewrite, of which libraries tell for what they stand, by which rule, and both times."""
    times = f"{rewrite.after / 1e3:.1f} us rather than {rewrite.before / 1e3:.1f}"
    text = f"in the place of {', '.join(sorted(rewrite.gone))} ({rule}): {times}"
    nodes = {
        name: tuple(replace(n, reason=f"{n.reason}; {text}") if isinstance(n, Library) else n for n in made)
        for name, made in rewrite.nodes.items()
    }
    return replace(rewrite, nodes=nodes)


def applied(graph: Graph, rewrites: Iterable[Rewrite]) -> Graph:
    """The graph with rewrites that do not meet."""
    changed: dict[str, tuple[Node, ...]] = {}
    for r in rewrites:
        changed.update(r.nodes)
    nodes: list[Node] = []
    for n in graph.nodes:
        nodes += changed.get(n.names[0], (n,)) if n.names else (n,)
    return eliminate_dead(in_order(replace(graph), nodes))
