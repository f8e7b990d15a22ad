"""Sums over a batch of what is made, element by element, of products' results: the gradient of an attention's bias.

Such a sum is one more reader of the tiles that the gradients of keys and values take up. It is not streamed itself: its
result has an element for each row and column, and the batch goes by while a tile of it is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.monoid import SUM, WEIGHTED
from ....ir.expr.value import Cast, Expr, Load, cast, is_value
from ....ir.graph.graph import Node, Reduction, TensorType, View
from ...facts.definitions import Definitions
from .batch_axes import BatchWriter, digits_of
from .chain_elements import BATCH, COLUMN, ROW, Elements, NoChainError, Score


@dataclass(frozen=True, slots=True)
class Total:
    """``node[lead, column, row] = sum over other parts of the batch of element``, or with row before column.

    ``kept`` and ``over`` are the leading indices of the result and those that are summed over, as functions of the
    batch; ``order`` the last two axes of the result.
    """

    node: Reduction
    scores: tuple[Score, ...]
    element: Expr
    extents: dict[sympy.Symbol, sympy.Expr]
    kept: tuple[sympy.Expr, ...]
    over: tuple[sympy.Expr, ...]
    order: tuple[sympy.Symbol, sympy.Symbol]

    @property
    def name(self) -> str:
        return self.node.names[0]

    @property
    def dtype(self) -> DType:
        return self.node.types[0].dtype

    @property
    def device(self) -> str:
        return self.node.types[0].device

    @property
    def values(self) -> tuple[Expr, ...]:
        return (self.element, Load(self.name, (*self.kept, *self.over), self.dtype))

    @property
    def space(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.extents[s] for s in (BATCH, ROW, COLUMN))

    def written(self, frame: BatchWriter, weight: Load, name: str) -> list[Node]:
        """The sum of ``weight``, an element of the grid of ``frame``, named ``name``, and this node as a view of it."""
        over = [s for i in self.over for s in frame.index(i).free_symbols]
        axes = tuple(s for s in (*frame.batch.axes, *self.order) if s not in over)
        reduced = tuple(s for s in frame.batch.axes if s in over)
        shape = tuple(frame.batch.extents[s] for s in reduced)
        total = Reduction((name,), (frame.type(axes, self.dtype),), axes, reduced, shape, WEIGHTED,
                          (cast(weight, self.dtype),), self.node.origins)  # fmt: skip
        at = [*(frame.index(i) for i in self.kept), *self.order]
        kind, table = self.node.types[0], frame.graph.symbols
        extents = {s: frame.batch.extents[s] for s in axes}
        digits = digits_of(at, self.node.axes, kind.shape, extents, table)
        assert digits is not None
        places = tuple(digits.get(s, sympy.S.Zero) for s in axes)
        view = View(self.name, kind, name, self.node.axes, places, sympy.S.Zero, self.node.origins)
        return [frame.renamed(total), view]


def total_of(found: Definitions, node: Reduction, types: dict[str, TensorType]) -> Total | None:
    """A sum over a part of the batch of elements that products' results make; None where a node is none."""
    if node.monoid is not SUM or len(node.axes) < 2:
        return None
    (value,) = node.values
    inside = value
    while isinstance(inside, Cast):
        inside = inside.value
    if not isinstance(inside, Load) or any(is_value(i) or not i.is_Symbol for i in inside.indices):
        return None
    extents = {**dict(zip(node.axes, node.types[0].shape, strict=True)),
               **dict(zip(node.reduce_axes, node.reduce_shape, strict=True))}  # fmt: skip
    *lead, first, second = inside.indices
    if (first, second) != node.axes[-2:] or {*inside.indices} != extents.keys():
        return None
    digits, batch = _digits(lead, extents)
    for row, column in ((second, first), (first, second)):
        space = {ROW: extents[row], COLUMN: extents[column], BATCH: batch}
        here = found.within(space)
        env = {**digits, row: ROW, column: COLUMN}
        moved = here.moved(value, tuple(env), tuple(simplify(e, space, found.views.table) for e in env.values()))
        search = Elements(here, (BATCH,), types)
        try:
            element = search.expanded(moved)
        except NoChainError:
            continue
        if search.scores and search.is_softmax(element):
            kept = tuple(digits[a] for a in node.axes[:-2])
            over = tuple(digits[a] for a in node.reduce_axes)
            order = (ROW, COLUMN) if row == first else (COLUMN, ROW)
            return Total(node, tuple(search.scores.values()), element, space, kept, over, order)
    return None


def _digits(
    lead: Sequence[sympy.Symbol], extents: dict[sympy.Symbol, sympy.Expr]
) -> tuple[dict[sympy.Symbol, sympy.Expr], sympy.Expr]:
    """Leading axes as digits of the batch, and its extent."""
    digits: dict[sympy.Symbol, sympy.Expr] = {}
    step: sympy.Expr = sympy.S.One
    for axis in reversed(lead):
        digits[axis] = ModularIndexing(BATCH, step, extents[axis]) if len(lead) > 1 else BATCH
        step = step * extents[axis]
    return digits, step
