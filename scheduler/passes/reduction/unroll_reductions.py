"""Short reductions written out (CPUs), where what reads them computes each element in place and need not find it in
memory.

Results of a reduction are in memory before another loop reads them. A few elements combined are an expression like any
other, and two kinds of reductions gain by that:

- Parts of a join (the summed embeddings of a recommender, say): the join has a loop over all parts, so every part would
  be written, read and written again.
- What has more elements than all that it is made of, as the distances between the points of two lists have: reading the
  lists again costs less than writing and reading a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import sympy

from ....ir.expr.value import Select, length, loads, substitute_index, walk
from ....ir.graph.facts import makers_of
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
    """Turn reductions of a few elements into element-wise nodes, where they are read as parts of joins and by nobody
    else, or have more elements than what they are made of.

    The order of combination is that of the elements. On GPUs, where lanes of other parts would wait, nothing is done.
    """
    short = {n.names[0]: n for n in graph.nodes if isinstance(n, Reduction) and _is_short(n, context.target_of)}
    if not short:
        return graph
    readers = _Readers(graph, views_of(graph), graph.types(), readers_of(graph))
    inside = short.keys() - results_of(graph)
    chosen = {name for name in inside if readers.are_joins(name) or readers.are_grown(short[name])}
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

    def are_grown(self, n: Reduction) -> bool:
        """Whether loops alone read a reduction's results, and these are more than all that they are made of through
        element-wise nodes."""
        readers = self.by_name.get(n.names[0], ())
        if not readers or not all(isinstance(r, (Compute, Reduction)) for r in readers):
            return False
        hint, makers = self.graph.symbols.hint, makers_of(self.graph)
        left, sources, nodes = [n.values[0]], set[str](), 0
        terms = int(sympy.Mul(*n.reduce_shape))
        while left:
            value = left.pop()
            nodes += length(value)
            if nodes * terms > MAX_NODES:
                return False
            for load in loads(value):
                name = self.views.base(load.buffer)
                made = makers.get(name)
                if isinstance(made, Compute) and hint(made.type.numel) >= hint(n.types[0].numel):
                    left.append(made.value)
                else:
                    sources.add(name)
        return sum(hint(self.types[name].numel) for name in sources) < hint(n.types[0].numel)
