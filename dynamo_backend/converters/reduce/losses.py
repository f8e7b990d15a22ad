"""Negative log-likelihood, forward and backward, by gather instead of scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, Load, Select, call, const
from ..context import ImportContext, Tensor
from ..index.gather import bounded
from ..registry import converter
from ..terms import axes, convert, index_value

_NONE, _MEAN = 0, 1


def _chosen(ctx: ImportContext, target: Tensor, at: Sequence[sympy.Expr], ignore: int) -> tuple[Expr, Expr]:
    """The target class at a position (as an index), and whether it counts."""
    label = ctx.at(target, at)
    return label, call("ne", label, const(ignore, label.dtype))


def _weight_of(ctx: ImportContext, weight: Tensor | None, label: Expr, like: Expr) -> Expr:
    return const(1, like.dtype) if weight is None else convert(Load(weight.name, (label,), weight.dtype), like.dtype)


@converter("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(
    ctx: ImportContext, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Any, Any]:
    """Results: the loss, and the sum of the weights that counted."""
    # Classes are dim 1, or the only dim of one unbatched sample.
    batched = x.rank > 1
    positions = target.shape if batched else ()
    domain = ctx.domain(positions, range(len(positions)))

    def at_class(where: Sequence[sympy.Expr]) -> tuple[Expr, Expr, Expr]:
        place = list(where) if batched else []
        label, counts = _chosen(ctx, target, place or [sympy.S.Zero] * target.rank, ignore)
        label = bounded(label, int(batched), x.shape[1] if batched else x.shape[0])
        index = [place[0], label, *place[1:]] if batched else [label]
        picked = call("neg", ctx.at(x, index))
        factor = _weight_of(ctx, weight, label, picked)
        return counts, picked if weight is None else call("mul", picked, factor), factor

    if reduction == _NONE and batched:
        counts, loss, _ = at_class(axes(len(positions)))
        out = ctx.compute(Select(counts, loss, const(0, loss.dtype)), ctx.type(0), ctx.name(0))
        total = ctx.compute(const(0, loss.dtype), ctx.type(1), ctx.name(1)) if 1 in ctx.used() else None
        return out, total
    counts, loss, factor = at_class(domain.indices)
    zero = const(0, loss.dtype)
    (losses,) = ctx.reduce(SUM, domain, (Select(counts, loss, zero),), x.device, "loss_sum")
    (weights,) = ctx.reduce(SUM, domain, (Select(counts, factor, zero),), x.device, "weight_sum")
    value = ctx.at(losses, ())
    if reduction == _MEAN:
        value = call("div", value, ctx.at(weights, ()))
    out = ctx.compute(value, ctx.type(0), ctx.name(0))
    return out, ctx.compute(ctx.at(weights, ()), ctx.type(1), ctx.name(1)) if 1 in ctx.used() else None


@converter("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int,
    total: Tensor,
) -> Tensor:  # fmt: skip
    at = axes(x.rank)
    batched = x.rank > 1
    classes = at[1] if batched else at[0]
    place = [at[0], *at[2:]] if batched else [sympy.S.Zero] * target.rank
    label, counts = _chosen(ctx, target, place, ignore)
    hit = call("logical_and", counts, call("eq", label, index_value(classes, label.dtype)))
    g = ctx.load(grad, place if grad.rank else ())
    value = call("neg", g)
    if weight is not None:
        value = call("mul", value, ctx.at(weight, (classes,), g.dtype))
    if reduction == _MEAN:
        value = call("div", value, ctx.at(total, (), g.dtype))
    return ctx.compute(Select(hit, value, const(0, g.dtype)))
