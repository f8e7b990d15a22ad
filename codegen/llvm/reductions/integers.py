"""Sums of integers that an instruction adds up, beside the accumulators of the sum that they are part of."""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.codes import dot_operands, taken
from ....ir.expr.dots import DOTS
from ....ir.expr.dtypes import DType
from ....ir.expr.value import free_symbols
from ....ir.nest.hints import CASCADE, TENSORIZE
from ....ir.nest.loops import Loop
from ..text.builder import Val
from ..text.context import Context
from .accumulators import Accumulator, Reduced, make_slot, position, read


def with_integers(ctx: Context, reduced: Reduced, acc: Accumulator, inside: tuple[Loop, ...]) -> Accumulator:
    """An accumulator of the loops ``inside`` with sums of integers, where an instruction adds those, and no loop in
    them sums by itself."""
    block = reduced.block
    instruction = DOTS.get(TENSORIZE.of(block))
    parted = any(CASCADE.of(lp) and lp.var in reduced.vars for lp in inside[1:])
    if instruction is None or not instruction.is_whole or parted:
        return replace(acc, whole=())
    depth, lane = reduced.path[-2:]
    binding = tuple(zip(block.axes, block.bindings, strict=True))
    lanes, neighbours = ({a.var for a, e in binding if lp.var in e.free_symbols} for lp in (lane, depth))
    operands = dot_operands(acc.values[0], lanes, neighbours, instruction)
    if isinstance(operands, str):
        return acc  # the tile says so
    _, zero = taken(operands.left, instruction) or (0, 0)
    slots = tuple(make_slot(ctx, acc.size, instruction.total, instruction.lanes) for _ in range(1 + bool(zero)))
    shared = free_symbols(operands.right)
    moved = {s for a, e in binding if a.var in shared for s in e.free_symbols}
    return replace(acc, whole=slots, columns=frozenset(d.var for d in acc.dims if d.var not in moved))


def gathered(ctx: Context, acc: Accumulator, index: str) -> list[Val]:
    """The state of an accumulator, of which integers are a part."""
    state = [read(ctx, slot, index) for slot in acc.slots]
    if not acc.whole:
        return state
    b = ctx.b
    total = read(ctx, acc.whole[0], index)
    if len(acc.whole) > 1:
        total = b.binary("sub", total, read(ctx, acc.whole[1], corrected_at(ctx, acc)))
    if state[0].dtype is not DType.INT32:
        total = b.convert("sitofp", total, state[0].dtype)
    return [total]


def corrected_at(ctx: Context, acc: Accumulator) -> str:
    """Where the sum of the operand is that columns share: in the place of the first of them."""
    kept = {var: ctx.indices.get(var) for var in acc.columns}
    ctx.indices |= {var: Val("0", DType.INT64) for var in kept}
    at = position(ctx, acc)
    for var, value in kept.items():
        if value is None:
            del ctx.indices[var]
        else:
            ctx.indices[var] = value
    return at
