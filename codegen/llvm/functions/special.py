"""Functions composed of others, for which neither Sleef nor the C library has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val
from . import elementary
from .library import library_call

BOOL = DType.BOOL


def _f(b: Builder, value: float, like: Val) -> Val:
    return b.const(value, like.dtype, like.lanes)


def _poly(b: Builder, x: Val, coefficients: Sequence[float]) -> Val:
    """Horner's rule, highest coefficient first."""
    result = _f(b, coefficients[0], x)
    for c in coefficients[1:]:
        result = b.intrinsic("fmuladd", result, x, _f(b, c, x))
    return result


def sigmoid(b: Builder, x: Val) -> Val:
    """1 / (1 + exp(-x)) of float64."""
    e = library_call(b, "exp", elementary.b_neg(b, x))
    one = _f(b, 1.0, x)
    return b.binary("fdiv", one, b.binary("fadd", one, e))


# Giles 2010, "Approximating the erfinv function": a start that two Newton steps make exact.
_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def erfinv(b: Builder, x: Val) -> Val:
    """Inverse of erf: computed in float64 for either type; infinite at -1 and 1, NaN outside."""
    narrow = x.dtype is DType.FLOAT32
    if narrow:
        x = b.convert("fpext", x, DType.FLOAT64)
    one = _f(b, 1.0, x)
    product = b.binary("fmul", b.binary("fsub", one, x), b.binary("fadd", one, x))
    w = elementary.b_neg(b, library_call(b, "log", product))
    central = _poly(b, b.binary("fsub", w, _f(b, 2.5, x)), _CENTRE)
    outer = _poly(b, b.binary("fsub", b.intrinsic("sqrt", w), _f(b, 3.0, x)), _TAIL)
    y = b.binary("fmul", b.select(b.binary("fcmp olt", w, _f(b, 5.0, x), BOOL), central, outer), x)
    for _ in range(2):
        error = b.binary("fsub", library_call(b, "erf", y), x)
        slope = library_call(b, "exp", elementary.b_neg(b, b.binary("fmul", y, y)))
        step = b.binary("fdiv", error, b.binary("fmul", slope, _f(b, 2 / math.sqrt(math.pi), x)))
        y = b.binary("fsub", y, step)
    edge = b.binary("fcmp oeq", b.intrinsic("fabs", x), one, BOOL)
    y = b.select(edge, b.intrinsic("copysign", _f(b, math.inf, x), x), y)
    return b.convert("fptrunc", y, DType.FLOAT32) if narrow else y


_DIGAMMA = (
    8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3, -4.16666666666666666667e-3,
    3.96825396825396825397e-3, -8.33333333333333333333e-3, 8.33333333333333333333e-2,
)  # fmt: skip


def digamma(b: Builder, x: Val) -> Val:
    """By recurrence to arguments of at least 10, then the asymptotic series; reflection for negative arguments."""
    narrow = x.dtype is DType.FLOAT32
    if narrow:
        x = b.convert("fpext", x, DType.FLOAT64)
    zero, one, ten = _f(b, 0.0, x), _f(b, 1.0, x), _f(b, 10.0, x)
    negative = b.binary("fcmp olt", x, zero, BOOL)
    z = b.select(negative, b.binary("fsub", one, x), x)
    total = zero
    for _ in range(10):
        below = b.binary("fcmp olt", z, ten, BOOL)
        total = b.select(below, b.binary("fsub", total, b.binary("fdiv", one, z)), total)
        z = b.select(below, b.binary("fadd", z, one), z)
    inverse = b.binary("fdiv", one, b.binary("fmul", z, z))
    series = b.binary("fmul", inverse, _poly(b, inverse, _DIGAMMA))
    log = library_call(b, "log", z)
    value = b.binary("fsub", b.binary("fsub", log, b.binary("fdiv", _f(b, 0.5, x), z)), series)
    value = b.binary("fadd", value, total)
    # The tangent of the fraction alone: pi times a large argument would lose it.
    fraction = b.binary("fsub", x, b.intrinsic("trunc", x))
    tangent = library_call(b, "tan", b.binary("fmul", fraction, _f(b, math.pi, x)))
    reflected = b.binary("fsub", value, b.binary("fdiv", _f(b, math.pi, x), tangent))
    whole = b.binary("and", negative, b.binary("fcmp oeq", fraction, zero, BOOL))
    value = b.select(negative, reflected, value)
    value = b.select(whole, _f(b, math.nan, x), value)
    pole = b.intrinsic("copysign", _f(b, math.inf, x), elementary.b_neg(b, x))
    value = b.select(b.binary("fcmp oeq", x, zero, BOOL), pole, value)
    return b.convert("fptrunc", value, DType.FLOAT32) if narrow else value


def int_pow(b: Builder, base: Val, exponent: Val) -> Val:
    """Integer power by squaring, wrapping; a negative exponent leaves 1 and -1 and sends the rest to zero.

    As torch does.
    """
    dtype = base.dtype
    zero, one = b.const(0, dtype, base.lanes), b.const(1, dtype, base.lanes)
    result, square = one, base
    for bit in range(dtype.bits - dtype.is_signed):  # each of them counts: 3 to the 2**32 is not 1
        odd = b.binary("and", b.binary("lshr", exponent, b.const(bit, dtype)), one)
        taken = b.binary("icmp ne", odd, zero, BOOL)
        result = b.select(taken, b.binary("mul", result, square), result)
        square = b.binary("mul", square, square)
    if dtype.is_signed:
        parity = b.binary("icmp ne", b.binary("and", exponent, one), zero, BOOL)
        minus = b.const(-1, dtype, base.lanes)
        of_minus = b.select(parity, minus, one)
        inverse = b.select(b.binary("icmp eq", base, minus, BOOL), of_minus, zero)
        inverse = b.select(b.binary("icmp eq", base, one, BOOL), one, inverse)
        result = b.select(b.binary("icmp slt", exponent, zero, BOOL), inverse, result)
    return result


COMPOSED: dict[str, Callable[[Builder, Val], Val]] = {"sigmoid": sigmoid, "erfinv": erfinv, "digamma": digamma}
