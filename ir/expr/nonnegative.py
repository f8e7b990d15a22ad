"""Whole numbers that are never negative, from what makes them."""

from __future__ import annotations

from .value import Call, Cast, Const, Expr, IndexValue, Select, loads


def is_nonnegative(value: Expr) -> bool:
    """Whether a number is at least zero, if it is one; False where that is not known. What a conversion of a floating
    point number out of its type's range gives is left open, as it is in C."""
    match value:
        case Const(number):
            return number >= 0
        case IndexValue(index):
            return bool(index.is_nonnegative)
        case Cast(inner, dtype):
            # A narrower type has fewer bits for a number, and of those the first may be its sign.
            widens = inner.dtype.is_float or dtype.is_float or dtype.bits >= inner.dtype.bits
            return widens and is_nonnegative(inner)
        case Select(_, if_true, if_false):
            return is_nonnegative(if_true) and is_nonnegative(if_false)
        case Call("maximum", (a, b)):
            return is_nonnegative(a) or is_nonnegative(b)
        case Call("minimum", (a, b)):
            return is_nonnegative(a) and is_nonnegative(b)
        case Call("add", (a, b)):
            return _has_room(value) and is_nonnegative(a) and is_nonnegative(b)
        case Call("floor" | "ceil" | "round" | "trunc", (a,)):
            return is_nonnegative(a)
    return value.dtype.is_int and not value.dtype.is_signed


def _has_room(total: Call) -> bool:
    """Whether a sum cannot go beyond the largest number of its type and begin at the least: positions and numbers of
    fewer bits are far from that."""
    return total.dtype.is_float or (
        total.dtype.bits == 64 and all(ld.dtype.is_float or ld.dtype.bits < 64 for ld in loads(total))
    )
