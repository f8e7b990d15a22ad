"""Torch's own attention on CPUs, written out where our loops are clearly faster: few queries, causal masks, short
sequences. It is a reduction by the attention monoid, as what plain operations become; but rows that see nothing are
zeros, as torch's kernel has them."""

from __future__ import annotations

import sympy

from ....ir.expr.monoid import ATTENTION, SUM, lowest
from ....ir.expr.value import Expr, Load, Select, call, const
from ....scheduler.cost.attention import AttentionSize, decide_attention_cpu, library_time, ours_time
from ....scheduler.decisions import Alternative, text_key
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, index_value

LIBRARY = "attention: torch's flash kernel"


@converter("aten._scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention_for_cpu(
    ctx: ImportContext, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    if ctx.used() - {0}:
        raise NoConversion(f"{LIBRARY}; its log-sum-exp is read")
    # Graphs that were traced on a CPU are compiled for GPUs too, by explain among others.
    if not query.device.startswith("cpu") or dropout_p or ctx.numerics == "eager":
        raise NoConversion(LIBRARY)
    if attn_mask is not None and (is_causal or not attn_mask.dtype.is_float):
        raise NoConversion(f"{LIBRARY}; two masks, or one that is not added")
    width = query.shape[3]
    if not width.is_Integer or value.shape[3] != width or query.shape[1] != key.shape[1]:
        raise NoConversion(f"{LIBRARY}; heads of several widths or numbers")
    faster, told = _decision(ctx, query, key, bool(is_causal))
    if not faster:
        raise NoConversion(f"{LIBRARY}: {told}")
    factor = float(int(width) ** -0.5 if scale is None else scale)
    return _written_out(ctx, query, key, value, factor, is_causal, attn_mask), None


def _decision(ctx: ImportContext, query: Tensor, key: Tensor, causal: bool) -> tuple[bool, str]:
    hint = ctx.sizes.hint
    batch, heads, queries, width = query.shape
    sizes = (hint(batch * heads), hint(queries), hint(key.shape[2]), hint(width))
    size = AttentionSize(*sizes, query.dtype.is_half, causal)
    faster, told = decide_attention_cpu(size)
    if ctx.decider is None:
        return faster, told
    chosen = ctx.decider.decide(
        "attention", text_key((repr(size), *(f"{t.type.dtype.value} {t.type.strides}" for t in (query, key)))),
        (Alternative("loops", ours_time(size)), Alternative("library", library_time(size))),
        "loops" if faster else "library", at=ctx.node.name, reason=told,
        nbytes=2 * (hint(query.type.nbytes) + hint(key.type.nbytes)),
    )  # fmt: skip
    return chosen == "loops", told


def _written_out(
    ctx: ImportContext, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> Tensor:
    batch, heads, queries, width = query.shape
    keys, device, kind = key.shape[2], query.device, query.dtype.compute
    at = b, h, m, n = axes(4)
    r = sympy.Symbol("r0", integer=True, nonnegative=True)
    grid, kept = (batch, heads, queries, keys), (batch, heads, queries, width)
    products = call("mul", ctx.at(query, (b, h, m, r)), ctx.at(key, (b, h, n, r)))
    (scores,) = ctx.reduce(SUM, ReductionSpace((), grid, (r,), (width,)), (products,), device, "scores")
    score: Expr = call("mul", Load(scores.name, at, kind), const(scale, kind))
    if causal:
        score = Select(call("le", index_value(n), index_value(m)), score, lowest(kind))
    if mask is not None:
        score = call("add", score, ctx.load(mask, at, kind))
    scored = ctx.temporary(score, scores.type, "score")
    lifted = (Load(scored.name, (b, h, m, r), kind), const(1.0, kind), ctx.at(value, (b, h, r, n)))
    top, total, weighted = ctx.reduce(ATTENTION, ReductionSpace((), kept, (r,), (keys,)), lifted, device)
    best, share = Load(top.name, at, kind), call("div", Load(weighted.name, at, kind), Load(total.name, at, kind))
    result: Expr = Select(call("isinf", best), const(float("nan"), kind), share)
    # Of no keys too.
    result = Select(call("eq", best, lowest(kind)), const(0.0, kind), result)
    return ctx.compute(result, ctx.type(0), ctx.name(0))
