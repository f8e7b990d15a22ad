"""Prefix scans in lanes: the state up to each lane, by shifts within a register and a state that goes from one register
to the next.

Source: Hillis and Steele 1986, "Data parallel algorithms": log2(lanes) steps, each combining with what stands further
and further to the left.
"""

from __future__ import annotations

from ....ir.nest.loops import Update
from ..text.builder import Val
from ..text.context import Context
from .accumulators import combined, identity, pick_lanes


def prefix(ctx: Context, update: Update, before: list[Val], values: list[Val]) -> tuple[list[Val], list[Val]]:
    """The states up to each lane, and the state after the last one. ``before`` is the state (a scalar a component) that
    the first lane goes on from; ``values`` has a vector a component."""
    lanes = values[0].lanes
    width = ctx.target.lanes(max(v.dtype.itemsize for v in values))
    # The state travels by itself where that costs one operation; else it is read off the result.
    single, rule = len(values) == 1, update.monoid.after
    pieces: list[list[Val]] = []
    for start in range(0, lanes, width):
        count = min(width, lanes - start)
        part = [pick_lanes(ctx, v, start, count) for v in values]
        step = 1
        while step < count:
            part = [ctx.b.splat(v, count) for v in combined(ctx, update, _shifted(ctx, update, part, step), part, rule)]
            step *= 2
        known = [ctx.b.splat(v, count) for v in before]
        whole = [ctx.b.splat(v, count) for v in combined(ctx, update, known, part, rule)]
        before = combined(ctx, update, before, _last(ctx, part), rule) if single else _last(ctx, whole)
        pieces.append(whole)
    while len(pieces) > 1:
        pairs = [_joined(ctx, x, y) for x, y in zip(pieces[::2], pieces[1::2], strict=False)]
        pieces = pairs + ([pieces[-1]] if len(pieces) % 2 else [])
    return pieces[0], before


def _shifted(ctx: Context, update: Update, state: list[Val], step: int) -> list[Val]:
    """Lanes moved up by ``step``, the identity in the lanes that this leaves open."""
    count = state[0].lanes
    picks = ", ".join(f"i32 {k if k < step else count + k - step}" for k in range(count))
    neutral = [ctx.b.splat(v, count) for v in identity(ctx, update)]
    return [
        Val(ctx.b.op(f"shufflevector {n}, {v}, <{count} x i32> <{picks}>"), v.dtype, count)
        for n, v in zip(neutral, state, strict=True)
    ]


def _last(ctx: Context, state: list[Val]) -> list[Val]:
    return [Val(ctx.b.op(f"extractelement {v}, i64 {v.lanes - 1}"), v.dtype, 0) for v in state]


def _joined(ctx: Context, low: list[Val], high: list[Val]) -> list[Val]:
    """The lanes of one state, then those of another of no more lanes."""
    result = []
    for x, y in zip(low, high, strict=True):
        total = x.lanes + y.lanes
        if y.lanes < x.lanes:
            fill = ", ".join(f"i32 {min(k, y.lanes - 1)}" for k in range(x.lanes))
            y = Val(ctx.b.op(f"shufflevector {y}, {y.type} poison, <{x.lanes} x i32> <{fill}>"), y.dtype, x.lanes)
        picks = ", ".join(f"i32 {k}" for k in range(total))
        result.append(Val(ctx.b.op(f"shufflevector {x}, {y}, <{total} x i32> <{picks}>"), x.dtype, total))
    return result
