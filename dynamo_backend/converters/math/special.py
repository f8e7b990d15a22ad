"""Special functions, written out by their published approximations.

They are computed in float64 for every type, as torch's own digamma is: approximations that cancel lose nothing then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....ir.expr.dtypes import DType
from ..context import ImportContext, Scalar, Tensor
from ..formula import Formula, Workspace, chebyshev, polynomial
from ..registry import NoConversion, converter
from . import special_tables as tables
from .elementwise import integer_power

Operand: TypeAlias = Tensor | Scalar
Function: TypeAlias = Callable[[Workspace, Formula], Formula]

_HALF_PI = math.pi / 2


def _register(name: str, fn: Function) -> None:
    @converter(f"aten.{name}.default")
    def special(ctx: ImportContext, x: Tensor) -> Tensor:
        w = Workspace(ctx)
        return w.result(fn(w, w.operand(x)))

    special.__name__ = name


def _quotient(x: Formula, above: Sequence[float], below: Sequence[float]) -> Formula:
    return polynomial(x, above) / polynomial(x, below)


# --- Bessel functions -------------------------------------------------------------------------------------------------


def _wave(w: Workspace, x: Formula, order: int, second: bool) -> Formula:
    """J or Y beyond 5, by modulus and phase."""
    t = {0: (tables.J0_PP, tables.J0_PQ, tables.J0_QP, tables.J0_QQ),
         1: (tables.J1_PP, tables.J1_PQ, tables.J1_QP, tables.J1_QQ)}[order]  # fmt: skip
    z = w.name(25.0 / (x * x))
    phase = w.name(x - (_HALF_PI / 2 if order == 0 else 1.5 * _HALF_PI))
    p, q = _quotient(z, t[0], t[1]), 5.0 / x * _quotient(z, t[2], t[3])
    sine, cosine = phase.call("sin"), phase.call("cos")
    wave = p * sine + q * cosine if second else p * cosine - q * sine
    return wave * math.sqrt(2 / math.pi) / x.call("sqrt")


def bessel_j0(w: Workspace, x: Formula) -> Formula:
    x = w.name(abs(x))
    square = w.name(x * x)
    roots = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = roots * _quotient(square, tables.J0_RP, tables.J0_RQ)
    near = (x < 1e-5).where(1.0 - square / 4.0, near)
    return (x <= 5.0).where(near, _wave(w, x, 0, second=False))


def bessel_j1(w: Workspace, x: Formula) -> Formula:
    size = w.name(abs(x))
    square = w.name(x * x)
    roots = (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    near = _quotient(square, tables.J1_RP, tables.J1_RQ) * size * roots
    value = w.name((size <= 5.0).where(near, _wave(w, size, 1, second=False)))
    return (x < 0.0).where(-value, value)


def _second_kind(x: Formula, near: Formula, far: Formula) -> Formula:
    """Y: minus infinity at zero, NaN left of it."""
    value = (x <= 5.0).where(near, far)
    return x.equals(0.0).where(x.like(-math.inf), (x < 0.0).where(x.like(math.nan), value))


def bessel_y0(w: Workspace, x: Formula) -> Formula:
    square = w.name(x * x)
    near = _quotient(square, tables.Y0_P, tables.Y0_Q) + 2 / math.pi * x.call("log") * bessel_j0(w, x)
    return _second_kind(x, near, _wave(w, x, 0, second=True))


def bessel_y1(w: Workspace, x: Formula) -> Formula:
    square = w.name(x * x)
    near = x * _quotient(square, tables.Y1_P, tables.Y1_Q)
    near = near + 2 / math.pi * (bessel_j1(w, x) * x.call("log") - 1.0 / x)
    return _second_kind(x, near, _wave(w, x, 1, second=True))


def _scaled_i(w: Workspace, size: Formula, order: int) -> Formula:
    """``exp(-x) I(x)`` of ``x >= 0``."""
    near, far = {0: (tables.I0_NEAR, tables.I0_FAR), 1: (tables.I1_NEAR, tables.I1_FAR)}[order]
    low = chebyshev(w.name(size * 0.25 - 1.0), near)
    high = chebyshev(w.name(16.0 / size - 1.0), far) / size.call("sqrt")
    return (size <= 8.0).where(low * size if order else low, high)


def i0e(w: Workspace, x: Formula) -> Formula:
    return _scaled_i(w, w.name(abs(x)), 0)


def i0(w: Workspace, x: Formula) -> Formula:
    size = w.name(abs(x))
    return size.call("exp") * _scaled_i(w, size, 0)


def i1e(w: Workspace, x: Formula) -> Formula:
    value = w.name(_scaled_i(w, w.name(abs(x)), 1))
    return (x < 0.0).where(-value, value)


def i1(w: Workspace, x: Formula) -> Formula:
    size = w.name(abs(x))
    value = w.name(size.call("exp") * _scaled_i(w, size, 1))
    return (x < 0.0).where(-value, value)


def _k(w: Workspace, x: Formula, order: int, scaled: bool) -> Formula:
    near, far = {0: (tables.K0_NEAR, tables.K0_FAR), 1: (tables.K1_NEAR, tables.K1_FAR)}[order]
    series = chebyshev(w.name(x * x * 0.5 - 1.0), near)
    growing = (x * 0.5).call("log") * (i1(w, x) if order else i0(w, x))
    low = growing + series / x if order else series - growing
    high = chebyshev(w.name(4.0 / x - 1.0), far) / x.call("sqrt")
    if scaled:
        low = low * x.call("exp")
    else:
        high = (-x).call("exp") * high
    value = (x <= 2.0).where(low, high)
    return x.equals(0.0).where(x.like(math.inf), (x < 0.0).where(x.like(math.nan), value))


def spherical_j0(w: Workspace, x: Formula) -> Formula:
    series = polynomial(w.name(x * x), [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    value = (abs(x) < 0.5).where(series, x.call("sin") / x)
    return x.call("isinf").where(x.like(0.0), value)


# --- Airy function ----------------------------------------------------------------------------------------------------


def airy_ai(w: Workspace, x: Formula) -> Formula:
    """By its power series near zero and asymptotic quotients farther out; NaN at both infinities, as torch has it."""
    size = w.name(abs(x))
    root = w.name(size.call("sqrt"))
    zeta = w.name(2.0 * size * root / 3.0)
    z = w.name(1.0 / zeta)
    square = w.name(z * z)
    factor = w.name(1 / math.sqrt(math.pi) / root.call("sqrt"))
    right = factor * _quotient(z, tables.AIRY_N, tables.AIRY_D) / (2.0 * zeta.call("exp"))
    t = w.name(zeta + math.pi / 4)
    left = t.call("sin") * (1.0 + square * _quotient(square, tables.AIRY_FN, tables.AIRY_FD))
    left = factor * (left - t.call("cos") * (z * _quotient(square, tables.AIRY_GN, tables.AIRY_GD)))
    even, odd = [1.0], [1.0]
    for k in range(1, 20):
        even.append(even[-1] / ((3 * k - 1) * (3 * k)))
        odd.append(odd[-1] / ((3 * k) * (3 * k + 1)))
    cube = w.name(x * x * x)
    near = 0.355028053887817239260 * polynomial(cube, even[::-1])
    near = near - 0.258819403792806798405 * (x * polynomial(cube, odd[::-1]))
    value = (x < -2.09).where(left, (x >= 2.09).where(right, near))
    value = (x > 103.892).where(x.like(0.0), value)
    return x.call("isinf").where(x.like(math.nan), value)


# --- normal distribution ----------------------------------------------------------------------------------------------


def erfcx_of_positive(w: Workspace, size: Formula) -> Formula:
    """``exp(x ** 2) erfc(x)`` of ``x >= 0``."""
    # The whole half-line in [-1, 1]; at infinity the quotient would be NaN.
    place = w.name((size < 1e30).where((size - 3.75) / (size + 3.75), 1.0))
    return chebyshev(place, tables.ERFCX) / (1.0 + 2.0 * size)


def erfcx(w: Workspace, x: Formula) -> Formula:
    """``exp(x ** 2) erfc(x)`` without overflow for positive x."""
    value = w.name(erfcx_of_positive(w, w.name(abs(x))))
    return (x < 0.0).where(2.0 * (x * x).call("exp") - value, value)


def ndtri(w: Workspace, p: Formula) -> Formula:
    """The inverse of the normal distribution function."""
    tail = math.exp(-2)
    upper = p > 1.0 - tail
    y = w.name(upper.where(1.0 - p, p))
    centred = w.name(y - 0.5)
    square = w.name(centred * centred)
    middle = centred + centred * (square * _quotient(square, tables.NDTRI_P0, tables.NDTRI_Q0))
    x = w.name((-2.0 * y.call("log")).call("sqrt"))
    z = w.name(1.0 / x)
    inner, outer = _quotient(z, tables.NDTRI_P1, tables.NDTRI_Q1), _quotient(z, tables.NDTRI_P2, tables.NDTRI_Q2)
    far = w.name(x - x.call("log") / x - z * (x < 8.0).where(inner, outer))
    value = (y > tail).where(middle * math.sqrt(2 * math.pi), upper.where(far, -far))
    value = ((p < 0.0) | (p > 1.0)).where(p.like(math.nan), value)
    return p.equals(0.0).where(p.like(-math.inf), p.equals(1.0).where(p.like(math.inf), value))


# --- zeta and polygamma -----------------------------------------------------------------------------------------------

# (2k)! / B_2k: Euler and Maclaurin's terms.
_BERNOULLI = (
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10, -2.950130727918164224e12,
    1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18,
)  # fmt: skip
_DIRECT = 9


def _zeta_of_positive(w: Workspace, x: Formula, q: Formula, power: Callable[[Formula], Formula]) -> Formula:
    """The sum of ``power(q + k) = (q + k) ** -x`` over k, for q > 0: ten terms, and the rest by Euler and Maclaurin."""
    total = power(q)
    for k in range(1, _DIRECT):
        total = total + power(q + float(k))
    end = w.name(q + float(_DIRECT))
    last = w.name(power(end))
    inverse = w.name(1.0 / (end * end))
    total = w.name(total + last)
    # b w / (x - 1) - b / 2 + b / w (x / A0 + x (x + 1) (x + 2) / (w² A1) + …), from the last term to the first.
    tail = x.like(0.0)
    for k in range(len(_BERNOULLI) - 1, -1, -1):
        rising = x if k == 0 else (x + float(2 * k - 1)) * (x + float(2 * k))
        tail = rising * (1.0 / _BERNOULLI[k] + tail) if k == 0 else rising * inverse * (1.0 / _BERNOULLI[k] + tail)
    rest = last * (end / (x - 1.0) - 0.5 + tail / end)
    # What is nothing beside the sum may overflow in its parts.
    return (last < 1.1e-16 * total).where(total, total + rest)


def _hurwitz(w: Workspace, x: Formula, q: Formula, power: Callable[[Formula], Formula]) -> Formula:
    """Of every q that is no pole; left of zero x is a whole number."""
    floor = w.name(q.call("floor"))
    left = q < 0.0
    fraction = w.name(left.where(q - floor, q))
    value = _zeta_of_positive(w, x, fraction, power)
    # What stands left of zero is that of 1 - q mirrored, with the sign of the power.
    mirrored = w.name(left.where(1.0 - fraction, x.like(1.0)))
    beyond = w.name(left.where(1.0 - q, x.like(1.0)))
    extra = _zeta_of_positive(w, x, mirrored, power) - _zeta_of_positive(w, x, beyond, power)
    odd = w.name((x * 0.5).call("floor") * 2.0).call("ne", x)
    return left.where(value + odd.where(-extra, extra), value)


@converter("aten.special_zeta.default", "aten.special_zeta.self_scalar", "aten.special_zeta.other_scalar")
def special_zeta(ctx: ImportContext, x: Operand, q: Operand) -> Tensor:
    w = Workspace(ctx)
    s, place = w.operand(x), w.operand(q)
    value = _hurwitz(w, s, place, lambda v: v.call("pow", -s))
    not_whole = s.call("floor").call("ne", s)
    value = (place < 0.0).where(not_whole.where(s.like(math.nan), value), value)
    pole = (place <= 0.0) & place.call("floor").equals(place)
    value = pole.where(s.like(math.inf), value)
    value = (s < 1.0).where(s.like(math.nan), value)
    return w.result(s.equals(1.0).where(s.like(math.inf), value))


def trigamma(w: Workspace, x: Formula) -> Formula:
    """By reflection for arguments below a half, then six steps up and the asymptotic series, as torch has it.

    Poles have the large numbers that torch makes of the sine of a multiple of pi, which it rounds to its own type.
    """
    low = x < 0.5
    place = w.name(low.where(1.0 - x, x))
    total = 1.0 / (place * place)
    for k in range(1, 6):
        step = w.name(place + float(k))
        total = total + 1.0 / (step * step)
    end = w.name(place + 6.0)
    inverse = w.name(1.0 / (end * end))
    series = 1.0 / 6 - inverse * (1.0 / 30 - inverse * (1.0 / 42))
    value = w.name(total + (1.0 + 0.5 / end + inverse * series) / end)
    sine = w.name(x.call("floor").equals(x).where(w.rounded(x * w.rounded(x.like(math.pi))), x * math.pi).call("sin"))
    return low.where(math.pi**2 / (sine * sine) - value, value)


@converter("aten.polygamma.default")
def polygamma(ctx: ImportContext, n: int, x: Tensor) -> Tensor:
    w = Workspace(ctx)
    place = w.operand(x)
    if n == 0:
        return w.result(place.call("digamma"))
    if n == 1:
        return w.result(trigamma(w, place))
    if n > 150:
        raise NoConversion("a polygamma function whose factorial is no float64")

    def power(v: Formula) -> Formula:
        if n > 15:
            return v.call("pow", float(-(n + 1)))
        return Formula(integer_power(w.name(1.0 / v).value, n + 1))

    value = _hurwitz(w, place.like(float(n + 1)), place, power)
    value = ((place <= 0.0) & place.call("floor").equals(place)).where(place.like(math.inf), value)
    return w.result(value * float((-1) ** (n + 1) * math.factorial(n)))


for _name, _function in {
    "i0": i0, "special_i0e": i0e, "special_i1": i1, "special_i1e": i1e,
    "special_modified_bessel_i0": i0, "special_modified_bessel_i1": i1,
    "special_bessel_j0": bessel_j0, "special_bessel_j1": bessel_j1,
    "special_bessel_y0": bessel_y0, "special_bessel_y1": bessel_y1,
    "special_modified_bessel_k0": lambda w, x: _k(w, x, 0, False),
    "special_modified_bessel_k1": lambda w, x: _k(w, x, 1, False),
    "special_scaled_modified_bessel_k0": lambda w, x: _k(w, x, 0, True),
    "special_scaled_modified_bessel_k1": lambda w, x: _k(w, x, 1, True),
    "special_spherical_bessel_j0": spherical_j0, "special_airy_ai": airy_ai,
    "special_erfcx": erfcx, "special_ndtri": ndtri,
}.items():  # fmt: skip
    _register(_name, _function)


# --- integers ---------------------------------------------------------------------------------------------------------


@converter("aten.lcm.default")
def lcm(ctx: ImportContext, a: Tensor, b: Tensor) -> Tensor:
    w = Workspace(ctx, ctx.type().dtype)
    x, y = w.operand(a), w.operand(b)
    divisor = w.name(x.call("gcd", y))
    none = divisor.equals(0.0)
    # Beyond the divisor, which is of their own type, C computes with narrow integers as int.
    wide = w.dtype if w.dtype is DType.INT64 else DType.INT32
    by = none.where(divisor.like(1.0), divisor).to(wide)
    if wide is DType.INT64:
        part = x.to(wide).call("truncdiv", by)
    else:  # exact, and done by vectors
        part = (x.to(DType.FLOAT64) / by.to(DType.FLOAT64)).to(wide)
    multiple = w.name(abs(part * y.to(wide)).to(w.dtype))
    return w.result(none.where(divisor, multiple))
