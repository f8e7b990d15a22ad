"""A reduction of many elements to few results, on a GPU, becomes two: one in pieces, which occupies the machine, and
one over the pieces.

A kernel's programs do not combine results, so a sum of everything would be the work of one program. The second
reduction combines the raw states of the first by the same monoid. Positions that values name stay those of the whole.
On CPUs a schedule splits a reduction inside its kernel instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Expr, IndexValue, Load, Select, call, substitute_index, symbol
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Graph, Node, Reduction, TensorType
from ....ir.nest.loops import contiguous_strides
from ..canonical.names import fresh_name

# Programs that occupy a GPU: about four for each of its multiprocessors.
PROGRAMS = 512
# A piece has at least so many elements, and fewer pieces than that are not worth a second kernel.
PIECE, FEWEST = 4096, 8
# Pieces of contiguous memory start at multiples of this, so that their loads are as wide as those of the whole.
ALIGNMENT = 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """A reduced axis in two: ``parts`` pieces of ``size`` iterations; ``is_exact`` where no piece has a tail."""

    parts: sympy.Expr
    size: sympy.Expr
    is_exact: bool


def split_reductions(graph: Graph) -> Graph:
    """Split the reductions on GPUs that have too few results to occupy one."""
    taken = set(names_in(graph))
    nodes: list[Node] = []
    for node in graph.nodes:
        cuts = _cuts(node, graph.symbols) if isinstance(node, Reduction) else []
        nodes += in_pieces(node, cuts, taken) if isinstance(node, Reduction) and cuts else [node]
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes))


def _cuts(node: Reduction, table: SymbolTable) -> list[Cut]:
    """How the outermost reduced axes are cut, a cut an axis; none where the reduction stays as it is."""
    if not node.types[0].device.startswith("cuda") or any(c.vector for c in node.monoid.components):
        return []
    rows = max(table.hint(node.types[0].numel), 1)
    elements = table.hint(sympy.Mul(*node.reduce_shape))
    wanted = min(PROGRAMS // rows, elements // PIECE)
    return cuts_for(node.reduce_shape, wanted, table) if wanted >= FEWEST else []


def cuts_for(shape: tuple[sympy.Expr, ...], wanted: int, table: SymbolTable) -> list[Cut]:
    """Cuts of the outermost axes of a reduction over ``shape`` into about ``wanted`` pieces."""
    cuts: list[Cut] = []
    pieces = 1
    for k, extent in enumerate(shape):
        if 2 * pieces >= wanted:
            break
        if pieces * table.hint(extent) <= 2 * wanted:  # all of the axis
            cuts.append(Cut(extent, sympy.S.One, True))
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
    lead = [symbol(f"i{k}") for k in range(len(cuts))]
    axes = [symbol(f"i{k}") for k in range(len(cuts), len(cuts) + len(node.axes))]
    moved: dict[sympy.Symbol, sympy.Expr] = dict(zip(node.axes, axes, strict=True))
    inner: dict[sympy.Symbol, sympy.Expr] = {}
    tails: list[tuple[sympy.Expr, sympy.Expr]] = []
    for k, (axis, extent) in enumerate(zip(node.reduce_axes, node.reduce_shape, strict=True)):
        if k < len(cuts) and cuts[k].size == 1:
            moved[axis] = lead[k]
            continue
        own = symbol(f"r{len(inner)}")
        inner[own] = cuts[k].size if k < len(cuts) else extent
        moved[axis] = lead[k] * cuts[k].size + own if k < len(cuts) else own
        if k < len(cuts) and not cuts[k].is_exact:
            tails.append((moved[axis], extent))
    values = tuple(substitute_index(v, moved) for v in node.values)
    for index, extent in tails:
        inside = call("lt", IndexValue(index, DType.INT64), IndexValue(extent, DType.INT64))
        values = _guarded(node, inside, values)
    names = tuple(fresh_name(f"{name}_pieces", taken) for name in node.names)
    shape = tuple(c.parts for c in cuts)
    types = tuple(_with_lead(t, shape) for t in node.types)
    pieces = Reduction(
        names, types, (*lead, *axes), tuple(inner), tuple(inner.values()), node.monoid, values, node.origins
    )
    over = tuple(symbol(f"r{k}") for k in range(len(cuts)))
    states = tuple(Load(name, (*over, *node.axes), t.dtype) for name, t in zip(names, types, strict=True))
    return [pieces, replace(node, reduce_axes=over, reduce_shape=shape, values=states)]


def _guarded(node: Reduction, inside: Expr, values: tuple[Expr, ...]) -> tuple[Expr, ...]:
    identity = node.monoid.identity(tuple(v.dtype for v in values))
    return tuple(Select(inside, v, e) for v, e in zip(values, identity, strict=True))


def _with_lead(t: TensorType, lead: tuple[sympy.Expr, ...]) -> TensorType:
    shape = (*lead, *t.shape)
    return replace(t, shape=shape, strides=contiguous_strides(shape))
