"""Torch's own attention on CPUs, written out where our loops are clearly faster: few queries, causal masks, short
sequences. It is a reduction by the attention monoid, as what plain operations become; but rows that see nothing are
zeros, as torch's kernel has them."""

from __future__ import annotations

import math

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.monoid import ATTENTION, MAX, SUM, lowest
from ....ir.expr.value import Expr, Load, Select, call, const, symbol
from ....scheduler.cost.attention import MASK_NODES, AttentionSize, decide_attention_cpu, library_time, ours_time
from ....scheduler.decisions import Alternative, text_key
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, index_value

LIBRARY = "attention: torch's flash kernel"
_ATEN = torch.ops.aten
_COMPARISONS = {_ATEN.le, _ATEN.lt, _ATEN.ge, _ATEN.gt, _ATEN.eq, _ATEN.ne}


@converter("aten._scaled_dot_product_flash_attention_for_cpu.default")
def flash_attention_for_cpu(
    ctx: ImportContext, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    ours = not ctx.calls_libraries(query.device)
    if ctx.used() - {0} and not ours:
        raise NoConversion(f"{LIBRARY}; its log-sum-exp is read")
    # Graphs that were traced on a CPU are compiled for GPUs too, by explain among others.
    elsewhere = not query.device.startswith("cpu")
    if dropout_p or (not ours and (elsewhere or ctx.numerics == "eager")):
        raise NoConversion(LIBRARY)
    if attn_mask is not None and (is_causal or not attn_mask.dtype.is_float):
        raise NoConversion(f"{LIBRARY}; two masks, or one that is not added")
    width = query.shape[3]
    if not width.is_Integer or _share(query, key) is None or not (value.shape[3] == width or ours):
        raise NoConversion(f"{LIBRARY}; heads of several widths, or numbers of them that are no multiples")
    faster, told = _decision(ctx, query, key, bool(is_causal), attn_mask)
    if not faster and not ours:
        raise NoConversion(f"{LIBRARY}: {told}")
    factor = float(int(width) ** -0.5 if scale is None else scale)
    return _written_out(ctx, query, key, value, factor, is_causal, attn_mask)


def _share(query: Tensor, key: Tensor) -> int | None:
    """How many heads of queries share one of keys; None where that is not known."""
    if query.shape[1] == key.shape[1]:
        return 1
    if not (query.shape[1].is_Integer and key.shape[1].is_Integer) or query.shape[1] % key.shape[1]:
        return None
    return int(query.shape[1] // key.shape[1])


def _decision(ctx: ImportContext, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> tuple[bool, str]:
    hint = ctx.sizes.hint
    batch, heads, queries, width = query.shape
    sizes = (hint(batch * heads), hint(queries), hint(key.shape[2]), hint(width))
    hides = mask is not None and _compares_positions(ctx, mask)
    size = AttentionSize(*sizes, query.dtype.is_half, causal, mask is not None, hides)
    machine = ctx.target_of(query.device).machine
    faster, told = decide_attention_cpu(size, machine)
    if ctx.decider is None:
        return faster, told
    chosen = ctx.decider.decide(
        "attention", text_key((repr(size), *(f"{t.type.dtype.value} {t.type.strides}" for t in (query, key)))),
        (Alternative("loops", ours_time(size)), Alternative("library", library_time(size, machine))),
        "loops" if faster else "library", at=ctx.node.name, reason=told,
        nbytes=2 * (hint(query.type.nbytes) + hint(key.type.nbytes)),
    )  # fmt: skip
    return chosen == "loops", told


def _compares_positions(ctx: ImportContext, mask: Tensor) -> bool:
    """Whether a mask is made of comparisons of what is much smaller, as those of positions are: our loops compute it,
    and leave out what it hides."""
    node, seen = ctx.node.kwargs["attn_mask"], set[fx.Node]()
    compares, todo = False, [node] if isinstance(node, fx.Node) else []
    while todo and len(seen) < MASK_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        compares |= getattr(node.target, "overloadpacket", None) in _COMPARISONS
        value = node.meta.get("val")
        if node.op != "call_function" and not (isinstance(value, torch.Tensor) and _is_small(ctx, value, mask)):
            return False
        todo += node.all_input_nodes
    return compares and not todo


def _is_small(ctx: ImportContext, value: torch.Tensor, mask: Tensor) -> bool:
    """Whether a tensor has few elements beside a mask: as many as its rows and columns, about."""
    hint = ctx.sizes.hint
    return math.prod(hint(ctx.sizes.size(n)) for n in value.shape) <= 2 * sum(map(hint, mask.shape))


def _written_out(
    ctx: ImportContext, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    batch, heads, queries, _ = query.shape
    keys, device, kind = key.shape[2], query.device, query.dtype.compute
    at = b, h, m, n = axes(4)
    r, own = symbol("r0"), _own_head(query, key)
    kept = (batch, heads, queries, value.shape[3])
    scored = _scores(ctx, query, key, scale, causal, mask)
    lifted = (Load(scored.name, (b, h, m, r), kind), const(1.0, kind), ctx.at(value, (b, own, r, n)))
    top, total, weighted = ctx.reduce(ATTENTION, ReductionSpace((), kept, (r,), (keys,)), lifted, device)
    best, share = Load(top.name, at, kind), call("div", Load(weighted.name, at, kind), Load(total.name, at, kind))
    result: Expr = Select(call("isinf", best), const(float("nan"), kind), share)
    # Of no keys too.
    result = Select(call("eq", best, lowest(kind)), const(0.0, kind), result)
    made = ctx.compute(result, ctx.type(0), ctx.name(0))
    return made, _log_of_sums(ctx, scored, keys) if 1 in ctx.used() else None


def _own_head(query: Tensor, key: Tensor) -> sympy.Expr:
    """Which head of keys and values those of queries read, over axis ``i1``."""
    shared, head = _share(query, key), axes(2)[1]
    assert shared is not None
    return head if shared == 1 else FloorDiv(head, sympy.Integer(shared))


def _scores(ctx: ImportContext, query: Tensor, key: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """The scores of all queries and keys, masked ones as low as can be."""
    (batch, heads, queries, width), keys, kind = query.shape, key.shape[2], query.dtype.compute
    at = b, h, m, n = axes(4)
    r, own = symbol("r0"), _own_head(query, key)
    products = call("mul", ctx.at(query, (b, h, m, r)), ctx.at(key, (b, own, n, r)))
    domain = ReductionSpace((), (batch, heads, queries, keys), (r,), (width,))
    (scores,) = ctx.reduce(SUM, domain, (products,), query.device, "scores")
    score: Expr = call("mul", Load(scores.name, at, kind), const(scale, kind))
    if causal:
        score = Select(call("le", index_value(n), index_value(m)), score, lowest(kind))
    if mask is not None:
        # What is hidden is not looked at: tiles of keys that a mask of positions hides need not be read.
        added = ctx.load(mask, at, kind)
        hidden = call("eq", added, lowest(kind))
        score = Select(hidden, lowest(kind), call("add", score, added))
    return ctx.temporary(score, scores.type, "score")


def _log_of_sums(ctx: ImportContext, scored: Tensor, keys: sympy.Expr) -> Tensor:
    """The logarithm of the sum of the exponentials of each query's scores."""
    kind, at, r = scored.dtype, axes(4), symbol("r0")
    domain, element = ReductionSpace((), scored.shape[:3], (r,), (keys,)), ctx.at(scored, (*at[:3], r))
    (top,) = ctx.reduce(MAX, domain, (element,), scored.device, "top")
    highest = ctx.at(top, at[:3])
    shift = ctx.temporary(Select(call("isinf", highest), const(0.0, kind), highest), top.type, "shift")
    (total,) = ctx.reduce(
        SUM, domain, (call("exp", call("sub", element, ctx.at(shift, at[:3]))),), scored.device, "total"
    )
    value = call("add", ctx.at(shift, at[:3]), call("log", ctx.at(total, at[:3])))
    return ctx.compute(value, ctx.type(1), ctx.name(1))


@converter("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def flash_attention_for_cpu_backward(
    ctx: ImportContext, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of queries, keys and values: weights are made again of scores and the logarithms of their sums."""
    if ctx.calls_libraries(query.device) or dropout_p:
        raise NoConversion(LIBRARY)
    width, kind, at = query.shape[3], query.dtype.compute, axes(4)
    if not width.is_Integer or _share(query, key) != 1:
        raise NoConversion(f"{LIBRARY}; heads of several widths or numbers")
    factor = float(int(width) ** -0.5 if scale is None else scale)
    scored = _scores(ctx, query, key, factor, is_causal, attn_mask)
    b, h, m, n = at
    log = ctx.at(logsumexp, (b, h, m), kind)
    weight = Select(call("isinf", log), const(0.0, kind), call("exp", call("sub", ctx.at(scored, at), log)))
    weights = ctx.temporary(weight, scored.type, "weights")
    r, device = symbol("r0"), query.device

    def total(kept: tuple[sympy.Expr, ...], over: sympy.Expr, term: Expr, suffix: str) -> Tensor:
        return ctx.reduce(SUM, ReductionSpace((), kept, (r,), (over,)), (term,), device, suffix)[0]

    rows = query.shape[:3]
    of_weights = total(
        scored.shape, value.shape[3], call("mul", ctx.at(grad, (b, h, m, r)), ctx.at(value, (b, h, n, r))), "slopes"
    )
    mean = total(rows, value.shape[3], call("mul", ctx.at(grad, (b, h, m, r)), ctx.at(out, (b, h, m, r))), "mean")
    slope = call("mul", ctx.at(weights, at), call("sub", ctx.at(of_weights, at), ctx.at(mean, (b, h, m))))
    slopes = ctx.temporary(call("mul", slope, const(factor, kind)), scored.type, "slope")
    terms = (
        (query.shape, key.shape[2], call("mul", ctx.at(slopes, (b, h, m, r)), ctx.at(key, (b, h, r, n)))),
        (key.shape, query.shape[2], call("mul", ctx.at(slopes, (b, h, r, m)), ctx.at(query, (b, h, r, n)))),
        (value.shape, query.shape[2], call("mul", ctx.at(weights, (b, h, r, m)), ctx.at(grad, (b, h, r, n)))),
    )
    made: list[Tensor | None] = []
    for k, (shape, over, term) in enumerate(terms):
        if k not in ctx.used():
            made.append(None)
            continue
        sums = total(shape, over, term, f"sums{k}")
        made.append(ctx.compute(ctx.at(sums, at), ctx.type(k), ctx.name(k)))
    return tuple(made)
