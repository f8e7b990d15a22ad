"""Sums, products, extremes, arguments, logical reductions and moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ALL, ANY, ARGMAX, ARGMIN, MAX, MIN, PRODUCT, SUM, XOR, Monoid
from ....ir.expr.value import Expr, Select, call, const
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, convert, index_value, linear_offset, normalize_dims
from .moments import WHOLE, count_value, divide_by_count, moments

# What a combination of numbers is of bools, which ``dtype=torch.bool`` makes of operands of any type.
_OF_BOOLS = {SUM: ANY, PRODUCT: ALL, MAX: ANY, MIN: ALL}


def reduce_one(
    ctx: ImportContext, monoid: Monoid, x: Tensor, dims: Sequence[int], keepdim: bool, dtype: DType
) -> Tensor:
    """The current node's result: one component, each element in ``dtype``."""
    domain = ctx.domain(x.shape, dims)
    value = ctx.load(x, domain.indices, dtype)
    out = ctx.type()
    if dtype is DType.BOOL:
        monoid = _OF_BOOLS.get(monoid, monoid)
    if not keepdim and dtype is out.dtype:
        return ctx.reduce(monoid, domain, (value,), x.device, types=(out,), names=(ctx.node.name,))[0]
    (result,) = ctx.reduce(monoid, domain, (value,), x.device)
    return ctx.finish(result, dims, x.device, keepdim=keepdim)


