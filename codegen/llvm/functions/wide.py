"""Functions of float32 that are computed in float64, for where no library may be called.

A few terms of float64 leave nothing of an error in float32 but the last rounding, and none of the cases in which
reductions cancel or scales leave the range need any care. Twice as many registers are taken. Each is within an ulp
(tests measure them) and takes every input. The few arguments of circular functions that are so large that a reduction
would want more digits of pi go to the C library one by one. Polynomials are Taylor's, or were fitted here (minimax by
iterated weighted least squares).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val
from .arithmetic import Arithmetic

F32, F64, I64, BOOL = DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.BOOL

# Adding it rounds a double of moderate size to an integer, which then stands in the low bits of the sum.
_ROUND = 6755399441055744.0
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10
# pi / 2 in three parts, of 33 bits, of 33 bits, and the rest.
_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
# Up to here the products of quarters and the first two parts are exact.
_MOST_TURNED = 2.0**19
_EXP = tuple(1 / math.factorial(k) for k in range(10))
_LOG = tuple(2 / (2 * k + 1) for k in range(8))
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(7))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(8))
_SINH = tuple(1 / math.factorial(2 * k + 1) for k in range(7))
# atan(t) / t by the square of t, up to the tangent of pi / 8.
_ATAN = (
    0.9999999999999747, -0.33333333330940174, 0.19999999620734993, -0.14285691138236167, 0.11110401011299362,
    -0.09078586703130018, 0.07565021197235064, -0.058791569571281725, 0.03072919688989919,
)  # fmt: skip
# erf(x) / x by the square of x, up to one.
_ERF = (
    1.128379167095538, -0.37612638903744405, 0.11283791692279861, -0.026866173878043905, 0.005224003131871367,
    -0.0008549510592328152, 0.00012089714570882786, -1.556820552396253e-05, 2.4178861124751814e-06,
    -7.387278602516572e-07, 2.5657764374889953e-07, -4.490185350796037e-08,
)  # fmt: skip
# erfc(x) exp(x^2) by 1 / (x + 2), from one on.
_ERFCX = (
    -1.477181096332103e-07, 0.5642013223215146, 1.1279599916732193, 1.9835471100575695, 2.696729563488329,
    3.8831555594167964, -8.507754959220028, 32.192132659714325, -141.54850252548286, 249.3045157628844,
    -145.30616366178242, -70.95742738524378, 90.47859196044924,
)  # fmt: skip


class _D(Arithmetic):
    """Arithmetic on float64 and int64 values of one width."""

    floats, ints = F64, I64

    def of(self, x: Val) -> Val:
        return self.b.convert("fpext", x, F64)

    def narrow(self, x: Val) -> Val:
        return self.b.convert("fptrunc", x, F32)

    def fma(self, x: Val, y: Val, z: Val) -> Val:
        return self.b.intrinsic("fmuladd", x, y, z)

    def sqrt(self, x: Val) -> Val:
        return self.b.intrinsic("sqrt", x)

    def neg(self, x: Val) -> Val:
        return Val(self.b.op(f"fneg {x}"), x.dtype, x.lanes)

    def is_(self, how: str, x: Val, y: Val) -> Val:
        return self.b.binary(f"fcmp {how}", x, y, BOOL)

    def both(self, x: Val, y: Val) -> Val:
        return self.b.binary("and", x, y)

    def select(self, condition: Val, x: Val, y: Val) -> Val:
        return self.b.select(condition, x, y)

    def within(self, x: Val, size: float) -> Val:
        """x, no farther from zero than ``size``; NaN is kept."""
        low, high = self.f(-size), self.f(size)
        x = self.select(self.is_("ogt", x, high), high, x)
        return self.select(self.is_("olt", x, low), low, x)

    def whole(self, x: Val) -> tuple[Val, Val]:
        """The nearest whole number, and a value whose lowest bits are it."""
        shifted = self.add(x, self.f(_ROUND))
        return self.sub(shifted, self.f(_ROUND)), self.bits(shifted)

    def exp(self, x: Val) -> Val:
        """To about 40 bits, of an x that is moderate or NaN."""
        n, low = self.whole(self.mul(x, self.f(1 / math.log(2))))
        r = self.sub(self.sub(x, self.mul(n, self.f(_LN2_HIGH))), self.mul(n, self.f(_LN2_LOW)))
        scale = self.b.binary("shl", low, self.i(52))
        made = self.real(self.b.binary("add", self.bits(self.poly(r, _EXP)), scale))
        return self.select(self.is_("uno", x, x), x, made)

    def log(self, x: Val) -> Val:
        """To about 40 bits; minus infinity of zero, NaN of less."""
        least = self.bits(self.f(math.sqrt(0.5)))
        moved = self.b.binary("sub", self.bits(x), least)
        e = self.b.binary("ashr", moved, self.i(52))
        mantissa = self.real(self.b.binary("sub", self.bits(x), self.b.binary("shl", e, self.i(52))))
        s = self.div(self.sub(mantissa, self.f(1.0)), self.add(mantissa, self.f(1.0)))
        n = self.sub(self.real(self.b.binary("add", e, self.bits(self.f(_ROUND)))), self.f(_ROUND))
        low = self.mul(s, self.poly(self.mul(s, s), _LOG))
        made = self.fma(n, self.f(math.log(2)), low)
        made = self.select(self.is_("ult", x, self.f(math.inf)), made, x)  # infinity stays, NaN is seen to below
        made = self.select(self.is_("oeq", x, self.f(0.0)), self.f(-math.inf), made)
        return self.select(
            self.is_("uge", x, self.f(0.0)), self.select(self.is_("uno", x, x), x, made), self.f(math.nan)
        )

    def turned(self, x: Val) -> tuple[Val, Val, Val]:
        """Sine and cosine of what x is beyond the nearest quarter of a turn, and the number of quarters in its low
        bits."""
        n, quarter = self.whole(self.mul(x, self.f(2 / math.pi)))
        for part in _HALF_PI:
            x = self.sub(x, self.mul(n, self.f(part)))
        z = self.mul(x, x)
        return self.mul(x, self.poly(z, _SIN)), self.poly(z, _COS), quarter

    def has_bit(self, quarter: Val, bit: int) -> Val:
        return self.b.binary("icmp ne", self.b.binary("and", quarter, self.i(bit)), self.i(0), BOOL)

    def angle(self, y: Val, x: Val) -> Val:
        """The angle of a point whose coordinates are not negative."""
        steep = self.is_("ogt", y, self.mul(x, self.f(1 + math.sqrt(2))))
        half = self.is_("ogt", y, self.mul(x, self.f(math.sqrt(2) - 1)))
        up = self.select(steep, self.neg(x), self.select(half, self.sub(y, x), y))
        down = self.select(steep, y, self.select(half, self.add(x, y), x))
        t = self.div(up, down)
        base = self.select(steep, self.f(math.pi / 2), self.select(half, self.f(math.pi / 4), self.f(0.0)))
        made = self.fma(t, self.poly(self.mul(t, t), _ATAN), base)
        infinite = self.f(math.inf)
        corner = self.both(self.is_("oeq", x, infinite), self.is_("oeq", y, infinite))
        made = self.select(corner, self.f(math.pi / 4), made)
        none = self.both(self.is_("oeq", y, self.f(0.0)), self.is_("ord", x, x))
        return self.select(none, y, made)

    def signed(self, size: Val, like: Val) -> Val:
        return self.b.intrinsic("copysign", size, like)


def _circular(b: Builder, x: Val, fn: str, made: Callable[[_D, Val, Val, Val], Val]) -> Val:
    d = _D(b, x.lanes)
    near = b.binary("fcmp olt", b.intrinsic("fabs", x), b.const(_MOST_TURNED, F32), BOOL)
    fast = d.narrow(made(d, *d.turned(d.of(b.select(near, x, b.const(0.0, F32))))))
    far = b.binary("fcmp uge", b.intrinsic("fabs", x), b.const(_MOST_TURNED, F32), BOOL)
    return rarely(b, far, fast, fn, x)


def sin(b: Builder, x: Val) -> Val:
    def value(d: _D, sine: Val, cosine: Val, quarter: Val) -> Val:
        size = d.select(d.has_bit(quarter, 1), cosine, sine)
        return d.select(d.has_bit(quarter, 2), d.neg(size), size)

    return _circular(b, x, "sin", value)


def cos(b: Builder, x: Val) -> Val:
    def value(d: _D, sine: Val, cosine: Val, quarter: Val) -> Val:
        size = d.select(d.has_bit(quarter, 1), d.neg(sine), cosine)
        return d.select(d.has_bit(quarter, 2), d.neg(size), size)

    return _circular(b, x, "cos", value)


def tan(b: Builder, x: Val) -> Val:
    def value(d: _D, sine: Val, cosine: Val, quarter: Val) -> Val:
        odd = d.has_bit(quarter, 1)
        return d.div(d.select(odd, d.neg(cosine), sine), d.select(odd, sine, cosine))

    return _circular(b, x, "tan", value)


def atan2(b: Builder, y: Val, x: Val) -> Val:
    d = _D(b, y.lanes)
    up, along = d.of(y), d.of(x)
    size = d.angle(d.abs(up), d.abs(along))
    left = b.binary("icmp slt", d.bits(along), d.i(0), BOOL)
    return d.narrow(d.signed(d.select(left, d.sub(d.f(math.pi), size), size), up))


def atan(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    up = d.of(x)
    return d.narrow(d.signed(d.angle(d.abs(up), d.f(1.0)), up))


def _beside(d: _D, x: Val) -> Val:
    """The other side of a triangle whose longest side is one; NaN where there is none."""
    return d.sqrt(d.mul(d.sub(d.f(1.0), x), d.add(d.f(1.0), x)))


def asin(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    up = d.of(x)
    return d.narrow(d.signed(d.angle(d.abs(up), _beside(d, up)), up))


def acos(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    along = d.of(x)
    size = d.angle(_beside(d, along), d.abs(along))
    return d.narrow(d.select(d.is_("olt", along, d.f(0.0)), d.sub(d.f(math.pi), size), size))


def sinh(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    wide = d.within(d.of(x), 700.0)
    e = d.exp(d.abs(wide))
    far = d.signed(d.mul(d.f(0.5), d.sub(e, d.div(d.f(1.0), e))), wide)
    near = d.mul(wide, d.poly(d.mul(wide, wide), _SINH))
    return d.narrow(d.select(d.is_("olt", d.abs(wide), d.f(1.0)), near, far))


def cosh(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    e = d.exp(d.abs(d.within(d.of(x), 700.0)))
    return d.narrow(d.mul(d.f(0.5), d.add(e, d.div(d.f(1.0), e))))


def asinh(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    wide = d.of(x)
    size, square = d.abs(wide), d.mul(wide, wide)
    far = d.log(d.add(size, d.sqrt(d.add(square, d.f(1.0)))))
    near = d.mul(size, d.poly(square, (1.0, -1 / 6, 3 / 40)))
    return d.narrow(d.signed(d.select(d.is_("olt", size, d.f(1e-3)), near, far), wide))


def acosh(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    wide = d.of(x)
    root = d.sqrt(d.mul(d.sub(wide, d.f(1.0)), d.add(wide, d.f(1.0))))
    made = d.log(d.add(wide, root))
    return d.narrow(d.select(d.is_("olt", wide, d.f(1.0)), d.f(math.nan), made))


def atanh(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    wide = d.of(x)
    far = d.mul(d.f(0.5), d.log(d.div(d.add(d.f(1.0), wide), d.sub(d.f(1.0), wide))))
    near = d.mul(wide, d.poly(d.mul(wide, wide), (1.0, 1 / 3, 1 / 5)))
    return d.narrow(d.select(d.is_("olt", d.abs(wide), d.f(1e-3)), near, far))


def erfc(b: Builder, x: Val) -> Val:
    d = _D(b, x.lanes)
    wide = d.within(d.of(x), 11.0)
    size, square = d.abs(wide), d.mul(wide, wide)
    near = d.sub(d.f(1.0), d.mul(wide, d.poly(square, _ERF)))
    t = d.div(d.f(1.0), d.add(size, d.f(2.0)))
    tail = d.mul(d.exp(d.neg(square)), d.poly(t, _ERFCX))
    far = d.select(d.is_("olt", wide, d.f(0.0)), d.sub(d.f(2.0), tail), tail)
    return d.narrow(d.select(d.is_("olt", size, d.f(1.0)), near, far))


def pow(b: Builder, x: Val, y: Val) -> Val:
    """Of C: one to any power is one, and so is anything to the power of zero."""
    d = _D(b, x.lanes)
    base, power = d.of(x), d.of(y)
    size, one = d.abs(base), d.f(1.0)
    made = d.exp(d.within(d.mul(power, d.log(size)), 700.0))
    made = d.select(d.is_("oeq", power, d.f(0.0)), one, made)
    sure = d.both(d.is_("oeq", size, one), d.is_("oeq", d.abs(power), d.f(math.inf)))
    made = d.select(sure, one, made)
    made = d.select(d.is_("oeq", base, one), one, made)
    is_whole = d.is_("oeq", b.intrinsic("trunc", power), power)
    half = d.mul(power, d.f(0.5))
    odd = d.both(is_whole, d.is_("une", b.intrinsic("trunc", half), half))
    negative = b.binary("icmp slt", d.bits(base), d.i(0), BOOL)
    made = d.select(d.both(odd, negative), d.neg(made), made)
    finite = d.both(d.is_("olt", base, d.f(0.0)), d.is_("ogt", base, d.f(-math.inf)))
    broken = b.select(is_whole, b.const(False, BOOL, x.lanes), finite)
    return d.narrow(d.select(broken, d.f(math.nan), made))


def hypot(b: Builder, x: Val, y: Val) -> Val:
    d = _D(b, x.lanes)
    p, q = d.of(x), d.of(y)
    made = d.sqrt(d.fma(p, p, d.mul(q, q)))
    infinite = d.f(math.inf)
    for side in (p, q):
        made = d.select(d.is_("oeq", d.abs(side), infinite), infinite, made)
    return d.narrow(made)


# A quotient below this has few enough bits that the product with a divisor is exact.
_MOST_QUOTIENT = 2.0**28


def fmod(b: Builder, x: Val, y: Val) -> Val:
    d = _D(b, x.lanes)
    p, q = d.of(x), d.of(y)
    quotient = b.intrinsic("trunc", d.div(p, q))
    fine = d.is_("olt", d.abs(quotient), d.f(_MOST_QUOTIENT))
    rest = d.sub(p, d.mul(d.select(fine, quotient, d.f(0.0)), q))
    # Of a quotient that was rounded up to a whole number.
    over = d.both(d.is_("olt", d.mul(rest, p), d.f(0.0)), fine)
    rest = d.select(over, d.add(rest, d.signed(d.abs(q), p)), rest)
    endless = d.is_("oeq", d.abs(q), d.f(math.inf))
    rest = d.select(d.both(endless, d.is_("olt", d.abs(p), d.f(math.inf))), p, rest)
    made = b.intrinsic("copysign", d.narrow(rest), x)
    far = d.is_("uge", d.abs(quotient), d.f(_MOST_QUOTIENT))
    return rarely(b, far, made, "fmod", x, y)


def rarely(b: Builder, condition: Val, usual: Val, fn: str, *args: Val) -> Val:
    """``usual``, but in lanes where a condition holds ``fn`` of the C library; where it holds in none, nothing is
    called."""
    any_lane = b.call("i1", f"llvm.vector.reduce.or.v{condition.lanes}i1", str(condition)) if condition.lanes else ""
    slow, done = b.fresh("slow"), b.fresh("done")
    with b.frame():
        before = b.block
        b.line(f"br i1 {any_lane or condition.name}, label {slow}, label {done}")
        b.label(slow)
        # Under names of the branch, so that nothing of it is written before the branch.
        given = [Val(b.effect(f"select i1 true, {a}, {a}"), a.dtype, a.lanes) for a in args]
        exact = scalars(b, fn, given)
        made = b.select(condition, exact, usual)
        inside = b.block
        b.branch(done)
        b.label(done)
    name = b.fresh(fn)
    b.line(f"{name} = phi {usual.type} [ {usual.name}, %{before} ], [ {made.name}, %{inside} ]")
    return Val(name, usual.dtype, usual.lanes)


def scalars(b: Builder, fn: str, args: Sequence[Val]) -> Val:
    """``fn`` of the C library, lane by lane."""
    dtype, lanes = args[0].dtype, args[0].lanes
    element = "float" if dtype.itemsize == 4 else "double"
    name = fn + ("f" if dtype.itemsize == 4 else "")
    if not lanes:
        return Val(b.call(element, name, *(str(a) for a in args)), dtype, 0)
    result = "poison"
    for k in range(lanes):
        part = [f"{element} {b.op(f'extractelement {a}, i64 {k}')}" for a in args]
        one = b.call(element, name, *part)
        result = b.op(f"insertelement <{lanes} x {element}> {result}, {element} {one}, i64 {k}")
    return Val(result, dtype, lanes)


ONE: dict[str, Callable[[Builder, Val], Val]] = {
    "sin": sin, "cos": cos, "tan": tan, "asin": asin, "acos": acos, "atan": atan, "sinh": sinh, "cosh": cosh,
    "asinh": asinh, "acosh": acosh, "atanh": atanh, "erfc": erfc,
}  # fmt: skip
TWO: dict[str, Callable[[Builder, Val, Val], Val]] = {"atan2": atan2, "pow": pow, "hypot": hypot, "fmod": fmod}
