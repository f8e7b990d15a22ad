"""Short rows in order: the place of an element is the number of those that come before it.

That compares all with all, n² steps where a library's sort takes n log n; but a register takes sixteen of them at once,
nothing waits for what was compared before, and no call is made, so rows of a few hundred are done sooner.
"""

from __future__ import annotations

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ANY, MAX, SUM
from ....ir.expr.value import Expr, Select, call, cast, const, symbol
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import LIBRARY_REASONS, NoConversion, converter
from ..terms import axes, index_value, linear_offset
from .scatter import Source, scatter, source_axes

# Elements of the longest row that is compared with itself.
LONGEST = 512
_COUNT, _PLACE = DType.INT32, DType.INT64


def _check(ctx: ImportContext, x: Tensor, length: sympy.Expr) -> None:
    short = (length.is_Integer and length <= LONGEST) or not ctx.calls_libraries(x.device)
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
    not_before = call("logical_not", _before(mine, other, descending))
    counts = Select(call("lt", place, here), not_before, _before(other, mine, descending))
    domain = ReductionSpace(there, x.shape, tuple(over.values()), tuple(row))
    return ctx.reduce(SUM, domain, (cast(counts, _COUNT),), x.device, "rank")[0]


def _before(a: Expr, b: Expr, descending: bool) -> Expr:
    """Whether ``a`` has to stand before ``b``, and not only may."""
    low, high = (b, a) if descending else (a, b)
    less = call("lt", low, high)
    if not a.dtype.is_float:
        return less
    unlike = call("logical_and", call("isnan", high), call("logical_not", call("isnan", low)))
    return call("logical_or", less, unlike)


@converter("aten.sort.default", "aten.sort.stable")
def sort(
    ctx: ImportContext, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor | None, ...]:
    """Stable. Without that eager keeps an order of equals for some types and widths of registers, not for others."""
    length = x.shape[dim % x.rank] if x.rank else sympy.S.One
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
    _check(ctx, x, x.type.numel)
    if x.type.numel == 0:
        raise NoConversion("a median of nothing")
    return ctx.compute(ctx.at(_middle(ctx, x, tuple(range(x.rank)), skip_nan), ()))


def _median_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Tensor, None]:
    """The values alone: of several that are equal a library names one that nobody foretells."""
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
def median_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, None]:
    return _median_along(ctx, x, dim, keepdim, skip_nan=False)


@converter("aten.nanmedian.dim")
def nanmedian_along(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, None]:
    return _median_along(ctx, x, dim, keepdim, skip_nan=True)


@converter("aten.median.default")
def median(ctx: ImportContext, x: Tensor) -> Tensor:
    return _median(ctx, x, skip_nan=False)


@converter("aten.nanmedian.default")
def nanmedian(ctx: ImportContext, x: Tensor) -> Tensor:
    return _median(ctx, x, skip_nan=True)
