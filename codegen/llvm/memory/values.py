"""Value expressions as instructions."""

from __future__ import annotations

import operator

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.ops import CHECKS
from ....ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, Var, is_value, walk
from ...kernel import EmitError
from ..functions.functions import apply
from ..text.builder import Val
from ..text.context import Context
from ..text.types import cast
from .access import bound_mask, load
from .bounds import checked, checked_divisor, emptiness
from .guards import affirmed, difference
from .index import in_loops, lane_index
from .joins import joined, run_of

I64, I32 = DType.INT64, DType.INT32
_COMPARISONS = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def evaluate(ctx: Context, expr: Expr) -> Val:
    """The value of an expression at this point; the same object is evaluated once."""
    known = ctx.values.get(id(expr))
    if known is not None:
        return known[1]
    value = _evaluate(ctx, expr)
    # The expression is kept with its value: an id is only unique among living objects.
    ctx.values[id(expr)] = (expr, value)
    return value


def _evaluate(ctx: Context, expr: Expr) -> Val:
    b = ctx.b
    match expr:
        case Load():
            stored = ctx.stored.get((expr.buffer, expr.indices))
            if stored is not None:
                return stored
            indices = index_values(ctx, expr.indices)
            some = emptiness(ctx, ctx.places[expr.buffer], expr.indices)
            if some is None:
                return load(ctx, expr.buffer, expr.indices, indices)
            with ctx.masked(some):
                return load(ctx, expr.buffer, expr.indices, indices)
        case Const():
            return b.const(expr.value, expr.dtype)
        case IndexValue():
            return _index_value(ctx, expr)
        case Cast():
            return cast(b, evaluate(ctx, expr.value), expr.dtype)
        case Call():
            if (position := difference(expr)) is not None:
                return _position(ctx, expr, position)
            args = tuple(evaluate(ctx, a) for a in expr.args)
            if expr.fn == "check_bounds":
                return checked(ctx, *args)
            if expr.fn == "check_divisor":
                return checked_divisor(ctx, *args)
            if expr.fn in _COMPARISONS and all(a.is_literal and a.dtype.is_int and not a.lanes for a in args):
                # The copies of an unrolled loop know which they are.
                return b.const(_COMPARISONS[expr.fn](int(args[0].name), int(args[1].name)), expr.dtype)
            return apply(b, expr.fn, args, expr.dtype)
        case Select():
            return _select(ctx, expr)
        case Var():
            raise EmitError(f"{ctx.nest.name}: the variable {expr.name} is bound nowhere")
    raise EmitError(f"{ctx.nest.name}: no code for {type(expr).__name__}")


def index_values(ctx: Context, indices: tuple[object, ...]) -> list[Val | None]:
    """The values of the indices that are computed from data; None for the others."""
    return [evaluate(ctx, i) if is_value(i) else None for i in indices]  # type: ignore[arg-type]


def _index_value(ctx: Context, expr: IndexValue) -> Val:
    index = in_loops(ctx, expr.index)
    if expr.dtype is I32:
        return lane_index(ctx, index, I32)
    return cast(ctx.b, lane_index(ctx, index), expr.dtype)


def _position(ctx: Context, expr: Call, position: sympy.Expr) -> Val:
    """A comparison of indices: known where the loops around were divided by it, else a mask."""
    above = in_loops(ctx, position)
    if affirmed(above) in ctx.assumed:
        return ctx.b.const(True, expr.dtype)
    if affirmed(in_loops(ctx, 1 - position)) in ctx.assumed:
        return ctx.b.const(False, expr.dtype)
    return bound_mask(ctx, affirmed(above)).live


def _select(ctx: Context, expr: Select) -> Val:
    run = run_of(ctx, expr)
    parts = joined(ctx, run) if run is not None else None
    if run is not None and parts is not None:
        return parts if run.last is None else _chosen(ctx, run.last, parts)
    return _chosen(ctx, expr)


def _chosen(ctx: Context, expr: Select, known: Val | None = None) -> Val:
    """The value of a choice, that of its first branch where it is known already."""
    condition = evaluate(ctx, expr.condition)
    if condition.name == "true":
        return known or evaluate(ctx, expr.if_true)
    if condition.name == "false":
        return evaluate(ctx, expr.if_false)
    chosen = known or _branch(ctx, expr.if_true, condition)
    if _minds(expr.if_false):
        other = _branch(ctx, expr.if_false, apply(ctx.b, "logical_not", (condition,), DType.BOOL))
    else:
        other = evaluate(ctx, expr.if_false)
    return ctx.b.select(condition, chosen, other)


def _minds(expr: Expr) -> bool:
    """Whether it matters of an expression where it is evaluated, and not only where it is chosen."""
    return any(isinstance(e, Load) or (isinstance(e, Call) and e.fn in CHECKS) for e in walk(expr))


def _branch(ctx: Context, expr: Expr, condition: Val) -> Val:
    """A branch's value: its loads and checks see only the lanes that take it."""
    if not _minds(expr):
        return evaluate(ctx, expr)
    with ctx.masked(condition):
        return evaluate(ctx, expr)
