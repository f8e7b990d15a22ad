"""How often a value reads a tensor: a branch is evaluated only where its condition holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, prod

import sympy

from ...ir.expr.index import Extents
from ...ir.expr.value import Call, Const, Expr, IndexValue, Load, Select, children

# Inclusive bounds of axes.
Ranges = Mapping[sympy.Symbol, tuple[float, float]]
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}


def evaluations(values: Iterable[Expr], extents: Extents, hint: Callable[[sympy.Expr], int]) -> dict[str, int]:
    """How many elements of each tensor the values read, over all points of ``extents``, repetitions counted.

    Conditions on one axis against a number or a size narrow its range; any other may hold everywhere. Sizes count by
    their typical values.
    """
    found: dict[str, int] = {}
    for load, points in points_of(values, extents, hint):
        found[load.buffer] = found.get(load.buffer, 0) + points
    return found


def points_of(values: Iterable[Expr], extents: Extents, hint: Callable[[sympy.Expr], int]) -> list[tuple[Load, int]]:
    """The loads of the values, once for each set of conditions around them, with the number of points where those
    hold."""
    sites: set[tuple[Load, tuple[tuple[float, float], ...]]] = set()
    stack: list[tuple[Expr, Ranges]] = [(v, {a: (0, hint(n) - 1) for a, n in extents.items()}) for v in values]
    while stack:
        e, ranges = stack.pop()
        if isinstance(e, Load):
            sites.add((e, tuple(ranges[a] for a in extents)))
        if isinstance(e, Select):
            stack += [
                (e.condition, ranges),
                (e.if_true, _narrowed(e.condition, ranges, True, hint)),
                (e.if_false, _narrowed(e.condition, ranges, False, hint)),
            ]
        else:
            stack += [(c, ranges) for c in children(e)]
    return [(load, prod(max(0, int(high - low) + 1) for low, high in bounds)) for load, bounds in sites]


def _narrowed(condition: Expr, ranges: Ranges, holds: bool, hint: Callable[[sympy.Expr], int]) -> Ranges:
    """The ranges of axes where a condition holds, or does not."""
    if not isinstance(condition, Call):
        return ranges
    match condition.fn, condition.args:
        case "logical_not", (inner,):
            return _narrowed(inner, ranges, not holds, hint)
        case ("logical_and" | "logical_or") as fn, (a, b) if (fn == "logical_and") == holds:
            return _narrowed(b, _narrowed(a, ranges, holds, hint), holds, hint)
        case fn, (a, b) if fn in _MIRRORED and (holds or fn in _OPPOSITE):
            fn = fn if holds else _OPPOSITE[fn]
            sides = _axis_of(a, ranges), _number_of(b, ranges, hint)
            if None in sides:
                fn, sides = _MIRRORED[fn], (_axis_of(b, ranges), _number_of(a, ranges, hint))
            (place, number) = sides
            return ranges if place is None or number is None else _cut(fn, *place, number, ranges)
    return ranges


def _cut(fn: str, axis: sympy.Symbol, shift: float, number: float, ranges: Ranges) -> Ranges:
    """The ranges where ``axis + shift`` compares so with a number."""
    low, high = ranges[axis]
    at = number - shift
    least = {"ge": at, "gt": at + 1, "eq": at}.get(fn, -inf)
    most = {"le": at, "lt": at - 1, "eq": at}.get(fn, inf)
    return {**ranges, axis: (max(low, least), min(high, most))}


def _axis_of(e: Expr, ranges: Ranges) -> tuple[sympy.Symbol, float] | None:
    """The axis of an index that is one axis and a constant."""
    if not isinstance(e, IndexValue):
        return None
    shift, axis = e.index.as_coeff_Add()
    return (axis, float(shift)) if axis in ranges and shift.is_Integer else None


def _number_of(e: Expr, ranges: Ranges, hint: Callable[[sympy.Expr], int]) -> float | None:
    match e:
        case Const(value):
            return float(value)
        case IndexValue(index) if not index.free_symbols & ranges.keys():
            return float(hint(index))
    return None
