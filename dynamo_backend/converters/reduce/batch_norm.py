"""Batch norm and its backward. Source: Ioffe and Szegedy 2015."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, call, const
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..terms import axes
from .moments import count_value, moments
from .norms import affine, normalized, rsqrt_variance


def _blend(ctx: ImportContext, running: Tensor, fresh: Expr, momentum: float, k: int) -> Tensor:
    """``running * (1 - momentum) + fresh * momentum`` as the current node's ``k``-th result."""
    old = call("mul", ctx.at(running, axes(1), fresh.dtype), const(1 - momentum, fresh.dtype))
    new = call("mul", fresh, const(momentum, fresh.dtype))
    return ctx.compute(call("add", new, old), ctx.type(k), ctx.name(k))


def _channel_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _batch_norm_output(
    ctx: ImportContext, x: Tensor, mean: Expr, rstd: Expr, weight: Tensor | None, bias: Tensor | None, k: int | None
) -> Tensor:
    channel = axes(x.rank)[1:2]
    value = normalized(ctx.at(x, axes(x.rank), mean.dtype), mean, rstd)
    scale = None if weight is None else ctx.at(weight, channel, mean.dtype)
    shift = None if bias is None else ctx.at(bias, channel, mean.dtype)
    return ctx.compute(affine(value, scale, shift), ctx.type(k), ctx.name(k))


def _eval_statistics(ctx: ImportContext, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Expr, Expr]:
    channel = axes(x.rank)[1:2]
    kind = x.dtype.compute
    return ctx.at(mean, channel, kind), _rstd_of(ctx.at(var, channel, kind), eps)


def _rstd_of(variance: Expr, eps: float) -> Expr:
    return call("rsqrt", call("add", variance, const(eps, variance.dtype)))


