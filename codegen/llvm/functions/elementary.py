"""float32 elementary functions written inline: several vectors are in flight, and no register is spilled for a call.

Each is within 2 ulp (tests measure them) and takes every input, denormals, infinities and NaN included. Polynomials
and rationals were fitted here (minimax by iterated weighted least squares); reductions of the argument are Cody and
Waite's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val
from .arithmetic import Arithmetic

F32, I32, BOOL = DType.FLOAT32, DType.INT32, DType.BOOL

_LOG2E = 1.4426950408889634
# ln 2 in two parts; the first has 9 trailing zero bits, so that n * _LN2_HIGH is exact for the exponents that occur.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4
# Adding it rounds a float of moderate size to an integer, which then stands in the low bits of the sum.
_ROUND = 12582912.0
_EXP = (0.5000000100980223, 0.1666651288840114, 0.04166618728356697, 0.008369598410402862, 0.0013951717249579242)
_EXPM1 = (0.5000000065500899, 0.16666538148328644, 0.04166626703775578, 0.008367234247214805, 0.001394757129478636)
_LOG = (
    0.33333310439855784, -0.24999986599867632, 0.2000222661409582, -0.16669250814273712, 0.1421865808729952,
    -0.12384348498787577, 0.11872976340154517, -0.11789807553631951, 0.06915367803958003,
)  # fmt: skip
# erf(x) = x + x P(x^2) below 1; above, log2(erfc(x)) is a polynomial as far as 3.95, where erf is 1 in float32.
_ERF = (
    0.1283791656322872, -0.37612625063591343, 0.11283575323934866, -0.02685335217824958, 0.005187363044029142,
    -0.000800092993159543, 7.820701431197896e-05,
)  # fmt: skip
_LOG2_ERFC = (
    -0.00046247721532361645, -1.6261650060602664, -0.9204569639608045, -0.14891247610942526, 0.031580121522989835,
    -0.004270553191895621, 0.00027065768713518956,
)  # fmt: skip
_EXP2 = (
    1.0000000801396487, 0.693147228160472, 0.24022085275666993, 0.05550292695765645, 0.009677203254676775,
    0.0013411540373610828,
)  # fmt: skip
# erfc(x) = 2**(x P(x)) above zero, fitted up to 4.4, where erfc is 2**-30; it falls beyond.
_ERFC_APPROX = (
    -1.6280632211679806, -0.9170815869697012, -0.15242983545941183, 0.03391034531759009, -0.0052236521853399635,
    0.00048609482097491214, -2.0317906210762774e-05,
)  # fmt: skip
# tanh(x) = x + x^3 P(x^2) below 0.6.
_TANH = (-0.33333299270922817, 0.13331958214696593, -0.053786681354098864, 0.0208053775345593, -0.00590586059090895)


class _F(Arithmetic):
    """Arithmetic on float32 and int32 values of one width."""

    floats, ints = F32, I32

    def fma(self, x: Val, y: Val, z: Val) -> Val:
        return self.b.intrinsic("fma" if "fma" in self.b.features else "fmuladd", x, y, z)

    def at_most(self, x: Val, limit: float) -> Val:
        """min(x, limit), NaN kept: one minps."""
        bound = self.f(limit)
        return self.b.select(self.b.binary("fcmp olt", bound, x, BOOL), bound, x)

    def at_least(self, x: Val, limit: float) -> Val:
        bound = self.f(limit)
        return self.b.select(self.b.binary("fcmp ogt", bound, x, BOOL), bound, x)

    def power(self, n: Val) -> Val:
        """2**n of an int32 in the range of normal exponents."""
        return self.real(self.b.binary("shl", self.b.binary("add", n, self.i(127)), self.i(23)))

    def reduce(self, x: Val, scale: float) -> tuple[Val, Val, Val]:
        """``(n, float(n), r)`` with x == n / scale + r for scale = log2 e."""
        shifted = self.fma(x, self.f(scale), self.f(_ROUND))
        whole = self.sub(shifted, self.f(_ROUND))
        n = self.b.binary("sub", self.bits(shifted), self.bits(self.f(_ROUND)))
        r = self.fma(whole, self.f(-_LN2_LOW), self.fma(whole, self.f(-_LN2_HIGH), x))
        return n, whole, r


def _least(b: Builder, lanes: int) -> float:
    """The power of two that stands for all below it, which are zero as float32.

    Intel's processors take more than a hundred cycles for a result that is rounded to a denormal number or from one to
    zero, and masks are full of minus infinity. So ``_scaled`` makes zero of this power without rounding: a factor is
    zero there (2**-127 as the bits of a normal number), or the instruction sees it from the exponent.
    """
    return -576.0 if _scales(b, lanes) else -254.0


def _scales(b: Builder, lanes: int) -> bool:
    """Whether the machine has an instruction for p * 2**n of that many lanes."""
    whole = lanes >= 4 and lanes.bit_count() == 1
    return whole and "avx512f" in b.features and (lanes >= 16 or "avx512vl" in b.features)


def _scaled(m: _F, p: Val, n: Val, whole: Val) -> Val:
    """p * 2**n, so that overflow and denormal results come out right; ``whole`` is n as a float.

    One instruction, or two multiplications of which at most one rounds.
    """
    if _scales(m.b, p.lanes):
        return m.b.in_registers("scalef", p, whole)
    half = m.b.binary("ashr", n, m.i(1))
    return m.mul(m.mul(p, m.power(half)), m.power(m.b.binary("sub", n, half)))


def _exp_near(m: _F, r: Val) -> Val:
    """exp(r) for an abs(r) of at most half of ln 2."""
    return m.add(m.fma(m.mul(r, r), m.poly(r, _EXP), r), m.f(1.0))


def exp(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    x = m.at_least(m.at_most(x, 89.0), _least(b, x.lanes) / _LOG2E)
    n, whole, r = m.reduce(x, _LOG2E)
    return _scaled(m, _exp_near(m, r), n, whole)


def exp2(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    x = m.at_least(m.at_most(x, 129.0), _least(b, x.lanes))
    shifted = m.add(x, m.f(_ROUND))
    whole = m.sub(shifted, m.f(_ROUND))
    n = b.binary("sub", m.bits(shifted), m.bits(m.f(_ROUND)))
    return _scaled(m, _exp_near(m, m.mul(m.sub(x, whole), m.f(math.log(2)))), n, whole)


def expm1(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    bounded = m.at_least(m.at_most(x, 89.0), -18.0)
    n, _, r = m.reduce(bounded, _LOG2E)
    q = m.fma(m.mul(r, r), m.poly(r, _EXPM1), r)
    # Half of the result, for 2**128 is no float32: (q + 1) s - 1/2 with s = 2**(n - 1).
    s = m.power(b.binary("sub", n, m.i(1)))
    doubled = m.fma(q, s, m.sub(s, m.f(0.5)))
    result = m.add(doubled, doubled)
    # Keeps -0, and denormals from being flushed by the reduction.
    tiny = b.binary("fcmp olt", m.abs(x), m.f(1e-8), BOOL)
    return b.select(tiny, x, result)


def _mantissa(m: _F, x: Val) -> tuple[Val, Val]:
    """``(e, f)`` with x == 2**e (1 + f), 1 + f in [sqrt 1/2, sqrt 2), for x > 0; denormals are scaled first."""
    b = m.b
    small = b.binary("fcmp olt", x, m.f(2.0**-126), BOOL)
    bits = m.bits(b.select(small, m.mul(x, m.f(2.0**23)), x))
    e = b.binary("ashr", b.binary("sub", bits, m.i(0x3F3504F3)), m.i(23))
    one_plus_f = m.real(b.binary("sub", bits, b.binary("shl", e, m.i(23))))
    e = b.binary("add", e, b.select(small, m.i(-23), m.i(0)))
    return e, m.sub(one_plus_f, m.f(1.0))


def _log_of(m: _F, f: Val) -> tuple[Val, Val]:
    """log(1 + f) as a sum of a larger and a smaller part."""
    z = m.mul(f, f)
    tail = m.mul(m.mul(m.poly(f, _LOG), f), z)
    return f, m.fma(m.f(-0.5), z, tail)


def _log_specials(m: _F, x: Val, result: Val, pole: float = 0.0) -> Val:
    """-inf at the pole, NaN below it and for NaN, inf at inf."""
    b = m.b
    infinity = m.f(math.inf)
    result = b.select(b.binary("fcmp oeq", x, infinity, BOOL), infinity, result)
    result = b.select(b.binary("fcmp oeq", x, m.f(pole), BOOL), m.f(-math.inf), result)
    return b.select(b.binary("fcmp uge", x, m.f(pole), BOOL), b.select(_nan(m, x), x, result), m.f(math.nan))


def _nan(m: _F, x: Val) -> Val:
    return m.b.binary("fcmp uno", x, m.f(0.0), BOOL)


def log(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    e, f = _mantissa(m, x)
    n = b.convert("sitofp", e, F32)
    high, low = _log_of(m, f)
    low = m.fma(n, m.f(_LN2_LOW), low)
    return _log_specials(m, x, m.fma(n, m.f(_LN2_HIGH), m.add(high, low)))


def _log_base(b: Builder, x: Val, scale: float, step: float) -> Val:
    """log of another base: ``scale`` log(1 + f) + ``step`` e, each constant in two parts."""
    m = _F(b, x.lanes)
    e, f = _mantissa(m, x)
    n = b.convert("sitofp", e, F32)
    high, low = _log_of(m, f)
    # The head of scale has 12 bits and so has the head of f's product; the rest is small.
    scale_high = math.ldexp(round(math.ldexp(scale, 11)), -11)
    step_high = math.ldexp(round(math.ldexp(step, 13)), -13)
    rest = m.fma(high, m.f(scale - scale_high), m.mul(low, m.f(scale)))
    rest = m.fma(n, m.f(step - step_high), rest)
    result = m.fma(n, m.f(step_high), m.fma(high, m.f(scale_high), rest))
    return _log_specials(m, x, result)


def log2(b: Builder, x: Val) -> Val:
    return _log_base(b, x, _LOG2E, 1.0)


def log10(b: Builder, x: Val) -> Val:
    return _log_base(b, x, 1 / math.log(10), math.log10(2))


def log1p(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    e, _ = _mantissa(m, m.add(x, m.f(1.0)))
    # 2**-e (1 + x) - 1 without the rounding of 1 + x.
    scale = m.power(b.binary("sub", m.i(0), e))
    f = m.fma(x, scale, m.sub(scale, m.f(1.0)))
    n = b.convert("sitofp", e, F32)
    high, low = _log_of(m, f)
    low = m.fma(n, m.f(_LN2_LOW), low)
    result = m.fma(n, m.f(_LN2_HIGH), m.add(high, low))
    # Past 2**60 the scale would leave the range; 1 + x is x there.
    large = b.binary("fcmp ogt", x, m.f(2.0**60), BOOL)
    e2, f2 = _mantissa(m, x)
    n2 = b.convert("sitofp", e2, F32)
    h2, l2 = _log_of(m, f2)
    result = b.select(large, m.fma(n2, m.f(_LN2_HIGH), m.add(h2, m.fma(n2, m.f(_LN2_LOW), l2))), result)
    result = b.select(b.binary("fcmp olt", m.abs(x), m.f(1e-10), BOOL), x, result)
    return _log_specials(m, x, result, -1.0)


def _times_power(m: _F, p: Val, n: Val) -> Val:
    """p * 2**n for a p near 1 and a normal result: an addition to the exponent."""
    return m.real(m.b.binary("add", m.bits(p), m.b.binary("shl", n, m.i(23))))


def erf(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    size = m.abs(x)
    small = m.fma(x, m.poly(m.mul(x, x), _ERF), x)
    t = m.poly(m.at_most(size, 3.95), _LOG2_ERFC)
    shifted = m.add(t, m.f(_ROUND))
    n = b.binary("sub", m.bits(shifted), m.bits(m.f(_ROUND)))
    p = m.poly(m.sub(t, m.sub(shifted, m.f(_ROUND))), _EXP2)
    large = m.sub(m.f(1.0), _times_power(m, p, n))
    # NaN compares false: the polynomial hands it on.
    return b.intrinsic("copysign", b.select(b.binary("fcmp oge", size, m.f(1.0), BOOL), large, small), x)


def tanh(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    size = m.abs(x)
    z = m.mul(x, x)
    small = m.fma(m.mul(x, z), m.poly(z, _TANH), x)
    bounded = m.at_most(size, 9.02)
    n, _, r = m.reduce(m.add(bounded, bounded), _LOG2E)
    square = _times_power(m, _exp_near(m, r), n)
    large = m.sub(m.f(1.0), m.div(m.f(2.0), m.add(square, m.f(1.0))))
    return b.intrinsic("copysign", b.select(b.binary("fcmp oge", size, m.f(0.6), BOOL), large, small), x)


def sigmoid(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    return m.div(m.f(1.0), m.add(m.f(1.0), exp(b, b_neg(b, x))))


def cos_turns(b: Builder, x: Val) -> Val:
    """cos(2 pi x) for 0 <= x < 1: quarters come off exactly. Minimax polynomials of sine and cosine are Cephes'."""
    m = _F(b, x.lanes)
    shifted = m.fma(x, m.f(4.0), m.f(_ROUND))
    quarter = b.binary("sub", m.bits(shifted), m.bits(m.f(_ROUND)))
    a = m.mul(m.fma(m.sub(shifted, m.f(_ROUND)), m.f(-0.25), x), m.f(2 * math.pi))
    z = m.mul(a, a)
    sine = m.fma(m.mul(a, z), m.poly(z, (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)), a)
    tail = m.poly(z, (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5))
    cosine = m.fma(m.mul(z, z), tail, m.fma(z, m.f(-0.5), m.f(1.0)))
    odd = b.binary("icmp ne", b.binary("and", quarter, m.i(1)), m.i(0), BOOL)
    value = m.bits(b.select(odd, sine, cosine))
    # Minus in the second and third quarter.
    sign = b.binary("shl", b.binary("and", b.binary("add", quarter, m.i(1)), m.i(2)), m.i(30))
    return m.real(b.binary("xor", value, sign))


