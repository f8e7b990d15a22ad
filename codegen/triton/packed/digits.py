"""Bits of a byte or of a word that an expression takes as a number: which they are, and what is added to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Expr, Load, Select

# Types whose bits are digits: bytes, and words of four of them.
_HOLDS = (DType.UINT8, DType.INT8, DType.INT32)
_COMMUTE = ("add", "bit_and")


@dataclass(frozen=True, slots=True)
class Digit:
    """The number that ``bits`` bits of a loaded byte or word are from bit ``at`` on, with a sign where ``signed``, plus
    ``added``."""

    load: Load | None  # None where only its bits are spoken of
    at: int
    bits: int
    signed: bool
    added: int = 0

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest value."""
        least = -(1 << (self.bits - 1)) if self.signed else 0
        return least + self.added, least + self.added + (1 << self.bits) - 1


class Here(Protocol):
    """What is known of positions where a number is computed."""

    def branch(self, e: Select) -> Expr | None:
        """The branch that a choice takes; None where that is not known."""

    def number(self, e: Expr) -> int | None:
        """A whole number; None where it is not known."""


def digit_of(e: Expr, here: Here) -> Digit | None:
    """The digit that a whole number is; None where it is none."""
    match e:
        case Load() if e.dtype in _HOLDS:
            return Digit(e, 0, e.dtype.bits, e.dtype.is_signed)
        case Select():
            branch = here.branch(e)
            return digit_of(branch, here) if branch is not None else None
        case Cast(value) if e.dtype.is_int and value.dtype.is_int:
            return _converted(digit_of(value, here), e.dtype)
        case Call(fn, (first, second), dtype) if dtype.is_int:
            number = here.number(second)
            if number is None:
                number = here.number(first) if fn in _COMMUTE else None
                first = second
            if number is None:
                return None
            found = digit_of(first, here)
            return _held(_of(fn, found, number), dtype) if found is not None else _signed_part(fn, first, number, here)
    return None


def span_of(e: Expr, here: Here) -> tuple[int, int] | None:
    """The least and the greatest value that a whole number may be, as far as its form tells; None where it does not."""
    digit = digit_of(e, here)
    if digit is not None:
        return digit.range
    found: tuple[int, int] | None = None
    match e:
        case Cast(value) if value.dtype.is_int:
            found = span_of(value, here)
        case Call("bit_and", (first, second)):
            numbers = [n for n in map(here.number, (first, second)) if n is not None and n >= 0]
            found = (0, min(numbers)) if numbers else None
        case Call("add" | "sub" as fn, (first, second)):
            found = sum_span(fn, span_of(first, here), span_of(second, here))
        case _:
            number = here.number(e)
            found = None if number is None else (number, number)
    return found if found is not None and holds(e.dtype, found) else None


def sum_span(fn: str, a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """Between which numbers a sum or a difference is; None where that is not known of what it is made of."""
    if a is None or b is None:
        return None
    return (a[0] + b[0], a[1] + b[1]) if fn == "add" else (a[0] - b[1], a[1] - b[0])


def _of(fn: str, d: Digit, number: int) -> Digit | None:
    """A function of a digit and a number."""
    if fn in ("add", "sub"):
        return replace(d, added=d.added + (number if fn == "add" else -number))
    if d.added:
        return None
    if fn == "bit_and" and number > 0 and number & (number + 1) == 0:
        kept = number.bit_length()
        return replace(d, bits=kept, signed=False) if kept <= d.bits else d if not d.signed else None
    if fn == "shr" and 0 <= number < d.bits:
        return replace(d, at=d.at + number, bits=d.bits - number)
    return None


def _held(d: Digit | None, dtype: DType) -> Digit | None:
    """A digit that a type of whole numbers holds; None where it would wrap."""
    if d is None:
        return None
    return d if holds(dtype, d.range) else None


def holds(dtype: DType, span: tuple[int, int]) -> bool:
    """Whether a type of whole numbers has all between two."""
    least = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
    return dtype.is_int and least <= span[0] and span[1] < least + (1 << dtype.bits)


def _converted(d: Digit | None, dtype: DType) -> Digit | None:
    """A digit as another type of whole numbers, of which a narrower one takes the lowest bits."""
    if d is not None and d.added == 0 and dtype.bits < d.bits:
        return replace(d, bits=dtype.bits, signed=dtype.is_signed)
    return _held(d, dtype)


def _signed_part(fn: str, e: Expr, down: int, here: Here) -> Digit | None:
    """Bits that are moved to the top of a signed number, and down again with their sign."""
    match e:
        case Call("shl", (value, by), dtype) if fn == "shr" and dtype.is_signed:
            whole, up, size = digit_of(value, here), here.number(by), dtype.bits
            if whole is None or (whole.at, whole.bits, whole.added) != (0, size, 0) or up is None:
                return None
            return Digit(whole.load, down - up, size - down, True) if 0 <= up <= down < size else None
    return None
