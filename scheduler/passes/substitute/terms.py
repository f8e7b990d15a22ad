"""What an operand is a sum, a product or a concatenation of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import sympy

from ....ir.expr.value import Call, Const, Expr, IndexValue, Load, Select, is_value
from ...facts.definitions import unrounded

# Terms of an operand that is a sum, and parts of one that is a concatenation.
MOST_TERMS = 3


def is_linear(value: Expr) -> bool:
    """Whether a value is a sum of a few loads times numbers, one load times another, or one or another by position."""
    return _is_sum(value) or scaled_loads(value) is not None or parts(value) is not None


def _is_sum(value: Expr) -> bool:
    found = list(islice(terms(value), MOST_TERMS + 1))
    return len(found) <= MOST_TERMS and None not in found


def terms(value: Expr, scale: float = 1.0) -> Iterator[tuple[Load, float] | None]:
    """The loads that a value is the sum of, each with the number that multiplies it; None for a term that is none."""
    value = unrounded(value)
    match value:
        case Load() if not any(map(is_value, value.indices)):
            yield value, scale
        case Call("add", (a, b)):
            yield from terms(a, scale)
            yield from terms(b, scale)
        case Call("sub", (a, b)):
            yield from terms(a, scale)
            yield from terms(b, -scale)
        case Call("mul", (a, Const(c, _))) | Call("mul", (Const(c, _), a)):
            yield from terms(a, scale * float(c))
        case Call("neg", (a,)):
            yield from terms(a, -scale)
        case _:
            yield None


def scaled_loads(value: Expr) -> tuple[Load, Load] | None:
    """Two loads that a value is the product of, where one of them has fewer axes: a factor of rows or of columns."""
    match unrounded(value):
        case Call("mul", (a, b)):
            first, second = unrounded(a), unrounded(b)
            if not isinstance(first, Load) or not isinstance(second, Load):
                return None
            if any(map(is_value, (*first.indices, *second.indices))):
                return None
            along, across = _axes(first), _axes(second)
            return (first, second) if along < across or across < along else None
    return None


def _axes(load: Load) -> frozenset[sympy.Symbol]:
    return frozenset(s for i in load.indices for s in i.free_symbols)


def parts(value: Expr) -> tuple[sympy.Symbol, list[tuple[sympy.Expr, Load]]] | None:
    """The axis along which a value is other loads one behind the other, and where each ends but for the last, whose end
    is zero; None where it is no such concatenation."""
    found: list[tuple[sympy.Expr, Load]] = []
    axis: sympy.Symbol | None = None
    value = unrounded(value)
    while len(found) < MOST_TERMS:
        match value:
            case Select(Call("lt", (IndexValue(index, _), Const(end, _)), _), first, rest):
                load = unrounded(first)
                if not isinstance(index, sympy.Symbol) or (axis is not None and index != axis):
                    return None
                if not isinstance(load, Load) or any(map(is_value, load.indices)):
                    return None
                axis = index
                found.append((sympy.Integer(int(end)), load))
                value = unrounded(rest)
            case Load() if axis is not None and not any(map(is_value, value.indices)):
                return axis, [*found, (sympy.S.Zero, value)]
            case _:
                return None
    return None


__all__ = ["MOST_TERMS", "is_linear", "parts", "scaled_loads", "terms"]
