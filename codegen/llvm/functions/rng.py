"""Philox4x32-10 (Salmon et al. 2011), the counter-based generator behind ``rand``, ``randn`` and ``randbits``."""

from __future__ import annotations

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val
from ..text.types import cast
from . import elementary

U32, I64, F32 = DType.UINT32, DType.INT64, DType.FLOAT32
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _words(b: Builder, v: Val) -> tuple[Val, Val]:
    """The low and the high half of an int64."""
    return b.convert("trunc", v, U32), b.convert("trunc", b.binary("lshr", v, b.const(32, I64)), U32)


def _product(b: Builder, x: Val, multiplier: int) -> tuple[Val, Val]:
    return _words(b, b.binary("mul", b.convert("zext", x, I64), b.const(multiplier, I64)))


def philox(b: Builder, seed: Val, offset: Val) -> tuple[Val, Val, Val, Val]:
    """Four words for key ``seed`` and counter ``(offset, 0)``, both int64."""
    seed, offset = cast(b, seed, I64), cast(b, offset, I64)
    # The keys of the rounds are the same in all lanes where the seed is.
    k0, k1 = _words(b, seed)
    c0, c1 = _words(b, offset)
    c2 = c3 = b.const(0, U32, offset.lanes)
    for _ in range(10):
        low0, high0 = _product(b, c0, _MULTIPLIERS[0])
        low1, high1 = _product(b, c2, _MULTIPLIERS[1])
        c0, c1 = b.binary("xor", b.binary("xor", high1, c1), k0), low1
        c2, c3 = b.binary("xor", b.binary("xor", high0, c3), k1), low0
        k0 = b.binary("add", k0, b.const(_WEYL[0], U32))
        k1 = b.binary("add", k1, b.const(_WEYL[1], U32))
    return c0, c1, c2, c3


def _fraction(b: Builder, word: Val, plus: int = 0) -> Val:
    """``(word >> 8) + plus`` in units of 2**-24."""
    top = b.binary("add", b.binary("lshr", word, b.const(8, U32)), b.const(plus, U32))
    return b.binary("fmul", b.convert("sitofp", top, F32), b.const(2.0**-24, F32))


def rand(b: Builder, seed: Val, offset: Val) -> Val:
    """Uniform on [0, 1) in steps of 2**-24."""
    offset = cast(b, offset, I64)
    w0, w1, w2, w3 = philox(b, seed, b.binary("lshr", offset, b.const(2, I64)))
    odd, late = _has_bit(b, offset, 1), _has_bit(b, offset, 2)
    return _fraction(b, b.select(late, b.select(odd, w3, w2), b.select(odd, w1, w0)))


def _has_bit(b: Builder, v: Val, bit: int) -> Val:
    return b.binary("icmp ne", b.binary("and", v, b.const(bit, I64)), b.const(0, I64), DType.BOOL)


def _pair(b: Builder, seed: Val, offset: Val) -> tuple[Val, Val]:
    offset = cast(b, offset, I64)
    w0, w1, w2, w3 = philox(b, seed, b.binary("lshr", offset, b.const(1, I64)))
    late = _has_bit(b, offset, 1)
    return b.select(late, w2, w0), b.select(late, w3, w1)


def randn(b: Builder, seed: Val, offset: Val) -> Val:
    """Standard normal by Box and Muller of two words."""
    w0, w1 = _pair(b, seed, offset)
    logarithm = elementary.log(b, _fraction(b, w0, plus=1))
    radius = b.intrinsic("sqrt", b.binary("fmul", logarithm, b.const(-2.0, F32)))
    return b.binary("fmul", radius, elementary.cos_turns(b, _fraction(b, w1)))


def randbits(b: Builder, seed: Val, offset: Val) -> Val:
    """64 random bits as int64: the first word is the low half."""
    w0, w1 = _pair(b, seed, offset)
    high = b.binary("shl", b.convert("zext", w1, I64), b.const(32, I64))
    return b.binary("or", high, b.convert("zext", w0, I64))
