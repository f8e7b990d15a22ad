"""Best-first search over the graphs that rules make of one.

A step may cost something where others pay for it: graphs are followed as long as they cost less than ``RELAXED`` times
the best one so far. What pays and meets nothing else is done at once, so that steps which have nothing to do with one
another are not tried in all orders. Costs are those of what goes and what comes, so a step costs what it touches. All
is bounded by counts: the same graph is rewritten in the same way on any machine, whatever else that does.

Source: Jia et al. 2019, "Optimizing DNN Computation with Relaxed Graph Substitutions" (MetaFlow).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....ir.graph.graph import Graph
from ...context import PassContext
from ..products.operands import product_of
from .narrow import narrow
from .parts import GraphKeys
from .peak import peak_of
from .rewrite import Rewrite, applied, told
from .rules import RewriteRule
from .sites import ProductSites

# How much more than the best graph one may cost that is followed, and how many graphs are looked at in all.
RELAXED, MOST_GRAPHS = 1.05, 500
# How many of the best graphs are fused, and how many nodes they may have, all of one search of a graph together. A node
# takes .3 to .5 ms.
MOST_FUSED, FUSED_NODES = 5, 120


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Rewrites that were done at once: their places among all that were found, those that lose something included where
    they may."""

    may_lose: bool
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """A graph, how it came to be, and the nanoseconds that it saves."""

    graph: Graph
    gain: float = 0.0
    steps: tuple[SearchStep, ...] = ()


@dataclass(slots=True)
class GraphBudget:
    """How many graphs may still be looked at, and how many nodes fused only to learn their time."""

    left: int = MOST_GRAPHS
    nodes: int = FUSED_NODES


@dataclass(slots=True)
class RewriteSearch:
    """A search with some rules. ``taken`` are names that new nodes do not get; ``fits`` says whether a graph needs no
    more memory than it may. Of a part of a graph, an exponential can be in the elements of the tensors ``given``."""

    rules: Sequence[RewriteRule]
    context: PassContext
    budget: GraphBudget
    keys: GraphKeys = field(default_factory=GraphKeys)
    taken: Collection[str] = ()
    fits: Callable[[Graph], bool] = lambda graph: True
    given: Collection[str] = ()
    seen: set[Hashable] = field(default_factory=set)
    # Those that save most so far, the best first.
    leading: list[State] = field(default_factory=list)

    def best(self, graph: Graph) -> State:
        """The state that saves most; one without steps where nothing saves anything."""
        best = State(graph)
        slack: float | None = None
        waiting: list[tuple[float, int, State]] = [(0.0, 0, best)]
        count = 0
        while waiting and self.budget.left > 0:
            _, _, state = heapq.heappop(waiting)
            if state.gain < best.gain:
                slack = _least(ProductSites(graph, self.context)) if slack is None else slack
                if state.gain < best.gain + slack:
                    break  # and so are all that wait
            self.budget.left -= 1
            sites = ProductSites(state.graph, self.context, set(self.taken), self.given)
            # What a step may lose so that its graph is still followed: nothing where it stands on a loss already.
            least = partial(_least, sites) if state.gain >= best.gain else _nothing
            found = list(self.found(sites, least))
            for chosen, graph_then in self.choices(state, found):
                made = self.after(state, found, chosen, graph_then, state.gain >= best.gain)
                if made is None:
                    continue
                if made.gain > best.gain:
                    best = made
                if made.gain > 0:
                    self.leading = sorted([*self.leading, made], key=lambda s: -s.gain)[:MOST_FUSED]
                count += 1
                heapq.heappush(waiting, (-made.gain, count, made))
        return best

    def chosen(self, graph: Graph) -> State:
        """The state to take, which needs no more memory than the graph: that which saves most, or where several save
        something and the budget allows it, the fastest of them once they are fused."""
        self.best(graph)
        found = [s for s in self.leading if peak_of(s.graph) <= peak_of(graph)]
        nodes = sum(len(s.graph.nodes) for s in found)
        time_of = self.context.fused_time
        if not found:
            return State(graph)
        if time_of is None or len(found) < 2 or nodes > self.budget.nodes:
            return found[0]
        self.budget.nodes -= nodes
        return min(found, key=lambda s: time_of(narrow(s.graph), self.context))

    def choices(self, state: State, found: Sequence[Rewrite]) -> Iterator[tuple[tuple[int, ...], Graph]]:
        """Which rewrites are tried, and the graph behind them, if it fits: first all that pay and meet no other; where
        there are none, those of one place at which some pay, each alone; where none pays, each of all."""
        meeting = [[j for j, b in enumerate(found) if j != k and a.meets(b)] for k, a in enumerate(found)]
        free = [k for k, r in enumerate(found) if r.gain > 0 and not meeting[k]]
        fitting, graph = self._fitting(state.graph, found, free)
        if fitting:
            yield fitting, graph
            return
        alone = [k for k, r in enumerate(found) if r.gain <= 0]
        paying = [k for k, r in enumerate(found) if r.gain > 0 and k not in free]
        if paying:
            first = max(paying, key=lambda k: (found[k].gain, -k))
            alone = sorted({first, *(j for j in meeting[first] if found[j].gain > 0)})
        for k in alone:
            made = applied(state.graph, [found[k]])
            if self.fits(made):
                yield (k,), made

    def _fitting(self, graph: Graph, found: Sequence[Rewrite], free: Sequence[int]) -> tuple[tuple[int, ...], Graph]:
        """The rewrites of which as many as fit are done at once, all of them where they can be, and their graph."""
        whole = applied(graph, [found[k] for k in free]) if free else graph
        if self.fits(whole):
            return tuple(free), whole
        fitting: tuple[int, ...] = ()
        last = graph
        for k in free:
            made = applied(graph, [found[j] for j in (*fitting, k)])
            if self.fits(made):
                fitting, last = (*fitting, k), made
        return fitting, last

    def after(
        self, state: State, found: Sequence[Rewrite], chosen: Sequence[int], graph: Graph, may_lose: bool
    ) -> State | None:
        """The state behind some rewrites, which make a graph; None where that is known."""
        key = self.keys.of(graph)
        if key in self.seen:
            return None
        self.seen.add(key)
        step = SearchStep(may_lose, tuple(chosen))
        return State(graph, state.gain + sum(found[k].gain for k in chosen), (*state.steps, step))

    def again(self, graph: Graph, steps: Sequence[SearchStep]) -> Graph:
        """What the same steps make of an equal graph."""
        for step in steps:
            sites = ProductSites(graph, self.context, set(self.taken), self.given)
            found = list(self.found(sites, partial(_least, sites) if step.may_lose else _nothing))
            graph = applied(graph, [found[k] for k in step.chosen])
        return graph

    def found(self, sites: ProductSites, least: Callable[[], float]) -> Iterator[Rewrite]:
        """All rewrites of a graph that lose no more than they may, the last products first."""
        for node in reversed(sites.graph.nodes):
            product = product_of(node)
            for rule in self.rules if product is not None else ():
                if product is not None and rule.applies(sites, product):
                    sites.least = least if rule.may_lose else _nothing
                    for r in rule.find(sites, product):
                        if r.gain > 0.0 or r.gain >= sites.least():
                            yield told(r, rule.name)


def _nothing() -> float:
    return 0.0


def _least(sites: ProductSites) -> float:
    """The share of a graph's time that a step may lose, below zero."""
    return (1 - RELAXED) * sites.time()