@converter("aten.sum.default", "aten.sum.dim_IntList")
def sum_(ctx: ImportContext, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reduce_one(ctx, SUM, x, normalize_dims(dim, x.rank), keepdim, ctx.type().dtype.compute)


@converter("aten.prod.default")
def prod(ctx: ImportContext, x: Tensor, *, dtype: Any = None) -> Tensor:
    return reduce_one(ctx, PRODUCT, x, range(x.rank), False, ctx.type().dtype.compute)


@converter("aten.prod.dim_int")
def prod_dim(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reduce_one(ctx, PRODUCT, x, normalize_dims(dim, x.rank), keepdim, ctx.type().dtype.compute)


def _needs_elements(ctx: ImportContext, x: Tensor, dims: Sequence[int]) -> None:
    """Raises NoConversion where there may be nothing to choose from: an error for which fake tensors do not look."""
    if not all(ctx.least(x.shape[d]) > 0 or ctx.sizes.is_negative(x.shape[d] - 1) is False for d in dims):
        raise NoConversion("the greatest or least of what may have no element, which is an error")


def _register_extreme(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default")
    def extreme(ctx: ImportContext, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = normalize_dims(dim, x.rank)
        if name in ("max", "min"):
            _needs_elements(ctx, x, dims)
        return reduce_one(ctx, monoid, x, dims, keepdim, x.dtype.compute)


for _name, _monoid in (("amax", MAX), ("amin", MIN), ("max", MAX), ("min", MIN)):
    _register_extreme(_name, _monoid)


def _register_logical(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default", f"aten.{name}.dim", f"aten.{name}.dims")
    def logical(ctx: ImportContext, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        # Unlike sums, these take no dimensions for none, and only None for all.
        dims = [] if isinstance(dim, (list, tuple)) and not dim else normalize_dims(dim, x.rank)
        domain = ctx.domain(x.shape, dims)
        (result,) = ctx.reduce(monoid, domain, (convert(ctx.load(x, domain.indices), DType.BOOL),), x.device)
        return ctx.finish(result, dims, x.device, keepdim=keepdim)


_register_logical("any", ANY)
_register_logical("all", ALL)


@converter("aten.hash_tensor.default")
def hash_tensor(ctx: ImportContext, x: Tensor, dim: Any = None, *, keepdim: bool = False, mode: int = 0) -> Tensor:
    """The exclusive or of the bits of all elements, as integers of 64 bits or, of floats, as numbers of float64."""
    dims, out = normalize_dims(dim, x.rank), ctx.type()
    domain = ctx.domain(x.shape, dims)
    if mode != 0 or ctx.least(domain.count) < 1:
        raise NoConversion("a hash of another kind, or of what may have no element, which is an error")
    value = ctx.load(x, domain.indices)
    value = call("bitcast", convert(value, DType.FLOAT64), dtype=DType.INT64) if value.dtype.is_float else value
    (result,) = ctx.reduce(XOR, domain, (convert(value, DType.INT64),), x.device)
    return ctx.finish(
        call("bitcast", ctx.at(result, axes(result.rank)), dtype=out.dtype), dims, x.device, keepdim=keepdim
    )


def with_position(ctx: ImportContext, monoid: Monoid, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Best element over ``dims`` and its row-major position within them."""
    domain = ctx.domain(x.shape, dims)
    place = linear_offset([x.shape[d] for d in dims], [domain.indices[d] for d in dims])
    kind = DType.INT32 if x.dtype is DType.BOOL else x.dtype.compute
    count = sympy.Mul(*(x.shape[d] for d in dims))
    # As wide as a float32, where a position always fits: half the registers.
    position = DType.INT32 if count.is_Integer and int(count) < 1 << 31 else DType.INT64
    values = (ctx.load(x, domain.indices, kind), index_value(place, position))
    value, index = ctx.reduce(monoid, domain, values, x.device)
    return value, index


def _register_argument(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default")
    def argument(ctx: ImportContext, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        dims = normalize_dims(dim, x.rank)
        return ctx.finish(with_position(ctx, monoid, x, dims)[1], dims, x.device, keepdim=keepdim)


_register_argument("argmax", ARGMAX)
_register_argument("argmin", ARGMIN)


def _register_extreme_dim(name: str, simple: Monoid, monoid: Monoid) -> None:
    @converter(f"aten.{name}.dim")
    def extreme_dim(ctx: ImportContext, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        dims = normalize_dims(dim, x.rank)
        _needs_elements(ctx, x, dims)
        if 1 not in ctx.used() and x.dtype is not DType.BOOL:
            domain = ctx.domain(x.shape, dims)
            (value,) = ctx.reduce(simple, domain, (ctx.load(x, domain.indices),), x.device)
            return ctx.finish(value, dims, x.device, keepdim=keepdim, k=0), None
        value, index = with_position(ctx, monoid, x, dims)
        return (
            ctx.finish(value, dims, x.device, keepdim=keepdim, k=0),
            ctx.finish(index, dims, x.device, keepdim=keepdim, k=1),
        )


_register_extreme_dim("max", MAX, ARGMAX)
_register_extreme_dim("min", MIN, ARGMIN)


@converter("aten.linalg_vector_norm.default")
def vector_norm(
    ctx: ImportContext, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """``sum(|x| ** ord) ** (1 / ord)``, and its limits for the orders zero and infinity."""
    dims = normalize_dims(dim, x.rank)
    kind = ctx.type().dtype.compute
    domain = ctx.domain(x.shape, dims)
    value = call("abs", ctx.load(x, domain.indices, kind))
    monoid = {math.inf: MAX, -math.inf: MIN}.get(ord, SUM)
    if ord == 0:
        value = convert(call("ne", value, const(0, kind)), kind)
    elif ord == 2:
        value = call("mul", value, value)
    elif monoid is SUM and ord != 1:
        value = call("pow", value, const(ord, kind))
    (total,) = ctx.reduce(monoid, domain, (value,), x.device)
    result = ctx.at(total, axes(total.rank))
    if ord == 2:
        result = call("sqrt", result)
    elif monoid is SUM and ord not in (0, 1):
        result = call("pow", result, const(1 / ord, kind))
    return ctx.finish(result, dims, x.device, keepdim=keepdim)


# --- moments
# ------------------------------------------------------------------------------------------------------------


@converter("aten.mean.default", "aten.mean.dim")
def mean(ctx: ImportContext, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = normalize_dims(dim, x.rank)
    domain = ctx.domain(x.shape, dims)
    (total,) = ctx.reduce(SUM, domain, (ctx.load(x, domain.indices, ctx.type().dtype.compute),), x.device)
    return ctx.finish(divide_by_count(ctx, total, domain.count), dims, x.device, keepdim=keepdim)


def _variance(ctx: ImportContext, squares: Tensor, count: sympy.Expr, correction: Scalar) -> Expr:
    value = ctx.at(squares, axes(squares.rank))
    zero = const(0, value.dtype)
    if count.is_Integer and not isinstance(correction, sympy.Expr):
        return call("div", value, const(max(float(int(count) - correction), 0.0), value.dtype))
    free = call("sub", count_value(ctx, count, value.dtype), ctx.scalar(correction, value.dtype))
    return call("div", value, call("maximum", free, zero))


def _correction(correction: Scalar | None) -> Scalar:
    return 1 if correction is None else correction


@converter("aten.var.correction")
def var(ctx: ImportContext, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = normalize_dims(dim, x.rank)
    _, squares, domain = moments(ctx, x, dims)
    return ctx.finish(_variance(ctx, squares, domain.count, _correction(correction)), dims, x.device, keepdim=keepdim)


@converter("aten.std.correction")
def std(ctx: ImportContext, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = normalize_dims(dim, x.rank)
    _, squares, domain = moments(ctx, x, dims)
    if ctx.sizes.hint(domain.count) <= WHOLE:
        # The gradient goes by whether a deviation is zero, which that of equal elements is, however their mean is
        # rounded.
        element, at = ctx.load(x, domain.indices), axes(squares.rank)
        (least,), (greatest,) = (ctx.reduce(m, domain, (element,), x.device) for m in (MIN, MAX))
        zero = const(0, squares.dtype)
        equal = call("eq", call("sub", ctx.at(greatest, at), ctx.at(least, at)), zero)
        squares = ctx.temporary(Select(equal, zero, ctx.at(squares, at)), squares.type, "distances")
    value = _variance(ctx, squares, domain.count, _correction(correction))
    return ctx.finish(call("sqrt", value), dims, x.device, keepdim=keepdim)


@converter("aten.var_mean.correction")
def var_mean(
    ctx: ImportContext, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = normalize_dims(dim, x.rank)
    average, squares, domain = moments(ctx, x, dims)
    value = _variance(ctx, squares, domain.count, _correction(correction))
    return (
        ctx.finish(value, dims, x.device, keepdim=keepdim, k=0),
        ctx.finish(average, dims, x.device, keepdim=keepdim, k=1),
    )
