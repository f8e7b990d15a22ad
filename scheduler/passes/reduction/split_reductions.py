"""A reduction of many elements to few results, on a GPU, becomes two: one in pieces, which occupies the machine, and
one over the pieces.

A kernel's programs do not combine results, so a sum of everything would be the work of one program. The second
reduction combines the raw states of the first by the same monoid. Positions that values name stay those of the whole.
On CPUs a schedule splits a reduction inside its kernel instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import symbol
from ....ir.function.function import Dim
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Graph, Node, Reduction, uses
from ...context import USUAL, PassContext
from ...cost.programs import pieces_of_sum
from ...decisions import Alternative, place_key
from ...functions.split_kernel import Cut, combined, numbered, partial, split_axes, whole
from ...rules import Capability, can
from ..canonical.names import fresh_name

# Pieces of contiguous memory start at multiples of this, so that their loads are as wide as those of the whole.
ALIGNMENT = 1024


def split_reductions(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Split the reductions on GPUs that have too few results to occupy one."""
    taken = set(names_in(graph))
    nodes: list[Node] = []
    for node in graph.nodes:
        cuts = _cuts(node, graph, context) if isinstance(node, Reduction) else []
        nodes += in_pieces(node, cuts, taken) if isinstance(node, Reduction) and cuts else [node]
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes))


def _cuts(node: Reduction, graph: Graph, context: PassContext) -> list[Cut]:
    """How the outermost reduced axes are cut, a cut an axis; none where the reduction stays as it is."""
    table, target = graph.symbols, context.target_of(node.types[0].device)
    if can(target, Capability.SPLIT_SUMS) or any(c.vector for c in node.monoid.components):
        return []
    rows, elements = table.hint(node.types[0].numel), table.hint(sympy.Mul(*node.reduce_shape))
    wanted = pieces_of_sum(target.machine, rows, elements)
    if wanted > 1:
        types = graph.types()
        # Half as many are another way than the cost model's, and so are none.
        ways = {1: "whole", wanted: f"{wanted} pieces", wanted // 2: f"{wanted // 2} pieces"}
        ways = {k: way for k, way in ways.items() if k >= 1}
        chosen = context.decide(
            "pieces", lambda: place_key(graph, node.names[:1]), [Alternative(way) for way in ways.values()],
            ways[wanted], at=node.names[0], nbytes=sum(table.hint(types[n].nbytes) for n in uses(node) if n in types),
            reason=f"{rows} rows of {elements} elements",
        )  # fmt: skip
        wanted = next(k for k, way in ways.items() if way == chosen)
    return cuts_for(node.reduce_shape, wanted, table) if wanted > 1 else []


def cuts_for(shape: tuple[sympy.Expr, ...], wanted: int, table: SymbolTable) -> list[Cut]:
    """Cuts of the outermost axes of a reduction over ``shape`` into about ``wanted`` pieces."""
    cuts: list[Cut] = []
    pieces = 1
    for k, extent in enumerate(shape):
        if 2 * pieces >= wanted:
            break
        if pieces * table.hint(extent) <= 2 * wanted:  # all of the axis
            cuts.append(whole(extent))
        else:
            cuts.append(_cut(extent, -(-wanted // pieces), ALIGNMENT if k == len(shape) - 1 else 1))
        pieces *= max(table.hint(cuts[-1].parts), 1)
    return cuts


def _cut(extent: sympy.Expr, parts: int, step: int) -> Cut:
    """About ``parts`` pieces of an axis: without a tail if there is such a number near, else of a multiple of ``step``
    iterations."""
    if extent.is_Integer:
        length = int(extent)
        exact = [p for p in _near(parts) if length % p == 0 and (length // p) % min(step, 16) == 0]
        if exact:
            return Cut(sympy.Integer(exact[0]), sympy.Integer(length // exact[0]), True)
        size = -(-length // (parts * step)) * step
        return Cut(sympy.Integer(-(-length // size)), sympy.Integer(size), False)
    size = step * FloorDiv(extent + parts * step - 1, sympy.Integer(parts * step))
    return Cut(sympy.Integer(parts), size, False)


def _near(number: int) -> Iterator[int]:
    """Numbers between half of one and twice it, the nearest first."""
    yield from sorted(range(number // 2 + 1, 2 * number + 1), key=lambda p: max(p / number, number / p))


def exact_cuts(shape: tuple[sympy.Expr, ...], pieces: int) -> list[Cut]:
    """Cuts of the outermost axes, of constant extents whose product ``pieces`` divides, into so many pieces of one
    length; none for one piece."""
    cuts: list[Cut] = []
    for extent in shape:
        if pieces == 1:
            break
        parts = math.gcd(int(extent), pieces)
        cuts.append(Cut(sympy.Integer(parts), sympy.Integer(int(extent) // parts), True))
        pieces //= parts
    return cuts


def in_pieces(node: Reduction, cuts: list[Cut], taken: set[str]) -> list[Node]:
    """The reduction in pieces, whose results have a leading axis for each cut, and the reduction over those.

    The names of the pieces are added to ``taken``.
    """
    over = [Dim(axis, extent) for axis, extent in zip(node.reduce_axes, node.reduce_shape, strict=True)]
    rest = [None] * (len(over) - len(cuts))
    split = split_axes(over, [*cuts, *rest], numbered("i"), numbered("r"))
    kept = [Dim(symbol(f"i{len(cuts) + k}"), extent) for k, extent in enumerate(node.types[0].shape)]
    split = split.moved(dict(zip(node.axes, (d.var for d in kept), strict=True)))
    names = tuple(fresh_name(f"{name}_pieces", taken) for name in node.names)
    pieces = partial(node, names, split, kept)
    counted = [Dim(symbol(f"r{k}"), c.parts) for k, c in enumerate(cuts)]
    return [pieces, combined(node, pieces, counted, (*(d.var for d in counted), *node.axes))]
