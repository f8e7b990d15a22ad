"""Softmax, its logarithm, and their backward."""

from __future__ import annotations

import sympy

from ....ir.expr.monoid import MAX, SUM
from ....ir.expr.value import Expr, Select, call, const
from ....ir.graph.graph import TensorType
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import converter
from ..terms import axes, normalize_dims


def _row(x: Tensor, dim: int) -> tuple[list[int], list[sympy.Expr]]:
    """The reduced dim, and the indices of a row's value within the full space of ``x``."""
    dims = normalize_dims(dim, x.rank)
    return dims, [i for d, i in enumerate(axes(x.rank)) if d not in dims]


def _shifted(ctx: ImportContext, x: Tensor, dims: list[int]) -> tuple[Tensor, ReductionSpace]:
    """``x`` minus the greatest element of its row, over all of ``x``, in the compute type."""
    domain = ctx.domain(x.shape, dims)
    (top,) = ctx.reduce(MAX, domain, (ctx.load(x, domain.indices),), x.device, "max")
    at = axes(x.rank)
    row = [i for d, i in enumerate(at) if d not in dims]
    value = call("sub", ctx.at(x, at), ctx.at(top, row))
    return ctx.temporary(value, _like(ctx, x), "shifted", x.dtype.compute), domain


def _like(ctx: ImportContext, x: Tensor) -> TensorType:
    # Values in between have the memory order of the result.
    out = ctx.type()
    return TensorType(x.shape, out.strides, x.dtype, x.device)


@converter("aten._softmax.default")
def softmax(ctx: ImportContext, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, row = _row(x, dim)
    shifted, domain = _shifted(ctx, x, dims)
    at = axes(x.rank)
    exp = ctx.temporary(call("exp", ctx.at(shifted, at)), shifted.type, "exp")
    (total,) = ctx.reduce(SUM, domain, (ctx.at(exp, domain.indices),), x.device, "sum")
    return ctx.compute(call("div", ctx.at(exp, at), ctx.at(total, row)))


@converter("aten._log_softmax.default")
def log_softmax(ctx: ImportContext, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    dims, row = _row(x, dim)
    shifted, domain = _shifted(ctx, x, dims)
    exp = call("exp", ctx.at(shifted, domain.indices))
    (total,) = ctx.reduce(SUM, domain, (exp,), x.device, "sum")
    logarithm = ctx.temporary(call("log", ctx.at(total, axes(total.rank))), total.type, "log")
    return ctx.compute(call("sub", ctx.at(shifted, axes(x.rank)), ctx.at(logarithm, row)))


@converter("aten._softmax_backward_data.default")
def softmax_backward(ctx: ImportContext, grad: Tensor, y: Tensor, dim: int, input_dtype: object) -> Tensor:
    dims, row = _row(y, dim)
    domain = ctx.domain(y.shape, dims)
    at = axes(y.rank)
    product = call("mul", ctx.load(grad, domain.indices), ctx.at(y, domain.indices))
    (total,) = ctx.reduce(SUM, domain, (product,), y.device, "sum")
    return ctx.compute(call("mul", ctx.at(y, at), call("sub", ctx.load(grad, at), ctx.at(total, row))))


@converter("aten._log_softmax_backward_data.default")
def log_softmax_backward(ctx: ImportContext, grad: Tensor, y: Tensor, dim: int, input_dtype: object) -> Tensor:
    dims, row = _row(y, dim)
    domain = ctx.domain(y.shape, dims)
    at = axes(y.rank)
    (total,) = ctx.reduce(SUM, domain, (ctx.load(grad, domain.indices),), y.device, "sum")
    share = call("mul", call("exp", ctx.at(y, at)), ctx.at(total, row))
    return ctx.compute(call("sub", ctx.load(grad, at), share))


@converter("aten.logsumexp.default")
def logsumexp(ctx: ImportContext, x: Tensor, dim: object, keepdim: bool = False) -> Tensor:
    dims = normalize_dims(dim, x.rank)  # type: ignore[arg-type]
    domain = ctx.domain(x.shape, dims)
    kind = ctx.type().dtype.compute  # of integers the default type
    value = ctx.load(x, domain.indices, kind)
    (top,) = ctx.reduce(MAX, domain, (value,), x.device, "max")
    # An infinite maximum is not subtracted: inf - inf would be NaN.
    highest = ctx.at(top, axes(top.rank))
    finite = ctx.temporary(_zero_if_infinite(highest), top.type, "shift")
    exp = call("exp", call("sub", value, ctx.at(finite, domain.kept_axes)))
    (total,) = ctx.reduce(SUM, domain, (exp,), x.device, "sum")
    at = axes(total.rank)
    result = call("add", ctx.at(finite, at), call("log", ctx.at(total, at)))
    return ctx.finish(result, dims, x.device, keepdim=keepdim)


def _zero_if_infinite(value: Expr) -> Expr:
    return Select(call("isinf", value), const(0, value.dtype), value)
