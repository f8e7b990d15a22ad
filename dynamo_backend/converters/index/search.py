"""Places in sorted rows: a binary search of as many steps as the length of a row has bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Index, call, cast, const
from ....ir.graph.graph import TensorType
from ..context import ImportContext, Scalar, Tensor
from ..math.logical import promoted
from ..registry import NoConversion, converter
from ..terms import axes, index_value, rounded

_PLACE = DType.INT64
Operand: TypeAlias = Tensor | Scalar


def count_before(
    ctx: ImportContext, length: Any, value: Expr, element: Callable[[Expr], Expr], right: bool,
    out: TensorType | None = None, most: int | None = None,
) -> Expr:  # fmt: skip
    """How many elements of a sorted row are less than ``value`` (``right``: not greater), over the axes of ``out``, the
    current node's result if None. NaN is greater than all.

    A row of symbolic length takes the steps of the ``most`` elements that it may have. Raises NoConversion where nobody
    says how many these are.
    """
    most = int(length) if length.is_Integer else most
    if most is None:
        raise NoConversion("search in a row of symbolic length")
    out = ctx.type() if out is None else out
    at = axes(len(out.shape))
    n = index_value(length)
    found: Expr = const(0, _PLACE)
    for k in range(most.bit_length() - 1, -1, -1):
        next_place = call("add", found, const(1 << k, _PLACE))
        exists = call("le", next_place, n)
        # Clamped and not guarded: a guard would have each step computed once more for the elements that pass it.
        seen = element(call("minimum", call("sub", next_place, const(1, _PLACE)), index_value(length - 1)))
        # As torch has it, so that NaN ends last: not "less", but "not greater or equal".
        before = call("logical_not", call("gt" if right else "ge", seen, value))
        further = cast(call("logical_and", exists, before), _PLACE)
        place = call("add", found, call("mul", further, const(1 << k, _PLACE)))
        step = ctx.temporary(place, out, f"place{k}", _PLACE)
        found = ctx.at(step, at)
    return found


def _sought(ctx: ImportContext, x: Operand, rows: Tensor) -> Expr:
    """What is looked for in ``rows``, in the type that torch compares both in."""
    kind = promoted(x, rows)
    value = ctx.value(x, axes(len(ctx.type().shape)), kind.compute)
    # A number, or a tensor of no dimension, is rounded to the half type that rows have.
    return rounded(value, kind) if not isinstance(x, Tensor) or x.dtype is not kind else value


@converter("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    ctx: ImportContext, x: Operand, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    value = _sought(ctx, x, boundaries)

    def element(place: Expr) -> Expr:
        return ctx.at(boundaries, (place,), value.dtype)

    return ctx.compute(count_before(ctx, boundaries.shape[0], value, element, right))


@converter("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    ctx: ImportContext, rows: Tensor, x: Operand, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if sorter is not None and sorter.dtype is not DType.INT64:
        raise NoConversion("places of a type that eager refuses")
    at = axes(len(ctx.type().shape))
    row = at[:-1] if rows.rank > 1 else ()
    value = _sought(ctx, x, rows)

    def element(place: Index) -> Expr:
        if sorter is not None:
            place = cast(ctx.at(sorter, (*row, place)), _PLACE)
        return ctx.at(rows, (*row, place), value.dtype)

    return ctx.compute(count_before(ctx, rows.shape[-1], value, element, right or side == "right"))
