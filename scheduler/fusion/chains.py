"""Which chains a graph has, and their calls: the entry to what ``chain`` decides and ``chain_function`` writes."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.expr.monoid import WEIGHTED
from ...ir.expr.value import loads
from ...ir.function.function import TensorFunction
from ...ir.graph.facts import makers_of
from ...ir.graph.graph import CallTensor, Compute, Graph, Node, Reduction
from ...ir.target import TargetOf
from ..context import PassContext
from ..facts.views import readers_of, results_of, views_of
from ..rules import Capability, can
from .chain import Chain, Others, is_contraction, is_total, row_axes, told
from .chain_function import ChainFunctionWriter
from .fusion import Fusion
from .outlined import Functions, Parameters
from .pieces.split_keys import split_keys
from .prologues import take_prologues


def outline_chains(fusion: Fusion, context: PassContext) -> Fusion:
    """Make one function of every reduction by a monoid with a vector component and the contractions that feed it."""
    graph = fusion.graph
    starts = [n for n in graph.nodes if isinstance(n, Reduction) and any(c.vector for c in n.monoid.components)]
    if not starts:
        return fusion
    views, types = views_of(graph), graph.types()
    readers, needed = readers_of(graph), results_of(graph)
    functions = Functions()
    calls: dict[str, list[CallTensor]] = {}
    gone: set[str] = set()
    others = Others(graph)
    for group in _together(graph, starts):
        chain = Chain(graph, views, readers, needed, group, others)
        chain.grow()
        others.add(chain)
    take_prologues(graph, others.built, context.target_of)
    for chain in others.built:
        written = ChainFunctionWriter(chain, Parameters(graph, types)).build()
        calls[chain.last] = [functions.enter(f, call) for f, call in _calls(*written, context.target_of)]
        gone.update(n for m in chain.nodes for n in m.names)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.names and node.names[0] in calls:
            nodes += calls[node.names[0]]
        elif not node.names or node.names[0] not in gone:
            nodes.append(node)
    return functions.outlined(fusion, nodes, len(gone))


def _together(graph: Graph, starts: Sequence[Reduction]) -> list[tuple[Reduction, ...]]:
    """Starts that read the same contractions are one chain."""
    makers = makers_of(graph)
    groups: list[tuple[list[Reduction], set[str]]] = []
    for start in starts:
        read: set[str] = set()
        stack = [ld.buffer for ld in told(start)]
        while stack:
            node = makers.get(name := stack.pop())
            if isinstance(node, (Compute, Reduction)) and name not in read:
                read.add(name)
                if isinstance(node, Compute):
                    stack += [ld.buffer for ld in loads(node.value)]
        shared = {n for n in read if isinstance(m := makers[n], Reduction) and is_contraction(m)}
        home = next((g for g in groups if g[1] & shared and _alike(g[0][0], start)), None)
        if home is None:
            groups.append(([start], shared))
        else:
            home[0].append(start)
            home[1].update(shared)
    return [tuple(sorted(g[0], key=is_total)) for g in groups]


def _alike(a: Reduction, b: Reduction) -> bool:
    """Whether two starts may be of one function: sums over the same columns of the same rows, or over rows of what
    those are told."""
    if a.monoid is not WEIGHTED or b.monoid is not WEIGHTED:
        return False
    if is_total(a) or is_total(b):
        return True
    if a.reduce_shape != b.reduce_shape:
        return False
    rows_a, rows_b = (
        [n for x, n in zip(r.axes, r.types[0].shape, strict=True) if x in row_axes(r)] for r in (a, b)
    )  # fmt: skip
    return rows_a == rows_b


def _calls(function: TensorFunction, call: CallTensor, target_of: TargetOf) -> list[tuple[TensorFunction, CallTensor]]:
    """A chain's function and its call; those of pieces of it and of all on a target that its rows do not occupy, and
    that has no rule for both in one kernel."""
    target = target_of(call.types[0].device)
    pieces = None if can(target, Capability.SPLIT_KEYS) else split_keys(function, target.machine)
    if pieces is None:
        return [(function, call)]
    first, second = pieces.calls(call, "keys")
    return [(pieces.first, first), (pieces.second, second)]