def b_neg(b: Builder, x: Val) -> Val:
    return Val(b.op(f"fneg {x}"), x.dtype, x.lanes)


# --- of fewer digits: ``ir.expr.ops.APPROXIMATIONS`` promises their errors -------------------------------------------


def _exp2_of(m: _F, x: Val) -> Val:
    """2**x for an x of ``_least`` to 129."""
    shifted = m.add(x, m.f(_ROUND))
    whole = m.sub(shifted, m.f(_ROUND))
    n = m.b.binary("sub", m.bits(shifted), m.bits(m.f(_ROUND)))
    return _scaled(m, m.poly(m.sub(x, whole), _EXP2), n, whole)


def exp2_approx(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    return _exp2_of(m, m.at_least(m.at_most(x, 129.0), _least(b, x.lanes)))


def erfc_approx(b: Builder, x: Val) -> Val:
    """One polynomial for all arguments, where an exact one has another near zero."""
    m = _F(b, x.lanes)
    size = m.abs(x)
    e = _exp2_of(m, m.at_least(m.mul(m.poly(size, _ERFC_APPROX), size), _least(b, x.lanes)))
    return b.select(b.binary("fcmp olt", x, m.f(0.0), BOOL), m.sub(m.f(2.0), e), e)


def tanh_approx(b: Builder, x: Val) -> Val:
    m = _F(b, x.lanes)
    far = m.sub(m.f(1.0), m.div(m.f(2.0), m.add(m.f(1.0), exp2_approx(b, m.mul(x, m.f(2 * _LOG2E))))))
    return b.select(b.binary("fcmp olt", m.abs(x), m.f(2.0**-6), BOOL), x, far)


# Fewer functions than the table of ``ops`` has: the rest goes to Sleef or libm (see library.py).
INLINE: dict[str, Callable[[Builder, Val], Val]] = {
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "log": log,
    "log2": log2,
    "log10": log10,
    "log1p": log1p,
    "erf": erf,
    "tanh": tanh,
    "sigmoid": sigmoid,
}
# Those that are shorter than the exact ones; what else has an error is computed exactly.
APPROXIMATE: dict[str, Callable[[Builder, Val], Val]] = {
    "exp2_approx": exp2_approx,
    "erfc_approx": erfc_approx,
    "tanh_approx": tanh_approx,
}
