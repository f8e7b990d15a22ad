"""Errors that data make come before writes to inputs that the model does later.

Kernels on CPUs tell at their end of an index out of range or a divisor of zero. Where the model looks at those data
before it writes over an input, whoever catches the error finds that input as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.expr.value import is_checked
from ...ir.function.function import TensorFunction
from ...ir.graph.copies import is_copy
from ...ir.graph.graph import CallTensor, Compute, Graph, Input, Library, Reduction, Scan, Scatter, node_values, uses
from ...ir.target import raises_errors
from ..facts.views import ViewMap
from .group import Group


@dataclass(frozen=True, slots=True)
class Sites:
    """Units by number: those that make what is copied over inputs, with where the model has made the last of that, and
    those that look at data which may be an error, with where the model first does."""

    writes: Mapping[int, int]
    checks: Mapping[int, int]


def sites(graph: Graph, views: ViewMap, units: Sequence[object]) -> Sites:
    """Which units write over inputs, and which look at data that may be an error; none of these without the others."""
    given = {i.name for i in graph.inputs if isinstance(i, Input)}
    pairs = [n.args[:2] for n in graph.nodes if isinstance(n, Library) and is_copy(n)]
    copied = {views.base(value.name) for target, value in pairs if target.name in given}
    writes: dict[int, int] = {}
    checks: dict[int, int] = {}
    first: dict[str, int] = {}
    for k, u in enumerate(units if copied else ()):
        if isinstance(u, Group) and raises_errors(u.nodes[0].types[0].device):
            if made := [m.index for m in u.nodes if not copied.isdisjoint(m.names)]:
                writes[k] = max(made)
            if looked := [m.names[0] for m in u.nodes if any(map(is_checked, m.values))]:
                first = first or _first_checks(graph)
                checks[k] = min(first[name] for name in looked)
    return Sites(writes, checks)


def wait_for_checks(found: Sites, needs: list[set[int]], order: Sequence[int]) -> bool:
    """Let units that make what is copied over inputs need those behind them in an order that look at data earlier in
    the model, where these do not need them; whether that is so of any."""
    place = {k: at for at, k in enumerate(order)}
    late = [
        (w, c) for w, at in found.writes.items() for c, first in found.checks.items()
        if first < at and place[w] < place[c]
    ]  # fmt: skip
    free = [(w, c) for w, c in late if not _needs(needs, c, w)]
    for w, c in free:
        if not _needs(needs, c, w):  # through one that was added just now
            needs[w].add(c)
    return bool(free)


def _first_checks(graph: Graph) -> dict[str, int]:
    """For each value, where the graph first looks at data that may be an error, of itself or of what it is made of,
    which may be computed in its place; the end where nowhere."""
    first: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        values = node_values(node) if isinstance(node, (Compute, Reduction, Scan, Scatter)) else ()
        own = k if any(map(is_checked, values)) else len(graph.nodes)
        first.update(dict.fromkeys(node.names, min([own, *(first.get(u, own) for u in uses(node))])))
    return first


def _needs(needs: Sequence[set[int]], one: int, other: int) -> bool:
    """Whether a unit needs another, by others too."""
    seen, stack = {one}, [one]
    while stack:
        for k in needs[stack.pop()] - seen:
            if k == other:
                return True
            seen.add(k)
            stack.append(k)
    return False


def checks_before_writes(graph: Graph, functions: Mapping[str, TensorFunction]) -> dict[int, list[int]]:
    """For calls of a fused graph that write over what they are given, the calls before them that look at data."""
    known: dict[str, bool] = {}
    looked: list[int] = []
    found: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        if isinstance(node, CallTensor) and raises_errors(node.types[0].device):
            if any(t is not None for t in node.into) and looked:
                found[k] = list(looked)
            if node.function not in known:
                known[node.function] = any(is_checked(v) for s in functions[node.function].stages for v in s.values)
            if known[node.function]:
                looked.append(k)
    return found
