"""What a factorisation keeps in one matrix, taken apart."""

from __future__ import annotations

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Select, call, cast, const
from ..context import ImportContext, Tensor
from ..index.gather import bounded
from ..registry import NoConversion, converter
from ..terms import axes, index_value

# Rows that are exchanged one after the other, a step of each written out.
MOST_PIVOTS = 32
_PLACE = DType.INT32


@converter("aten.lu_unpack.default")
def lu_unpack(
    ctx: ImportContext, data: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor | None, ...]:
    """The permutation, the lower factor with ones in its diagonal, and the upper one."""
    used = ctx.used()
    made: list[Tensor | None] = [None, None, None]
    for k in sorted(used):
        kind = ctx.type(k)
        at = axes(len(kind.shape))
        if sympy.S.Zero in kind.shape or not (unpack_data if k else unpack_pivots):
            made[k] = ctx.compute(const(0, kind.dtype.compute), kind, ctx.name(k))
            continue
        row, column = (index_value(i) for i in at[-2:])
        if k == 0:
            value: Expr = cast(call("eq", cast(row, _PLACE), _exchanged(ctx, pivots, kind.shape[-1])), DType.FLOAT32)
        else:
            element = ctx.at(data, at, kind.dtype.compute)
            kept = call("gt", row, column) if k == 1 else call("le", row, column)
            value = Select(kept, element, const(0, element.dtype))
            if k == 1:
                value = Select(call("eq", row, column), const(1, element.dtype), value)
        made[k] = ctx.compute(value, kind, ctx.name(k))
    return tuple(made)


def _exchanged(ctx: ImportContext, pivots: Tensor, rows: sympy.Expr) -> Expr:
    """Which row stands at the place of the last axis after all exchanges: followed back from the last one."""
    count = pivots.shape[-1]
    if not count.is_Integer or count > MOST_PIVOTS:
        raise NoConversion("many exchanges of rows, one after the other")
    batch = pivots.shape[:-1]
    kind = ctx.contiguous((*batch, rows), _PLACE, pivots.device)
    lead, place = axes(len(batch)), axes(len(batch) + 1)[-1]
    found: Expr = cast(index_value(place), _PLACE)
    for k in reversed(range(int(count))):
        named = call("sub", ctx.at(pivots, (*lead, sympy.Integer(k)), DType.INT64), const(1, DType.INT64))
        other, here = cast(bounded(named, len(batch), rows), _PLACE), const(k, _PLACE)
        moved = Select(call("eq", found, other), here, found)
        step = ctx.temporary(Select(call("eq", found, here), other, moved), kind, f"exchange{k}")
        found = ctx.at(step, (*lead, place))
    at = axes(len(batch) + 2)
    return ctx.at(step, (*at[:-2], at[-1])) if count else cast(index_value(at[-1]), _PLACE)
