"""What data give and must not be: an index out of range (``check_bounds``) reads element zero, a divisor that is zero
(``check_divisor``) divides as it may, and the caller of the kernel is told.

A function keeps the last wrong index for each bound in a slot of its own, which becomes a register, so a check is a
comparison and two selections and never a branch. At its end it writes what it has found where stores tell of theirs
(``scatter.py``): a one, the index, its dimension, and the extent of that; or a two, of a divisor.
"""

from __future__ import annotations

import sympy

from ....ir.errors import IRError
from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Index, is_checked, is_value
from ....ir.nest.loops import LoopNest, Statement, Store, blocks
from ..text.builder import Val, llvm_type
from ..text.context import STATUS, BufferPlace, Context, conjunction
from .access import any_lane
from .index import in_loops, scalar_index

I64, BOOL = DType.INT64, DType.BOOL
# What a function tells of: the first of the words behind its arguments.
_INDEX, _DIVISOR = "1", "2"
# What no index is.
_NONE = Val(str(-(1 << 63)), I64)


def has_checks(nest: LoopNest) -> bool:
    """Whether some index or divisor of the nest is checked where the kernel runs."""
    return any(
        is_checked(value) for block, _ in blocks(nest) for statement in block.body for value in _values(statement)
    )


def _values(statement: Statement) -> list[Expr]:
    """What a statement computes, the indices at which it stores included."""
    if isinstance(statement, Store):
        return [statement.value, *(i for i in statement.indices if is_value(i))]
    return [*statement.values, *(i for t in statement.targets for i in t.indices if is_value(i))]


def checked(ctx: Context, index: Val, low: Val, high: Val, dim: Val) -> Val:
    """The index where ``low <= index < high``, else zero; a wrong one of a live lane is remembered."""
    b = ctx.b
    if index.is_literal and low.is_literal and high.is_literal and not index.lanes:
        if int(low.name) <= int(index.name) < int(high.name):
            return index
    from_low, width = index, high
    if low.name != "0":
        from_low, width = b.binary("sub", index, low), b.binary("sub", high, low)
    inside = b.binary("icmp ult", from_low, width, BOOL)
    _remember(ctx, index, b.binary("xor", inside, b.const(True, BOOL), BOOL), (_INDEX, dim.name, high.name))
    return b.select(inside, index, b.const(0, I64))


def checked_divisor(ctx: Context, divisor: Val) -> Val:
    """The divisor; a zero of a live lane is remembered."""
    b = ctx.b
    if divisor.is_literal and not divisor.lanes and int(divisor.name) != 0:
        return divisor
    zero = b.binary("icmp eq", divisor, b.const(0, divisor.dtype), BOOL)
    _remember(ctx, b.const(0, I64), zero, (_DIVISOR, "0", "0"))
    return divisor


def _remember(ctx: Context, index: Val, wrong: Val, told: tuple[str, str, str]) -> None:
    """Keep what is wrong in a live lane, of those of which the same is ``told``."""
    b = ctx.b
    if ctx.mask is not None:
        live = ctx.mask.live
        if live.lanes and not wrong.lanes:
            live = Val(any_lane(ctx, ctx.mask), BOOL)
        wrong = conjunction(b, wrong, live)
    lanes = wrong.lanes
    kind, index = llvm_type(I64, lanes), b.splat(index, lanes)
    key = (*told, lanes)
    known = ctx.faults.get(key)
    if known is None:
        slot = b.alloca(kind)
        b.entry.append(f"  store {b.splat(_NONE, lanes)}, ptr {slot}, align 64")
        known = ctx.faults[key] = slot
    old, new = b.fresh("old"), b.fresh("wrong")
    lines = (
        f"{old} = load {kind}, ptr {known}, align 64",
        f"{new} = select {wrong}, {index}, {kind} {old}",
        f"store {kind} {new}, ptr {known}, align 64",
    )
    b.note(f"fault {known} {wrong} {index}", lines, (wrong.name, index.name))


def report(ctx: Context) -> None:
    """At the end of a function: tell the faults that it has met."""
    b = ctx.b
    for (what, dim, high, lanes), slot in ctx.faults.items():
        kind = llvm_type(I64, lanes)
        last = b.effect(f"load {kind}, ptr {slot}, align 64")
        if lanes:
            last = b.call("i64", f"llvm.vector.reduce.smax.v{lanes}i64", f"{kind} {last}")
        found = b.binary("icmp ne", Val(last, I64), _NONE, BOOL)
        told, done = b.fresh("told"), b.fresh("done")
        b.line(f"br {found}, label {told}, label {done}")
        b.label(told)
        for k, value in enumerate((what, last, dim, high)):
            at = b.effect(f"getelementptr inbounds i64, ptr {ctx.places[STATUS].pointer}, i64 {k}")
            b.line(f"store i64 {value}, ptr {at}, align 8")
        b.branch(done)
        b.label(done)


def emptiness(ctx: Context, place: BufferPlace, indices: tuple[Index, ...]) -> Val | None:
    """Whether the dimensions that are indexed by data have any element; None where they have for all sizes.

    There is no index at which a tensor without elements could be read instead.
    """
    live: Val | None = None
    for index, extent in zip(indices, place.shape, strict=True):
        if not is_value(index) or _has_elements(ctx, extent):
            continue
        some = ctx.b.binary("icmp sgt", scalar_index(ctx, in_loops(ctx, extent)), ctx.b.const(0, I64), BOOL)
        live = some if live is None else conjunction(ctx.b, live, some)
    return live


def _has_elements(ctx: Context, extent: sympy.Expr) -> bool:
    try:
        return ctx.nest.symbols.bounds(extent)[0] >= 1
    except IRError:
        return False
