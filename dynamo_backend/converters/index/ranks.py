"""Short rows in order: the place of an element is the number of those that come before it.

That compares all with all, n² steps where a library's sort takes n log n; but a register takes sixteen of them at once,
nothing waits for what was compared before, and no call is made, so rows of a few hundred are done sooner.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ANY, MAX, SUM
from ....ir.expr.value import Expr, Index, Select, call, cast, const, symbol
from ....ir.nest.loops import contiguous_strides
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import LIBRARY_REASONS, NoConversion, converter
from ..terms import axes, index_value, linear_offset
from .scatter import Source, scatter, source_axes
from .sorting import SortedRows, before, first_in_order, in_order

# Elements of the longest row that is compared with itself.
LONGEST = 512
_COUNT, _PLACE = DType.INT32, DType.INT64


def _check(ctx: ImportContext, x: Tensor, length: sympy.Expr) -> None:
    short = length.is_Integer and length <= LONGEST
    if not short or not x.device.startswith("cpu"):
        raise NoConversion(LIBRARY_REASONS[str(ctx.node.target)])


def _rank(ctx: ImportContext, x: Tensor, dims: tuple[int, ...], descending: bool) -> Tensor:
    """For each element how many of those that differ from it in ``dims`` alone come before it: in order, those that are
    equal as they stand. NaN is greater than all numbers.
    """
    at = axes(x.rank)
    wide = [d for d in dims if x.shape[d] is not sympy.S.One]
    over = {d: symbol(f"r{k}") for k, d in enumerate(wide)}
    there = tuple(over.get(d, i) for d, i in enumerate(at))
    kind = DType.INT32 if x.dtype is DType.BOOL else x.dtype.compute
    mine, other = ctx.at(x, at, kind), ctx.at(x, there, kind)
    row = [x.shape[d] for d in wide]
    here, place = (index_value(linear_offset(row, [i[d] for d in wide]), _COUNT) for i in (at, there))
    not_before = call("logical_not", before(mine, other, descending))
    counts = Select(call("lt", place, here), not_before, before(other, mine, descending))
    domain = ReductionSpace(there, x.shape, tuple(over.values()), tuple(row))
    return ctx.reduce(SUM, domain, (cast(counts, _COUNT),), x.device, "rank")[0]


@converter("aten.sort.default", "aten.sort.stable")
def sort(
    ctx: ImportContext, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor | None, ...]:
    """Stable. Without that eager keeps an order of equals for some types and widths of registers, not for others."""
    length = x.shape[dim % x.rank] if x.rank else sympy.S.One
    if not ctx.calls_libraries(x.device) and length != 1:
        return _results(ctx, in_order(ctx, SortedRows.of(ctx, x, dim % x.rank, descending)), dim % x.rank)
    _check(ctx, x, length)
    at, used = axes(x.rank), ctx.used()
    if not stable and 1 in used:
        raise NoConversion(f"{LIBRARY_REASONS[str(ctx.node.target)]}: only eager knows its order of equals")
    if length <= 1:
        first = ctx.compute(ctx.at(x, at, x.dtype), ctx.type(0), ctx.name(0))
        return first, ctx.compute(const(0, _PLACE), ctx.type(1), ctx.name(1))
    dim %= x.rank
    rank, over = _rank(ctx, x, (dim,), descending), source_axes(x.rank)
    places = (*over[:dim], cast(ctx.at(rank, over), _PLACE), *over[dim + 1 :])
    made: list[Tensor | None] = []
    for k, value in enumerate((ctx.at(x, over, x.dtype), index_value(over[dim]))):
        if k not in used:
            made.append(None)
            continue
        with ctx.result_of(k):
            zero = const(0, value.dtype.compute)
            made.append(scatter(ctx, None, zero, Source(x.shape, places, value)))
    return tuple(made)


def _results(ctx: ImportContext, rows: SortedRows, dim: int) -> tuple[Tensor | None, ...]:
    """The current node's values and places, of which those in order have the dimension last."""
    made: list[Tensor | None] = []
    for k, found in enumerate((rows.keys, rows.order)):
        at = axes(found.rank) if found is not None else ()
        there = (*at[:dim], *at[dim + 1 :], at[dim])
        used = k in ctx.used() and found is not None
        made.append(ctx.compute(ctx.at(found, there), ctx.type(k), ctx.name(k)) if used and found else None)
    return tuple(made)


