"""Bits of a byte that an expression takes as a number: which they are, and what is added to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Expr, Load, Select

_BYTE = 8
_COMMUTE = ("add", "bit_and")


@dataclass(frozen=True, slots=True)
class Digit:
    """The number that ``bits`` bits of a loaded byte are from bit ``at`` on, with a sign where ``signed``, plus
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
        case Load() if e.dtype in (DType.UINT8, DType.INT8):
            return Digit(e, 0, _BYTE, e.dtype.is_signed)
        case Select():
            branch = here.branch(e)
            return digit_of(branch, here) if branch is not None else None
        case Cast(value) if e.dtype.is_int and value.dtype.is_int:
            return _held(digit_of(value, here), e.dtype)
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
    least = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
    low, high = d.range
    return d if least <= low and high < least + (1 << dtype.bits) else None


def _signed_part(fn: str, e: Expr, down: int, here: Here) -> Digit | None:
    """Bits that are moved to the top of a signed byte, and down again with their sign."""
    match e:
        case Call("shl", (value, by), DType.INT8) if fn == "shr":
            whole, up = digit_of(value, here), here.number(by)
            if whole is None or (whole.at, whole.bits, whole.added) != (0, _BYTE, 0) or up is None:
                return None
            return Digit(whole.load, down - up, _BYTE - down, True) if 0 <= up <= down < _BYTE else None
    return None
