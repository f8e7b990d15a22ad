"""Short reductions that are parts of a join, written out (CPUs): what joins them computes each where it is wanted.

Results of a reduction are in memory before another loop reads them. A join of several (the summed embeddings of a
recommender, say) has a loop over all parts, so every part would be written, read and written again. A few elements
combined are an expression like any other, which the join's loop computes in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import sympy

from ....ir.expr.value import Select, length, loads, substitute_index, walk
from ....ir.graph.graph import Compute, Graph, Node, Reduction, TensorType
from ....ir.target import TargetOf
from ...context import USUAL, PassContext
from ...facts.evaluations import evaluations
from ...facts.views import ViewMap, readers_of, results_of, views_of
from ...fusion.chain import is_contraction
from ...rules import Capability, can

# So many elements at most are combined in an expression, of so many nodes at most.
MAX_ELEMENTS, MAX_NODES = 8, 128


def unroll_reductions(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Turn reductions of a few elements that are read as parts of joins, and by nobody else, into element-wise nodes.

    The order of combination is that of the elements. On GPUs, where lanes of other parts would wait, nothing is done.
    """
    short = {n.names[0]: n for n in graph.nodes if isinstance(n, Reduction) and _is_short(n, context.target_of)}
    if not short:
        return graph
    readers = _Readers(graph, views_of(graph), graph.types(), readers_of(graph))
    chosen = {name for name in short.keys() - results_of(graph) if readers.are_joins(name)}
    if not chosen:
        return graph
    return replace(graph, nodes=tuple(_unrolled(n) if n.names and n.names[0] in chosen else n for n in graph.nodes))


def _is_short(n: Reduction, target_of: TargetOf) -> bool:
    count = sympy.Mul(*n.reduce_shape)
    if len(n.values) != 1 or is_contraction(n):
        return False
    if not can(target_of(n.types[0].device), Capability.BRANCHES):
        return False
    if not count.is_number or not 1 < count <= MAX_ELEMENTS:
        return False
    return int(count) * length(n.values[0]) <= MAX_NODES


def _unrolled(n: Node) -> Compute:
    assert isinstance(n, Reduction)
    places = product(*(range(int(size)) for size in n.reduce_shape))
    state, *others = (
        substitute_index(n.values[0], dict(zip(n.reduce_axes, map(sympy.Integer, place), strict=True)))
        for place in places
    )
    for other in others:
        (state,) = n.monoid.combine((state,), (other,))
    return Compute(n.names[0], n.types[0], n.axes, state, n.origins)


@dataclass(slots=True)
class _Readers:
    graph: Graph
    views: ViewMap
    types: dict[str, TensorType]
    by_name: Mapping[str, Sequence[Node]]

    def are_joins(self, name: str) -> bool:
        """Whether a tensor is read under conditions, by one element-wise node alone, and no element twice."""
        readers = self.by_name.get(name, ())
        if len(readers) != 1 or not isinstance(readers[0], Compute):
            return False
        node, hint = readers[0], self.graph.symbols.hint
        extents = dict(zip(node.axes, node.type.shape, strict=True))
        value = self.views.resolve(node.value, extents)
        branches = [b for e in walk(value) if isinstance(e, Select) for b in (e.if_true, e.if_false)]
        guarded = any(ld.buffer == name for b in branches for ld in loads(b))
        return guarded and evaluations([value], extents, hint)[name] <= hint(self.types[name].numel)
