"""Operands of products of half types two elements at a time: a register holds two, and one instruction computes both.

Bits of a packed weight become a half type without a conversion. They are put where the mantissa of a power of two has
its lowest bits, and the power is subtracted, which is exact. Sums and products of half types that are rounded to the
same type are computed in it: float32 has more than twice its bits, so that rounding twice is rounding once. Where there
are no such instructions, the same functions are plain arithmetic.

Sources: Frantar et al. 2024 (Marlin); Figueroa 1995 on double rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Const, Expr, Load, Select, call, const
from ....ir.target import Target
from ..types import typed_literal
from ..writer import Value
from .assembly import MANTISSA, REGISTER, SHORT, asm_source, bits_of, twice
from .digits import Digit, digit_of, holds, span_of, sum_span
from .plain import plain_arithmetic, plain_digit

if TYPE_CHECKING:
    from ..values import Values

# Half type -> the bits of one.
_ONE = {DType.BFLOAT16: 0x3F80, DType.FLOAT16: 0x3C00}
_DIGIT = re.compile(r"mlc_digit_([us])(\d)_at(\d+)_of(8|16)_(?:(plus|minus)(\d+)|less)_(bfloat16|float16|float32)")
# Tables of three-input logic: (a & b) | c, and (a & b) ^ c.
_AND_OR, _AND_XOR = "0xea", "0x6a"
_PAIR = re.compile(r"mlc_pair_(add|sub|mul)_(bfloat16|float16)")


class Pairs:
    """Conversions to half types in the operands of a product, where the target makes them in registers."""

    def __init__(self, values: Values, word: Callable[[Load], tuple[Value, int] | None], target: Target) -> None:
        self.values = values
        # The words in which the bytes of a load are, and the bit at which each begins.
        self.word = word
        self.enabled = target.unpacks_operands
        # Whether arithmetic takes digits as they become numbers: not two at a time, it is that of float32.
        self.is_wide = not target.has_pairs

    def cast(self, e: Cast, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value | None:
        """The value of a conversion, where pairs of it take fewer instructions; None elsewhere."""
        info = self.values.info
        if not self.enabled or info is None or not info.is_operand or e.dtype not in MANTISSA:
            return None
        return self._digit(e, env, guard) or self._less(e, env, guard) or self._arithmetic(e, env, guard)

    def _is_tile(self, value: Value) -> bool:
        """Whether a value varies along both axes of an operand."""
        info = self.values.info
        return info is not None and len(value.dims) > 1 and info.reduced_tile <= value.dims

    # --- bits of a weight ---------------------------------------------------------------------------------------------

    def _digit(self, e: Cast, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value | None:
        found = self._tile_of(self._whole(e.value), e.dtype, env, guard)
        if found is None:
            return None
        return self._named_digit(*found, e.dtype)

    def _named_digit(self, name: str, tile: Value, d: Digit, dtype: DType) -> Value:
        name += f"_{'minus' if d.added < 0 else 'plus'}{abs(d.added)}_{dtype.value}"
        return self.values.named(f"{name}({tile.text})", tile.dims, dtype)

    def _less(self, e: Cast, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value | None:
        """A digit less a whole number of each row, as zero points are: both are subtracted at once, the number and the
        power of two that has the digit as its lowest bits."""
        match e.value:
            case Cast(Call("sub", (a, b), whole), DType.FLOAT32) if whole.is_int:
                digit, span = digit_of(a, self), span_of(b, self)
            case _:
                return None
        if digit is None or span is None or digit.bits > MANTISSA[e.dtype]:
            return None
        taken, difference = _taken(digit, e.dtype), sum_span("sub", digit.range, span)
        if difference is None or not _holds_all(difference, whole, e.dtype):
            return None
        if not _fits((taken + span[0], taken + span[1]), e.dtype):
            return None
        found = self._tile_of(digit, e.dtype, env, guard)
        if found is None or found[1].dtype.bits != REGISTER // 2:
            return None
        less = call("sub", const(float(-taken), DType.FLOAT32), Cast(b, DType.FLOAT32))
        number = self.values.value(Cast(less, e.dtype), env, guard)
        name, tile, _ = found
        return self.values.named(
            f"{name}_less_{e.dtype.value}({tile.text}, {number.typed})", tile.dims | number.dims, e.dtype
        )

    def _tile_of(
        self, d: Digit | None, half: DType, env: Mapping[str, Value], guard: tuple[Value, ...]
    ) -> tuple[str, Value, Digit] | None:
        """The beginning of a device function's name, and the tile of bytes or words that it takes, for a digit that is
        exact in a half type; None where there is none."""
        if d is None or d.load is None or not _is_exact(d, half):
            return None
        word = self.word(d.load) if not guard else None
        tile, at = word or (self.values.value(d.load, env, guard), 0)
        if not self._is_tile(tile):
            return None
        if tile.dtype.bits == REGISTER:
            d = replace(d, at=d.at + at)
            tile, at = self._half(tile, d)
        name = f"mlc_digit_{'s' if d.signed else 'u'}{d.bits}_at{at + d.at}_of{tile.dtype.bits}"
        return name, tile, d

    def _half(self, tile: Value, d: Digit) -> tuple[Value, int]:
        """Of words the half in which a digit is, or the bits from it on where it is in both, and what that makes of the
        place at which the digit begins."""
        half = REGISTER // 2
        down = d.at // half * half if d.at % half + d.bits <= half else d.at
        moved = f"({tile.text} >> {down})" if down else tile.text
        return self.values.named(f"{moved}.to(tl.uint16)", tile.dims, DType.UINT16), -down

    def _whole(self, e: Expr) -> Digit | None:
        """The digit that a float32 is, a whole number added to it or not."""
        match e:
            case Cast(value, DType.FLOAT32) if value.dtype.is_int:
                return digit_of(value, self)
            case Cast(Cast(_, half) as value, DType.FLOAT32) if half in MANTISSA:
                d = self._whole(value.value)
                return d if d is not None and _is_exact(d, half) else None
            case Call("sub" | "add" as fn, (value, Const(number)), DType.FLOAT32) if float(number).is_integer():
                d = self._whole(value)
                added = int(number) if fn == "add" else -int(number)
                return None if d is None else replace(d, added=d.added + added)
            case Select():
                branch = self.branch(e)
                return self._whole(branch) if branch is not None else None
        return None

    def branch(self, e: Select) -> Expr | None:
        decided = self.values.decided(e.condition)
        return None if decided is None else e.if_true if decided else e.if_false

    def number(self, e: Expr) -> int | None:
        return self.values.number(e)

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def _arithmetic(self, e: Cast, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value | None:
        match e.value:
            case Call("add" | "sub" | "mul" as fn, (a, b), DType.FLOAT32):
                sides = [self._side(s, e.dtype) for s in (a, b)]
            case Cast(Call("add" | "sub" as fn, (a, b), whole), DType.FLOAT32) if whole.is_int:
                span = sum_span(fn, span_of(a, self), span_of(b, self))
                if span is None or not _holds_all(span, whole, e.dtype):
                    return None
                sides = [self._number(s, e.dtype) for s in (a, b)]
            case _:
                return None
        if any(s is None for s in sides):
            return None
        made = [self._operand(s, env, guard) for s in sides if s is not None]
        dims = made[0].dims | made[1].dims
        if not self._is_tile(Value("", dims, e.dtype)):
            return None
        first, second = (typed_literal(v.text, e.dtype) if v.literal else v.text for v in made)
        return self.values.named(f"mlc_pair_{fn}_{e.dtype.value}({first}, {second})", dims, e.dtype)

    def _operand(self, e: Expr, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        if self.is_wide and isinstance(e, Cast):
            found = self._tile_of(self._whole(e.value), e.dtype, env, guard)
            if found is not None:
                return self._named_digit(*found, DType.FLOAT32)
        return self.values.value(e, env, guard)

    def _number(self, e: Expr, half: DType) -> Expr | None:
        """A whole number as one of a half type; None where that may be another number."""
        span = span_of(e, self)
        return Cast(Cast(e, DType.FLOAT32), half) if span is not None and _fits(span, half) else None

    def _side(self, e: Expr, half: DType) -> Expr | None:
        """The number of a half type that a float32 is; None where it may be another number."""
        match e:
            case Cast(value, DType.FLOAT32) if value.dtype is half:
                return value
            case Const(number) if half.rounded(float(number)) == number:
                return Const(float(number), half)
        d = self._whole(e)
        return Cast(e, half) if d is not None and _is_exact(d, half) else None


def _is_exact(d: Digit, half: DType) -> bool:
    """Whether a half type holds a digit and all that it is made of on the way."""
    most = 2 << MANTISSA[half]
    if not _fits(d.range, half):
        return False
    if d.bits == MANTISSA[half] + 1:
        return d.added == 0 if d.signed else abs(_taken(d, half)) <= most
    return d.bits <= MANTISSA[half] and abs(_taken(d, half)) <= most


def _fits(span: tuple[int, int], half: DType) -> bool:
    """Whether a half type holds all whole numbers between two."""
    most = 2 << MANTISSA[half]
    return -most <= span[0] and span[1] <= most


def _holds_all(span: tuple[int, int], whole: DType, half: DType) -> bool:
    """Whether a type of whole numbers and a half type both hold all whole numbers between two."""
    return holds(whole, span) and _fits(span, half)


def _taken(d: Digit, half: DType) -> int:
    """What is subtracted from the power of two that has a digit as its lowest bits."""
    return (1 << MANTISSA[half]) + (1 << (d.bits - 1) if d.signed else 0) - d.added


def pair_source(name: str, target: Target) -> str | None:
    """The device function of that name for a target, in PTX where it has that; None where it is none of these."""
    if (match := _DIGIT.fullmatch(name)) is not None:
        added = int(match[6] or 0) * (1 if match[5] == "plus" else -1)
        d = Digit(None, int(match[3]), int(match[2]), match[1] == "s", added)
        less = match[5] is None
        if not target.has_ptx:
            return plain_digit(name, d, DType(match[7]), less=less)
        return _digit_source(name, d, int(match[4]), DType(match[7]), less=less)
    if (match := _PAIR.fullmatch(name)) is not None:
        fn, half = match[1], DType(match[2])
        if not target.has_ptx:
            return plain_arithmetic(name, fn, half, target.rounds_to_bfloat16)
        return _pair_source(name, fn, half)
    return None


def _digit_source(name: str, d: Digit, width: int, half: DType, less: bool) -> str:
    """Of elements of ``width`` bits, as many as fill a register at a time; where ``less``, with what is added to the
    power of two given for each of two elements."""
    kind, power = SHORT[half], 1 << MANTISSA[half]
    count = REGISTER // width
    results = range(count // 2)
    given = f"${len(results)}"
    if width == REGISTER // 2:
        lines = [".reg .b32 r0;", f"mov.b32 r0, {given};"]
    else:  # two of four bytes, each in the lower half of two
        lines = [".reg .b32 r0, r1;", f"prmt.b32 r0, {given}, 0, 0x4140;", f"prmt.b32 r1, {given}, 0, 0x4342;"]
    lines += [f"shr.b32 r{k}, r{k}, {d.at};" for k in results if d.at]
    if d.bits > MANTISSA[half]:
        # The highest bit stands where an exponent is odd or even: it makes 256 of 128.
        lines += [".reg .b32 high, power, one, minus, taken;", f"mov.b32 power, {twice(bits_of(power, half))};"]
        lines += [f"mov.b32 one, {twice(_ONE[half])};", f"mov.b32 minus, {twice(bits_of(-1, half))};"]
        lines += [f"mov.b32 taken, {twice(bits_of(-power, half))};"]
        for k in results:
            lines += [f"lop3.b32 high, r{k}, {twice(power)}, power, {_AND_OR};"]
            lines += [f"lop3.b32 r{k}, r{k}, {twice(power - 1)}, power, {_AND_OR};"]
            if d.signed:
                lines += [f"fma.rn.{kind}x2 ${k}, high, minus, r{k};"]
                continue
            lines += [
                f"mov.b32 minus, {twice(bits_of(d.added - power, half))};",
                f"fma.rn.{kind}x2 high, high, one, minus;",
            ]
            lines += [f"fma.rn.{kind}x2 r{k}, r{k}, one, taken;", f"fma.rn.{kind}x2 ${k}, r{k}, one, high;"]
    else:
        mask, flipped = (1 << d.bits) - 1, (1 << (d.bits - 1)) if d.signed else 0
        lines += [".reg .b32 power, taken, one;", f"mov.b32 one, {twice(_ONE[half])};"]
        lines += [f"mov.b32 power, {twice(bits_of(power, half) | flipped)};"]
        taken = "$2" if less else twice(bits_of(-_taken(d, half), half))
        lines += [f"mov.b32 taken, {taken};"]
        for k in results:
            lines += [f"lop3.b32 r{k}, r{k}, {twice(mask)}, power, {_AND_XOR};"]
            lines += [f"fma.rn.{kind}x2 ${k}, r{k}, one, taken;"]
    says = f"Bits {d.at} to {d.at + d.bits - 1} of each element as a number, two at a time."
    given_too = ("a, taken", ["r", "r"]) if less else ("a", ["r"])
    return asm_source(name, given_too[0], lines, ",".join(["=r" for _ in results] + given_too[1]), half, count, says)


def _pair_source(name: str, fn: str, half: DType) -> str:
    kind, one = SHORT[half], twice(_ONE[half])
    lines = [".reg .b32 c;"]
    match fn:
        case "add":
            lines += [f"mov.b32 c, {one};", f"fma.rn.{kind}x2 $0, $1, c, $2;"]
        case "sub":
            lines += [f"mov.b32 c, {twice(bits_of(-1, half))};", f"fma.rn.{kind}x2 $0, $2, c, $1;"]
        case _:  # a zero with the sign that leaves that of the product
            lines += ["mov.b32 c, 0x80008000;", f"fma.rn.{kind}x2 $0, $1, $2, c;"]
    return asm_source(name, "a, b", lines, "=r,r,r", half, 2, f"{fn}, two elements at a time.")