def _one_of_each(
    ctx: ImportContext, x: Tensor, dim: int, place: Callable[[SortedRows], Index], keepdim: bool
) -> tuple[Tensor | None, ...]:
    """The current node's values and places: of each row in order what stands at a ``place``."""
    if x.rank == 0:
        return ctx.compute(ctx.at(x, ()), ctx.type(0), ctx.name(0)), ctx.compute(
            const(0, _PLACE), ctx.type(1), ctx.name(1)
        )
    dim %= x.rank
    rows = in_order(ctx, SortedRows.of(ctx, x, dim, descending=False))
    at, chosen = axes(x.rank - 1), place(rows)
    made: list[Tensor | None] = []
    for k, found in enumerate((rows.keys, rows.order)):
        if k not in ctx.used() or found is None:
            made.append(None)
            continue
        made.append(ctx.finish(ctx.at(found, (*at, chosen)), (dim,), x.device, keepdim=keepdim, k=k))
    return tuple(made)


@converter("aten.topk.default")
def topk(
    ctx: ImportContext, x: Tensor, k: sympy.Expr, dim: int = -1, largest: bool = True, ordered: bool = True
) -> tuple[Tensor | None, ...]:
    """Stable, which eager's need not be."""
    k = sympy.sympify(k)
    if ctx.calls_libraries(x.device) or not k.is_Integer or k == 0 or not x.rank:
        raise NoConversion(LIBRARY_REASONS[str(ctx.node.target)])
    dim %= x.rank
    return _results(ctx, first_in_order(ctx, SortedRows.of(ctx, x, dim, largest), int(k)), dim)


@converter("aten.kthvalue.default")
def kthvalue(
    ctx: ImportContext, x: Tensor, k: sympy.Expr, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor | None, ...]:
    if ctx.calls_libraries(x.device) or 0 in x.shape:
        raise NoConversion(LIBRARY_REASONS[str(ctx.node.target)])
    return _one_of_each(ctx, x, dim, lambda rows: sympy.sympify(k) - 1, keepdim)


def _median_in_order(
    ctx: ImportContext, x: Tensor, dim: int, keepdim: bool, skip_nan: bool
) -> tuple[Tensor | None, ...]:
    """The lower median of each row, and where one is: the first NaN where there are some that are not skipped."""
    return _one_of_each(ctx, x, dim, lambda rows: _middle_place(ctx, rows, skip_nan), keepdim)


def _middle_place(ctx: ImportContext, rows: SortedRows, skip_nan: bool) -> Expr:
    """Where in each row in order its median stands."""
    length, kind = index_value(rows.length), rows.keys.dtype
    middle: Expr = call("truncdiv", call("sub", length, const(1, _PLACE)), const(2, _PLACE))
    if not kind.is_float:
        return middle
    at, r = axes(rows.keys.rank - 1), symbol("r0")
    domain = ReductionSpace((), rows.keys.shape[:-1], (r,), (rows.length,))
    missing = cast(call("isnan", ctx.at(rows.keys, (*at, r))), _PLACE)
    (found,) = ctx.reduce(SUM, domain, (missing,), rows.keys.device, "missing")
    numbers = call("sub", length, ctx.at(found, at))
    if skip_nan:
        left = call("maximum", call("sub", numbers, const(1, _PLACE)), const(0, _PLACE))
        return call("truncdiv", left, const(2, _PLACE))
    return Select(call("eq", numbers, length), middle, numbers)


