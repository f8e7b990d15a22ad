"""Values that are whole numbers of a byte less a constant: what a quantized weight is before its scale."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import sympy

from .dots import DotInstruction
from .dtypes import DType
from .product import factors
from .value import Call, Cast, Const, Expr, IndexValue, Load, Select, free_symbols, rewrite

_RANGES = {
    DType.UINT8: (0, 255), DType.INT8: (-128, 127), DType.INT16: (-(1 << 15), (1 << 15) - 1),
    DType.UINT16: (0, (1 << 16) - 1), DType.INT32: (-(1 << 31), (1 << 31) - 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Codes:
    """``value`` less ``zero``: a byte (uint8 or int8) from ``low`` to ``high``."""

    value: Expr
    zero: int
    low: int
    high: int

    @property
    def most(self) -> int:
        """The largest magnitude of what is meant."""
        return max(abs(self.low - self.zero), abs(self.high - self.zero))


def codes_of(e: Expr) -> Codes | None:
    """A value as a byte less a constant, through conversions that are exact; None where it is nothing of the kind."""
    match e:
        case Load(dtype=DType.UINT8 | DType.INT8):
            return Codes(e, 0, *_RANGES[e.dtype])
        case Cast(value, dtype) if dtype.is_int or (dtype.is_float and not dtype.is_half):
            found = codes_of(value)
            return found if found is not None and _fits(found, dtype) else None
        case Call("sub", (a, Const(number, _)), dtype) if number == int(number):
            found = codes_of(a)
            moved = None if found is None else replace(found, zero=found.zero + int(number))
            return moved if moved is not None and _fits(moved, dtype) else None
        case Call("bit_and" | "shr", _, DType.UINT8) | Select(dtype=DType.UINT8):
            span = _span(e)
            return None if span is None else Codes(e, 0, *span)
    return None


def _fits(codes: Codes, dtype: DType) -> bool:
    """Whether a type has all the numbers that are meant; floats have all that are so small."""
    low, high = _RANGES.get(dtype, (-(1 << 24), 1 << 24))
    return low <= codes.low - codes.zero and codes.high - codes.zero <= high


def _span(e: Expr) -> tuple[int, int] | None:
    """The least and the greatest number that a value of uint8 may be; None where nobody knows."""
    match e:
        case Load(dtype=DType.UINT8):
            return _RANGES[DType.UINT8]
        case Const(number, _):
            return int(number), int(number)
        case Call("bit_and", (a, b), _):
            spans = [s for s in map(_span, (a, b)) if s is not None]
            return (0, min(high for _, high in spans)) if spans else None
        case Call("shr", (a, Const(number, _)), _):
            span = _span(a)
            return None if span is None else (span[0] >> int(number), span[1] >> int(number))
        case Select(_, a, b):
            first, second = _span(a), _span(b)
            return None if first is None or second is None else (
                min(first[0], second[0]), max(first[1], second[1])
            )  # fmt: skip
    return None


@dataclass(frozen=True, slots=True)
class DotOperands:
    """The term of a sum as an instruction takes it: ``left`` varies from lane to lane, and ``right`` does not;
    ``others`` are factors that neighbours along the sum have in common."""

    left: Codes
    right: Expr
    others: tuple[Expr, ...]


def dot_operands(
    value: Expr, lanes: Collection[sympy.Symbol], depth: Collection[sympy.Symbol], instruction: DotInstruction
) -> DotOperands | str:
    """The operands that an instruction has in a term, where ``lanes`` and ``depth`` are the axes that its lanes and
    their neighbours move along; or in a sentence why it has none."""
    parts = factors(value)
    moving = [f for f in parts if not free_symbols(f).isdisjoint(depth)]
    over = [f for f in moving if not free_symbols(f).isdisjoint(lanes)]
    if len(moving) != 2 or len(over) != 1:
        return "a term is no product of one operand that lanes move along and one that they share"
    (left,), (right,) = over, [f for f in moving if f is not over[0]]
    codes = codes_of(left)
    if codes is None:
        return "the operand that lanes move along is no byte less a constant"
    if instruction.is_whole:
        shared = codes_of(right)
        if shared is None or shared.zero or shared.value.dtype is not instruction.right:
            return f"the operand that lanes share is no {instruction.right.value}"
        right = shared.value
        if taken(codes, instruction) is None:
            return f"the operand that lanes move along does not fit {instruction.left.value}"
    return DotOperands(codes, right, tuple(f for f in parts if f is not left and f not in moving))


def taken(codes: Codes, instruction: DotInstruction) -> tuple[int, int] | None:
    """What is added to codes so that they are of an instruction's left type, and then subtracted from them so that they
    mean the same; None where they do not fit."""
    if not instruction.is_whole:
        return 0, codes.zero
    low, high = _RANGES[instruction.left]
    added = 128 if codes.low < low else 0
    zero = codes.zero + added
    if codes.low + added < low or codes.high + added > high or not low <= zero <= high:
        return None
    return added, zero


def chosen(e: Expr, positions: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    """A value at known positions, with choices made that these tell."""

    def leaf(part: Expr) -> Expr | None:
        match part:
            case Select(Call("lt" | "ge" as fn, (IndexValue(index, _), Const(limit, _)), _), a, b):
                here = index.xreplace(dict(positions))
                if here.is_Integer:
                    return rewrite(a if (int(here) < limit) == (fn == "lt") else b, leaf)
        return None

    return rewrite(e, leaf)
