"""Factors of an operand that are the same along the sum: they commute with it, and are applied to the result.

A norm's ``1 / rms`` and a token's weight belong to a row of the left operand, the scale of an output channel to a
column of the right one. Without them an operand is often memory as it is, or whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Call, Cast, Expr, Load, call, cast, free_symbols


@dataclass(frozen=True, slots=True)
class Factored:
    """``rest`` times ``factors``, divided by ``divisors``: none of those mentions the axis of the sum."""

    rest: Expr
    factors: tuple[Expr, ...] = ()
    divisors: tuple[Expr, ...] = ()

    def applied(self, total: Expr) -> Expr:
        """The sum of ``rest`` as that of the whole operand."""
        for factor in self.factors:
            total = call("mul", total, cast(factor, total.dtype))
        for divisor in self.divisors:
            total = call("div", total, cast(divisor, total.dtype))
        return total


def factored(value: Expr, along: sympy.Symbol) -> Factored:
    """An operand of a half type without the factors that are the same along the sum; as it is where it has none.

    Only roundings that a kernel may leave out are seen through, so what is left is rounded no more often than before.
    Of float16 the rest is something that a graph has in float16, or a byte: what a factor would have made smaller could
    be beyond the greatest number.
    """
    if not value.dtype.is_half:
        return Factored(value)
    found = _split(value, along)
    if not (found.factors or found.divisors) or along not in free_symbols(found.rest):
        return Factored(value)
    if value.dtype is DType.FLOAT16 and not _is_held(found.rest, value.dtype):
        return Factored(value)
    rest = _narrowed(found.rest, value.dtype)
    return Factored(rest, found.factors, found.divisors)


def _split(e: Expr, along: sympy.Symbol) -> Factored:
    match e:
        case Cast(value, dtype, when_stored) if when_stored or _is_wider(value.dtype, dtype):
            found = _split(value, along)
            if not (found.factors or found.divisors):
                return Factored(e)
            # What is left was made in the type of the sum, or is what is stored.
            return found
        case Call("mul", (a, b), DType.FLOAT32):
            for kept, moved in ((a, b), (b, a)):
                if along not in free_symbols(moved):
                    found = _split(kept, along)
                    return Factored(found.rest, (moved, *found.factors), found.divisors)
            first, second = _split(a, along), _split(b, along)
            if first.rest is a and second.rest is b:
                return Factored(e)
            rest = call("mul", cast(first.rest, DType.FLOAT32), cast(second.rest, DType.FLOAT32))
            return Factored(rest, first.factors + second.factors, first.divisors + second.divisors)
        case Call("div", (a, b), DType.FLOAT32) if along not in free_symbols(b):
            found = _split(a, along)
            return Factored(found.rest, found.factors, (b, *found.divisors))
    return Factored(e)


def _is_wider(source: DType, dtype: DType) -> bool:
    return source.is_half and dtype is DType.FLOAT32


def _narrowed(e: Expr, half: DType) -> Expr:
    """A value as a half type; nothing happens to one that is made of that type."""
    match e:
        case Cast(value, DType.FLOAT32) if value.dtype is half:
            return value
    return e if e.dtype is half else cast(e, half, when_stored=True)


def _is_held(e: Expr, half: DType) -> bool:
    """Whether a value is no greater than numbers of a half type, as the graph has it."""
    match e:
        case Load(dtype=dtype):
            return dtype is half or dtype.itemsize == 1
        case Cast(value, dtype):
            return dtype is half or _is_held(value, half)
    return False


__all__ = ["Factored", "factored"]