def _middle(ctx: ImportContext, x: Tensor, dims: tuple[int, ...], skip_nan: bool) -> Tensor:
    """The lower median over ``dims``, a tensor of the other dimensions; NaN where there is one, or, where those are
    skipped, nothing else."""
    count = int(sympy.Mul(*(x.shape[d] for d in dims)))
    kind = x.dtype.compute
    domain = ctx.domain(x.shape, dims)
    element = ctx.at(x, domain.indices, kind)
    if not domain.axes:
        return ctx.reduce(MAX, domain, (element,), x.device, "middle")[0]
    rank = _rank(ctx, x, dims, descending=False)
    middle: Expr = const((count - 1) // 2, _COUNT)
    if kind.is_float:
        missing = call("isnan", element)
        kept = domain.kept_axes
        if skip_nan:
            (found,) = ctx.reduce(SUM, domain, (cast(missing, _COUNT),), x.device, "missing")
            left = call("sub", const(count - 1, _COUNT), ctx.at(found, kept))
            # Where all are NaN, so is the first.
            middle = call("floordiv", call("maximum", left, const(0, _COUNT)), const(2, _COUNT))
        else:
            (found,) = ctx.reduce(ANY, domain, (missing,), x.device, "missing")
            middle = Select(ctx.at(found, kept), const(count - 1, _COUNT), middle)
    (least,) = MAX.identity((kind,))
    chosen = call("eq", ctx.at(rank, domain.indices), middle)
    return ctx.reduce(MAX, domain, (Select(chosen, element, least),), x.device, "middle")[0]


def _median(ctx: ImportContext, x: Tensor, skip_nan: bool) -> Tensor:
    if not ctx.calls_libraries(x.device) and 0 not in x.shape and x.rank:
        return _median_of_all(ctx, x, skip_nan)
    _check(ctx, x, x.type.numel)
    if x.type.numel == 0:
        raise NoConversion("a median of nothing")
    return ctx.compute(ctx.at(_middle(ctx, x, tuple(range(x.rank)), skip_nan), ()))


def _median_of_all(ctx: ImportContext, x: Tensor, skip_nan: bool) -> Tensor:
    """Of a tensor as one row."""
    row = ctx.contiguous((x.type.numel,), x.dtype, x.device)
    steps, (place,) = contiguous_strides(x.shape), axes(1)
    at = [
        ModularIndexing(place, s, n) if k else FloorDiv(place, s)
        for k, (s, n) in enumerate(zip(steps, x.shape, strict=True))
    ]
    flat = ctx.temporary(ctx.at(x, at, x.dtype), row, "row")
    rows = in_order(ctx, SortedRows.of(ctx, flat, 0, descending=False))
    return ctx.compute(ctx.at(rows.keys, (_middle_place(ctx, rows, skip_nan),)))


def _median_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Tensor | None, ...]:
    """The values alone: of several that are equal a library names one that nobody foretells."""
    if not ctx.calls_libraries(x.device) and 0 not in x.shape:
        return _median_in_order(ctx, x, dim, keepdim, skip_nan)
    if 1 in ctx.used():
        raise NoConversion(LIBRARY_REASONS[str(ctx.node.target)])
    dims = (dim % x.rank,) if x.rank else ()
    length = sympy.Mul(*(x.shape[d] for d in dims))
    _check(ctx, x, length)
    if length == 0 or not x.type.numel.is_Integer or x.type.numel == 0:
        raise NoConversion("a median of nothing")
    found = _middle(ctx, x, dims, skip_nan)
    return ctx.finish(found, dims, x.device, keepdim=keepdim, k=0), None


@converter("aten.median.dim")
def median_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor | None, ...]:
    return _median_along(ctx, x, dim, keepdim, skip_nan=False)


@converter("aten.nanmedian.dim")
def nanmedian_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor | None, ...]:
    return _median_along(ctx, x, dim, keepdim, skip_nan=True)


@converter("aten.median.default")
def median(ctx: ImportContext, x: Tensor) -> Tensor:
    return _median(ctx, x, skip_nan=False)


@converter("aten.nanmedian.default")
def nanmedian(ctx: ImportContext, x: Tensor) -> Tensor:
    return _median(ctx, x, skip_nan=True)
