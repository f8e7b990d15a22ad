"""Normalisations and their backward, in the forms that need the fewest passes over the data.

``x_hat = (x - mean) * rstd`` is recomputed in the backward from the saved statistics. Sources: Ba et al. 2016 (layer
norm), Wu and He 2018 (group norm), Zhang and Sennrich 2019 (RMS norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, call, const
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import converter
from ..terms import axes
from .moments import count_value, moments, moments_over


def rsqrt_variance(ctx: ImportContext, squares: Tensor, count: sympy.Expr, eps: float) -> Expr:
    value = ctx.at(squares, axes(squares.rank))
    variance = call("div", value, count_value(ctx, count, value.dtype))
    return call("rsqrt", call("add", variance, const(eps, value.dtype)))


def normalized(x: Expr, mean: Expr, rstd: Expr) -> Expr:
    return call("mul", call("sub", x, mean), rstd)


def affine(value: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        value = call("mul", value, weight)
    return value if bias is None else call("add", value, bias)


# --- layer norm
# ---------------------------------------------------------------------------------------------------------


@converter("aten.native_layer_norm.default")
def layer_norm(
    ctx: ImportContext, x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Any, ...]:
    first = x.rank - len(shape)
    dims = list(range(first, x.rank))
    mean, squares, domain = moments(ctx, x, dims)
    rstd = ctx.temporary(rsqrt_variance(ctx, squares, domain.count, eps), squares.type, "rstd")
    at = axes(x.rank)
    value = normalized(ctx.at(x, at), ctx.at(mean, at[:first]), ctx.at(rstd, at[:first]))
    kind = value.dtype
    inner = at[first:]
    scale = None if weight is None else ctx.at(weight, inner, kind)
    shift = None if bias is None else ctx.at(bias, inner, kind)
    out = ctx.compute(affine(value, scale, shift), ctx.type(0), ctx.name(0))
    used = ctx.used()
    statistics = [
        ctx.finish(s, dims, x.device, keepdim=True, k=k) if k in used else None for k, s in ((1, mean), (2, rstd))
    ]
    return (out, *statistics)


@converter("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, shape: Sequence[Any], mean: Tensor, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    first = x.rank - len(shape)
    inner, outer = list(range(first, x.rank)), list(range(first))
    kind = x.dtype.compute

    def hat(at: Sequence[sympy.Expr]) -> Expr:
        return normalized(ctx.at(x, at), ctx.load(mean, at, kind), ctx.load(rstd, at, kind))

    def scaled(at: Sequence[sympy.Expr]) -> Expr:
        g = ctx.load(grad, at, kind)
        return g if weight is None else call("mul", g, ctx.at(weight, at[first:], kind))

    dx = dw = db = None
    if mask[0]:
        domain = ctx.domain(x.shape, inner)
        at = axes(x.rank)
        row = at[:first]
        average, slope = _row_means(ctx, domain, scaled, hat, x.device)
        centred = call("sub", scaled(at), ctx.at(average, row))
        value = call("sub", centred, call("mul", hat(at), ctx.at(slope, row)))
        dx = ctx.compute(call("mul", value, ctx.load(rstd, at, kind)), ctx.type(0), ctx.name(0))
    domain = ctx.domain(x.shape, outer)
    if mask[1] and weight is not None:
        product = call("mul", ctx.load(grad, domain.indices, kind), hat(domain.indices))
        dw = _column(ctx, domain, product, 1)
    if mask[2] and bias is not None:
        db = _column(ctx, domain, ctx.load(grad, domain.indices, kind), 2)
    return dx, dw, db


def _row_means(ctx: ImportContext, domain: ReductionSpace, scaled: Any, hat: Any, device: str) -> tuple[Tensor, Tensor]:
    """Means, over the reduced dims, of the gradient of x_hat and of its product with x_hat."""
    g = scaled(domain.indices)
    (total,) = ctx.reduce(SUM, domain, (g,), device, "grad_sum")
    (product,) = ctx.reduce(SUM, domain, (call("mul", g, hat(domain.indices)),), device, "grad_dot")
    at = domain.kept_axes
    count = count_value(ctx, domain.count, g.dtype)
    return (
        ctx.temporary(call("div", ctx.at(total, at), count), total.type, "grad_mean"),
        ctx.temporary(call("div", ctx.at(product, at), count), product.type, "grad_slope"),
    )


def _column(ctx: ImportContext, domain: ReductionSpace, value: Expr, k: int) -> Tensor:
    out = ctx.type(k)
    if value.dtype is out.dtype:
        return ctx.reduce(SUM, domain, (value,), out.device, types=(out,), names=(ctx.name(k),))[0]
    (total,) = ctx.reduce(SUM, domain, (value,), out.device)
    return ctx.compute(ctx.at(total, axes(total.rank)), out, ctx.name(k))


# --- RMS norm
# -----------------------------------------------------------------------------------------------------------


@converter("aten._fused_rms_norm.default")
def rms_norm(
    ctx: ImportContext, x: Tensor, shape: Sequence[Any], weight: Tensor | None, eps: float | None
) -> tuple[Any, ...]:
    first = x.rank - len(shape)
    dims = list(range(first, x.rank))
    domain = ctx.domain(x.shape, dims)
    value = ctx.load(x, domain.indices)
    (squares,) = ctx.reduce(SUM, domain, (call("mul", value, value),), x.device, "squares")
    least = torch.finfo(x.dtype.torch).eps if eps is None else eps
    rstd = ctx.temporary(rsqrt_variance(ctx, squares, domain.count, least), squares.type, "rstd")
    at = axes(x.rank)
    out = call("mul", ctx.at(x, at), ctx.at(rstd, at[:first]))
    if weight is not None:
        out = call("mul", out, ctx.at(weight, at[first:], out.dtype))
    result = ctx.compute(out, ctx.type(0), ctx.name(0))
    return result, ctx.finish(rstd, dims, x.device, keepdim=True, k=1) if 1 in ctx.used() else None


@converter("aten._fused_rms_norm_backward.default")
def rms_norm_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, shape: Sequence[Any], rstd: Tensor, weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    first = x.rank - len(shape)
    kind = x.dtype.compute

    def hat(at: Sequence[sympy.Expr]) -> Expr:
        return call("mul", ctx.at(x, at), ctx.load(rstd, at, kind))

    def scaled(at: Sequence[sympy.Expr]) -> Expr:
        g = ctx.load(grad, at, kind)
        return g if weight is None else call("mul", g, ctx.at(weight, at[first:], kind))

    dx = dw = None
    if mask[0]:
        domain = ctx.domain(x.shape, range(first, x.rank))
        product = call("mul", scaled(domain.indices), hat(domain.indices))
        (total,) = ctx.reduce(SUM, domain, (product,), x.device, "grad_dot")
        mean = call("div", ctx.at(total, domain.kept_axes), count_value(ctx, domain.count, kind))
        slope = ctx.temporary(mean, total.type, "grad_slope")
        at = axes(x.rank)
        value = call("sub", scaled(at), call("mul", hat(at), ctx.at(slope, at[:first])))
        dx = ctx.compute(call("mul", value, ctx.load(rstd, at, kind)), ctx.type(0), ctx.name(0))
    if mask[1] and weight is not None:
        domain = ctx.domain(x.shape, range(first))
        dw = _column(ctx, domain, call("mul", ctx.load(grad, domain.indices, kind), hat(domain.indices)), 1)
    return dx, dw


# --- group norm
# ---------------------------------------------------------------------------------------------------------


def _regrouped(ctx: ImportContext, x: Sequence[sympy.Expr], groups: int) -> tuple[ReductionSpace, list[sympy.Expr]]:
    """The space (n, group | channel in group, positions…) and where each of its points lies in a tensor of shape
    ``x``."""
    channels = x[1]
    per_group = FloorDiv(channels, groups) if not channels.is_Integer else sympy.Integer(int(channels) // groups)
    shape = (x[0], sympy.Integer(groups), per_group, *x[2:])
    domain = ctx.domain(shape, range(2, len(shape)))
    n, g, c, *rest = domain.indices
    return domain, [n, g * per_group + c, *rest]


@converter("aten.native_group_norm.default")
def group_norm(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hw: Any, groups: int,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    domain, at = _regrouped(ctx, x.shape, groups)
    value = ctx.at(x, at)
    kind = value.dtype
    mean, squares = moments_over(ctx, domain, value, x.device)
    rstd = ctx.temporary(rsqrt_variance(ctx, squares, domain.count, eps), squares.type, "rstd")
    full = axes(x.rank)
    group = (full[0], _group_of(full[1], x.shape[1], groups))
    out = normalized(ctx.at(x, full), ctx.at(mean, group), ctx.at(rstd, group))
    scale = None if weight is None else ctx.at(weight, full[1:2], kind)
    shift = None if bias is None else ctx.at(bias, full[1:2], kind)
    used = ctx.used()
    result = ctx.compute(affine(out, scale, shift), ctx.type(0), ctx.name(0))
    statistics = [
        ctx.compute(ctx.at(s, axes(2)), ctx.type(k), ctx.name(k)) if k in used else None
        for k, s in ((1, mean), (2, rstd))
    ]
    return (result, *statistics)


def _group_of(channel: sympy.Expr, channels: sympy.Expr, groups: int) -> sympy.Expr:
    if groups == 1:
        return sympy.S.Zero
    if channels == groups:
        return channel
    return FloorDiv(channel, FloorDiv(channels, groups))


@converter("aten.native_group_norm_backward.default")
def group_norm_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any,
    hw: Any, groups: int, mask: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    kind = x.dtype.compute

    def group(at: Sequence[sympy.Expr]) -> tuple[sympy.Expr, sympy.Expr]:
        return (at[0], _group_of(at[1], x.shape[1], groups))

    def hat(at: Sequence[sympy.Expr]) -> Expr:
        return normalized(ctx.at(x, at), ctx.at(mean, group(at), kind), ctx.at(rstd, group(at), kind))

    def scaled(value: Expr, channel: sympy.Expr) -> Expr:
        return value if weight is None else call("mul", value, ctx.at(weight, (channel,), kind))

    # Sums for each channel of each sample are what both the means over groups and the sums over samples are made of, so
    # the large tensors are read once for all sums.
    spots = ctx.domain(x.shape, range(2, x.rank))
    flow = ctx.load(grad, spots.indices, kind)
    (dots,) = ctx.reduce(SUM, spots, (call("mul", flow, hat(spots.indices)),), x.device, "grad_dots")
    (sums,) = ctx.reduce(SUM, spots, (flow,), x.device, "grad_sums")
    dx = dw = db = None
    if mask[0]:
        domain, at = _regrouped(ctx, x.shape[:2], groups)
        count = count_value(ctx, spots.count * domain.count, kind)
        means = []
        for part, suffix in ((sums, "grad_mean"), (dots, "grad_slope")):
            (total,) = ctx.reduce(SUM, domain, (scaled(ctx.at(part, at), at[1]),), x.device, f"{suffix}_sum")
            means.append(ctx.temporary(call("div", ctx.at(total, axes(2)), count), total.type, suffix))
        average, slope = means
        full = axes(x.rank)
        centred = call("sub", scaled(ctx.load(grad, full, kind), full[1]), ctx.at(average, group(full)))
        value = call("sub", centred, call("mul", hat(full), ctx.at(slope, group(full))))
        dx = ctx.compute(call("mul", value, ctx.at(rstd, group(full), kind)), ctx.type(0), ctx.name(0))
    columns = ctx.domain(x.shape[:2], [0])
    if mask[1] and weight is not None:
        dw = _column(ctx, columns, ctx.at(dots, columns.indices), 1)
    if mask[2]:
        db = _column(ctx, columns, ctx.at(sums, columns.indices), 2)
    return dx, dw, db
