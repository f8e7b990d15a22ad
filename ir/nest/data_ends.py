"""Reductions that data end: behind a number that is read for each result, all that they combine is the identity."""

from __future__ import annotations

import sympy

from ..expr.monoid import Monoid
from ..expr.value import Call, Cast, Const, Expr, IndexValue, Select, conjuncts, free_symbols, loads
from .loops import AxisKind, Block, Update


def data_end(block: Block) -> tuple[sympy.Symbol, Expr] | None:
    """The axis that a block reduces over and the number, which data decide, of those of its points that count: it reads
    nothing of that axis. None where the block is of another form."""
    if block.is_scan or len(block.body) != 1 or not isinstance(block.body[0], Update):
        return None
    update = block.body[0]
    reduced = [a.var for a in block.axes_of(AxisKind.REDUCTION)]
    if len(reduced) != 1 or len(update.values) != 1:
        return None
    end = counted(update.monoid, update.values[0], reduced[0])
    return None if end is None else (reduced[0], end)


def counted(monoid: Monoid, value: Expr, axis: sympy.Symbol) -> Expr | None:
    """The number, which data decide, of the first points of an axis at which ``value`` is more than the identity of the
    monoid. None where it is of another form."""
    (identity,) = monoid.identity((value.dtype,))
    if not isinstance(value, Select) or value.if_false != identity or not isinstance(value.if_false, Const):
        return None
    for part in conjuncts(value.condition):
        if isinstance(part, Call) and part.fn == "lt":
            place, end = part.args
            place = place.value if isinstance(place, Cast) else place
            of_axis = isinstance(place, IndexValue) and place.index == axis
            if of_axis and axis not in free_symbols(end) and next(loads(end), None) is not None:
                return end
    return None