@converter("aten._native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    if ctx.numerics != "eager" and _repeats(ctx, x):
        out = _folded_output(ctx, x, weight, bias, mean, var, eps)
    else:
        average, rstd = _eval_statistics(ctx, x, mean, var, eps)
        out = _batch_norm_output(ctx, x, average, rstd, weight, bias, 0)
    empty = [
        ctx.compute(const(0, ctx.type(k).dtype.compute), ctx.type(k), ctx.name(k)) for k in (1, 2) if k in ctx.used()
    ]
    if empty and len(empty) < 2:
        raise NoConversion("only one of the saved statistics is read")
    return (out, *(empty or (None, None)))


# Places of an image past which what is computed of a channel alone is computed beforehand.
MANY = 64


def _repeats(ctx: ImportContext, x: Tensor) -> bool:
    """Whether a loop of a CPU kernel over channels, innermost in memory, would make what belongs to them at each place
    anew. Where there are convolutions of several channels, that layout may be chosen later."""
    places = ctx.sizes.hint(sympy.Mul(*(x.shape[d] for d in _channel_dims(x))))
    if not x.device.startswith("cpu") or x.rank <= 2 or places < MANY:
        return False
    convolutions = ctx.node.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    return x.type.strides[1] == 1 or any(n.args[8] == 1 for n in convolutions)


def _folded_output(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """``x * scale + shift``, with the two made once a channel."""
    at, kind = axes(1), x.dtype.compute
    channels = ctx.contiguous(mean.shape, kind, x.device)
    scale = _rstd_of(ctx.at(var, at, kind), eps)
    if weight is not None:
        scale = call("mul", scale, ctx.at(weight, at, kind))
    shift = call("neg", call("mul", ctx.at(mean, at, kind), scale))
    if bias is not None:
        shift = call("add", shift, ctx.at(bias, at, kind))
    factor, term = ctx.temporary(scale, channels, "scale"), ctx.temporary(shift, channels, "shift")
    channel = axes(x.rank)[1:2]
    product = call("mul", ctx.at(x, axes(x.rank), kind), ctx.at(factor, channel))
    return ctx.compute(call("add", product, ctx.at(term, channel)), ctx.type(0), ctx.name(0))


@converter("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, training: bool, momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    if not training:
        average, rstd = _eval_statistics(ctx, x, running_mean, running_var, eps)
        out = _batch_norm_output(ctx, x, average, rstd, weight, bias, 0)
        return out, *(_no_statistics(ctx, k) for k in (1, 2)), running_mean, running_var
    return _batch_norm_train(ctx, x, weight, bias, running_mean, running_var, momentum, eps, (3, 4))


def _no_statistics(ctx: ImportContext, k: int) -> Tensor | None:
    """The statistics of a batch that were not taken, since it is normalised by others: on CPUs of no element."""
    if k not in ctx.used():
        return None
    if sympy.S.Zero not in ctx.type(k).shape:
        raise NoConversion("statistics of batch norm in evaluation")
    return ctx.compute(const(0, ctx.type(k).dtype.compute), ctx.type(k), ctx.name(k))


@converter("aten._batch_norm_with_update_functional.default")
def batch_norm_with_update(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    out, mean, rstd, new_mean, new_var = _batch_norm_train(
        ctx, x, weight, bias, running_mean, running_var, momentum, eps, (4, 5)
    )
    reserve = ctx.compute(const(0, DType.INT32), ctx.type(3), ctx.name(3)) if 3 in ctx.used() else None
    return out, mean, rstd, reserve, new_mean, new_var


@converter("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    return _batch_norm_train(ctx, x, weight, bias, None, None, momentum, eps, (3, 4))[:3]


def _batch_norm_train(
    ctx: ImportContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float, running: tuple[int, int],
) -> tuple[Any, ...]:  # fmt: skip
    mean, squares, domain = moments(ctx, x, _channel_dims(x))
    rstd = ctx.temporary(rsqrt_variance(ctx, squares, domain.count, eps), squares.type, "rstd")
    channel = axes(x.rank)[1:2]
    out = _batch_norm_output(ctx, x, ctx.at(mean, channel), ctx.at(rstd, channel), weight, bias, 0)
    used = ctx.used()
    at = axes(1)
    saved = [
        ctx.compute(ctx.at(s, at), ctx.type(k), ctx.name(k)) if k in used else None for k, s in ((1, mean), (2, rstd))
    ]
    new_mean = new_var = None
    if running_mean is not None and running[0] in used:
        new_mean = _blend(ctx, running_mean, ctx.at(mean, at), momentum, running[0])
    if running_var is not None and running[1] in used:
        value = ctx.at(squares, at)
        one = const(1, value.dtype)
        unbiased = call("sub", count_value(ctx, domain.count, value.dtype), one)
        new_var = _blend(ctx, running_var, call("div", value, unbiased), momentum, running[1])
    return (out, *saved, new_mean, new_var)


@converter("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def batch_norm_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, saved_mean: Tensor | None, saved_rstd: Tensor | None, train: bool, eps: float,
    mask: Sequence[bool], *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    if ctx.node.target._opname == "batch_norm_backward":  # type: ignore[union-attr]
        raise NoConversion("batch norm backward of cuDNN, with a reserve of its own")
    kind = x.dtype.compute
    mean, second = (saved_mean, saved_rstd) if train else (running_mean, running_var)
    assert mean is not None and second is not None

    def rstd(at: Sequence[sympy.Expr]) -> Expr:
        value = ctx.at(second, (at[1],), kind)
        return value if train else _rstd_of(value, eps)

    def centred(at: Sequence[sympy.Expr]) -> Expr:
        return call("sub", ctx.at(x, at, kind), ctx.at(mean, (at[1],), kind))

    domain = ctx.domain(x.shape, _channel_dims(x))
    space = domain.indices
    g = ctx.load(grad, space, kind)
    (total,) = ctx.reduce(SUM, domain, (g,), x.device, "grad_sum")
    hat = call("mul", centred(space), rstd(space))
    (dot,) = ctx.reduce(SUM, domain, (call("mul", g, hat),), x.device, "grad_dot")
    dx = dw = db = None
    if mask[0]:
        at = axes(x.rank)
        value = ctx.load(grad, at, kind)
        if train:
            count = count_value(ctx, domain.count, kind)
            average = ctx.temporary(call("div", ctx.at(total, axes(1)), count), total.type, "grad_mean")
            slope = ctx.temporary(call("div", ctx.at(dot, axes(1)), count), dot.type, "grad_slope")
            product = call("mul", call("mul", centred(at), rstd(at)), ctx.at(slope, at[1:2]))
            value = call("sub", call("sub", value, ctx.at(average, at[1:2])), product)
        scale = rstd(at) if weight is None else call("mul", rstd(at), ctx.at(weight, at[1:2], kind))
        dx = ctx.compute(call("mul", value, scale), ctx.type(0), ctx.name(0))
    if mask[1]:
        dw = ctx.compute(ctx.at(dot, axes(1)), ctx.type(1), ctx.name(1)) if ctx.val[1] is not None else None
    if mask[2]:
        db = ctx.compute(ctx.at(total, axes(1)), ctx.type(2), ctx.name(2)) if ctx.val[2] is not None else None
    return dx, dw, db
