"""Comparisons of indices inside values: what padding, tails and masks ask of a position, as bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Const, Expr, IndexValue, Select, children, is_value, loads
from ....ir.nest.loops import Block, Bound, Store, Update
from ..text.context import Context
from .index import in_loops

_ZERO, _ONE = sympy.S.Zero, sympy.S.One


def affirmed(difference: sympy.Expr) -> Bound:
    """The fact that a difference in loop variables is above zero, in the one form that guards have."""
    return Bound(_ZERO, difference)


def difference(expr: Expr) -> sympy.Expr | None:
    """What is above zero exactly where a comparison of indices holds, in axes; None for any other value."""
    if not isinstance(expr, Call) or len(expr.args) != 2:
        return None
    x, y = (_index(a) for a in expr.args)
    if x is None or y is None:
        return None
    match expr.fn:
        case "lt":
            return y - x
        case "le":
            return y - x + _ONE
        case "gt":
            return x - y
        case "ge":
            return x - y + _ONE
    return None


def _index(expr: Expr) -> sympy.Expr | None:
    match expr:
        case IndexValue(index, dtype) if dtype is DType.INT64:
            return index
        case Const(value, dtype) if dtype is DType.INT64:
            return sympy.Integer(int(value))
    return None


def guards(
    ctx: Context, block: Block, otherwise: bool = False, apart: Callable[[Select], Sequence[Select]] = lambda _: ()
) -> tuple[Bound, ...]:
    """What must hold of the position for the loads in the selects of a block to need no mask, in loop variables.

    With ``otherwise``, what must hold where those conditions do not: joined tensors read something there too.
    ``apart`` gives the choices from one on that are made in another way.
    """
    axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    found: dict[Bound, None] = {}
    left: set[int] = set()
    for select in _selects(block):
        if id(select) not in left:
            left.update(map(id, apart(select)))
        if id(select) in left:
            continue
        for inside in _failing(select) if otherwise else _needed(select):
            value = in_loops(ctx, inside.xreplace(axes))
            if not value.is_Integer:
                found[affirmed(value)] = None
    return tuple(found)


def _needed(select: Select) -> Iterator[sympy.Expr]:
    if _reads(select.if_true):
        yield from _conjuncts(select.condition)
    elif _reads(select.if_false) and (value := difference(select.condition)) is not None:
        yield _ONE - value


def _failing(select: Select) -> Iterator[sympy.Expr]:
    value = difference(select.condition)
    if value is not None and _reads(select.if_true) and _reads(select.if_false):
        yield _ONE - value


def _reads(expr: Expr) -> bool:
    return next(loads(expr), None) is not None


def _conjuncts(expr: Expr) -> Iterator[sympy.Expr]:
    if isinstance(expr, Call) and expr.fn == "logical_and":
        for arg in expr.args:
            yield from _conjuncts(arg)
    elif (value := difference(expr)) is not None:
        yield value


def _selects(block: Block) -> Iterator[Select]:
    """Every select of a block once, gathers' indices included."""
    stack: list[Expr] = []
    for statement in block.body:
        match statement:
            case Store():
                stack += [statement.value, *(i for i in statement.indices if is_value(i))]
            case Update():
                stack += statement.values
    seen: set[int] = set()
    while stack:
        expr = stack.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        if isinstance(expr, Select):
            yield expr
        stack.extend(children(expr))
