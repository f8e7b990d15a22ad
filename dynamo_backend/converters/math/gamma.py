"""The regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x).

By series where x is small beside a, by a continued fraction where it is large, and by Temme's uniform expansion around
x = a for large a, where either would take as many steps as the root of a. All in float64 but for the steps.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import torch

from ..context import ImportContext, Scalar, Tensor
from ..formula import Formula, Workspace, chebyshev, polynomial
from ..registry import converter
from .special import erfcx_of_positive

# Beyond this, x within these parts of a is near.
_LARGE, _NEAR = 200.0, 0.3
# Terms of the uniform expansion in 1 / a, and of each in eta: what float64 holds for a >= _LARGE and |eta| < 0.35.
_TERMS, _POWERS = 7, 17
# Terms of Stirling's series for ln Gamma, which are exact from 12 on; what is below is taken up by so many steps.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_SHIFT = 12
# The logarithm of Gamma(1 + a) up to this a, beyond which no difference is taken.
_SMALL, _SMALL_TERMS = 1.25, 26


_EULER = 0.57721566490153286061


@cache
def _coefficients() -> tuple[tuple[float, ...], ...]:
    """Coefficients of the functions c_k(eta) of DLMF 8.12.9, each with the highest power of eta first.

    ``c_0 = 1 / mu - 1 / eta`` and ``c_k = c_{k-1}' / eta + (-1) ** k g_k / mu`` (8.12.12), where ``mu = lambda - 1`` is
    a series in eta with ``mu mu' = eta (1 + mu)``, and g_k are the coefficients of Stirling's series for Gamma.
    """
    count = _POWERS + 2 * _TERMS + 2
    mu = [Fraction(0), Fraction(1)]
    for n in range(2, count + 1):
        # The coefficient of eta ** n on both sides of mu mu' = eta + eta mu.
        known = sum((mu[i] * mu[n + 1 - i] * (n + 1 - i) for i in range(2, n)), Fraction(0))
        mu.append((mu[n - 1] - known) / (n + 1))
    # 1 / mu = 1 / eta (1 + r_1 eta + r_2 eta ** 2 + ...)
    inverse = [Fraction(1)]
    for n in range(1, count):
        inverse.append(-sum((mu[i + 1] * inverse[n - i] for i in range(1, n + 1)), Fraction(0)))
    gammas = _stirling_of_gamma()
    current, found = inverse[1:], []
    for k in range(_TERMS):
        if k:
            # The derivative over eta begins with the power -1, which the second term takes away.
            factor = (-1) ** k * gammas[k]
            current = [(n + 2) * c + factor * r for n, (c, r) in enumerate(zip(current[2:], inverse[1:], strict=False))]
        found.append(tuple(float(c) for c in current[:_POWERS][::-1]))
    return tuple(found)


def _stirling_of_gamma() -> list[Fraction]:
    """g_k in ``Gamma(a) = sqrt(2 pi) a ** (a - 1/2) exp(-a) (g_0 + g_1 / a + …)``: the exponential of Stirling's."""
    # Bernoulli numbers, from which ln Gamma has B_2k / (2k (2k - 1) a ** (2k - 1)).
    bernoulli = [Fraction(1)]
    for n in range(1, _TERMS + 2):
        bernoulli.append(-sum((math.comb(n + 1, j) * bernoulli[j] for j in range(n)), Fraction(0)) / (n + 1))
    logarithm = [Fraction(0)] + [bernoulli[n + 1] / (n * (n + 1)) if n % 2 else Fraction(0) for n in range(1, _TERMS)]
    found = [Fraction(1)]
    for n in range(1, _TERMS):
        found.append(sum((j * logarithm[j] * found[n - j] for j in range(1, n + 1)), Fraction(0)) / n)
    return found


@cache
def _log_of_small() -> tuple[float, ...]:
    """Chebyshev coefficients of ln Gamma(1 + a) / a for a in [0, _SMALL], the last term first."""

    def exact(a: float) -> float:
        # ln Gamma(2 + a) = (1 - Euler) a + the sum over k of (zeta(k) - 1) (-a) ** k / k.
        series = [(zeta - 1.0) * (-a) ** k / k for k, zeta in enumerate(zetas, 2)]
        return (math.fsum([(1.0 - _EULER) * a, *series]) - math.log1p(a)) / a

    zetas = torch.special.zeta(torch.arange(2, 90, dtype=torch.float64), 1.0).tolist()
    angles = [math.pi * (n + 0.5) / 64 for n in range(64)]
    values = [exact(_SMALL / 2 * (1.0 + math.cos(t))) for t in angles]
    series = [
        math.fsum(v * math.cos(k * t) for v, t in zip(values, angles, strict=True)) / 32 for k in range(_SMALL_TERMS)
    ]
    return tuple(series[::-1])


class _Gamma:
    """Both functions of one pair of operands; where these are out of the domain, of harmless ones."""

    def __init__(self, w: Workspace, a: Formula, x: Formula) -> None:
        self.w = w
        self.steps = w.out.dtype.compute
        inside = w.name((a > 0.0) & (x > 0.0) & (a < math.inf) & (x < math.inf))
        self.a, self.x = w.name(inside.where(a, 1.0)), w.name(inside.where(x, 1.0))
        a, x = self.a, self.x
        self.part = w.name((x - a) / a)
        self.near = w.name((a > _LARGE) & (abs(self.part) < _NEAR))
        # Where Stirling's series is exact, and the logarithms there and at x.
        self.large = w.name(a >= float(_SHIFT))
        self.base = w.name(self.large.where(a, a + float(_SHIFT)))
        self.log_base, self.log_x = w.name(self.base.call("log")), w.name(x.call("log"))
        # In which of its forms either function is computed elsewhere: that which is not close to one.
        small = w.name((x <= 1.1) & ~((x <= 0.5).where(-0.4 / self.log_x, x * 1.1) < a))
        self.by_difference = w.name(small & ~self.near)
        self.by_fraction = w.name((x > 1.1) & (x >= a) & ~self.near)
        self.by_series = w.name(~(self.near | self.by_difference | self.by_fraction))

        self.distance = w.name(self._distance())
        self.power = w.name(self._power())

    def _distance(self) -> Formula:
        """``x / a - 1 - ln(x / a)`` for large a, half the square of eta."""
        part = self.part
        # ln(1 + s) is s - s ** 2 / 2 + … there.
        series = part * part * polynomial(part, [(-1) ** k / k for k in range(10, 1, -1)])
        return (abs(part) < 0.02).where(series, part - (self.log_x - self.log_base))

    def _power(self) -> Formula:
        """``x ** a exp(-x) / Gamma(a + 1)``."""
        w, a, x = self.w, self.a, self.x
        inverse = w.name(1.0 / self.base)
        rest = polynomial(w.name(inverse * inverse), _STIRLING[::-1]) * inverse
        root = w.name(rest + 0.5 * self.log_base + 0.5 * math.log(2.0 * math.pi))
        below = a * self.log_x - x - (self.base * self.log_base - self.base)
        steps = a + 1.0
        for k in range(2, _SHIFT + 1):
            steps = steps * (a + float(k))
        exponent = self.large.where(-a * self.distance, below) - root
        return exponent.call("exp") * self.large.where(a.like(1.0), steps)

    def _uniform(self, upper: bool) -> Formula:
        """By the complementary error function and an expansion in 1 / a (DLMF 8.12.3, 8.12.4 and 8.12.7)."""
        w, a = self.w, self.a
        below = self.part < 0.0
        eta = (2.0 * self.distance).call("sqrt")
        eta, inverse = w.name(below.where(-eta, eta)), w.name(1.0 / a)
        total = a.like(0.0)
        for row in reversed(_coefficients()):
            total = total * inverse + polynomial(eta, row)
        # exp(-a eta ** 2 / 2) is this times the root of 2 pi a.
        scale = w.name(self.power * polynomial(inverse, [float(g) for g in reversed(_stirling_of_gamma())]))
        place = w.name((a * self.distance).call("sqrt"))
        half = w.name(scale * ((0.5 * math.pi) * a).call("sqrt") * erfcx_of_positive(w, place))
        rest = scale * total
        near = below if upper else ~below
        return near.where(1.0 - half, half) + (rest if upper else -rest)

    def value(self, upper: bool) -> Formula:
        """Q or P."""
        w, a, x = self.w, self.a, self.x
        one = a.like(1.0)

        def of(fn: str, where: Formula, elsewhere: float) -> Formula:
            """By steps in the type of the result; with ``elsewhere`` for x there is nothing to be done."""
            operands = (where.where(a, one), where.where(x, elsewhere))
            shape, place = (v.to(self.steps) for v in operands)
            return shape.call(fn, place).to(w.dtype)

        series = self.power * of("gamma_series", self.by_series, 0.0)
        fraction = self.power * a * of("gamma_fraction", self.by_fraction, math.inf)
        # 1 - x ** a / Gamma(1 + a) (1 + a sum), where a may be close to zero: neither term is 1 minus what is nearly 1.
        small = w.name((a < _SMALL).where(a, one))
        log_gamma = small * chebyshev(w.name(small * (2.0 / _SMALL) - 1.0), _log_of_small())
        change = w.name((small * self.log_x - log_gamma).call("expm1"))
        total = of("gamma_difference", self.by_difference, 0.0)
        high = self.by_difference.where(-change - (change + 1.0) * a * total, fraction)
        result = self.by_series.where(1.0 - series, high) if upper else self.by_series.where(series, 1.0 - high)
        return self.near.where(self._uniform(upper), result)


def _register(name: str, upper: bool) -> None:
    @converter(f"aten.{name}.default")
    def incomplete(ctx: ImportContext, a: Tensor | Scalar, x: Tensor | Scalar) -> Tensor:
        w = Workspace(ctx)
        shape, place = w.operand(a), w.operand(x)
        value = _Gamma(w, shape, place).value(upper)
        none, everything = (1.0, 0.0) if upper else (0.0, 1.0)
        value = (shape.call("isnan") | place.call("isnan")).where(place.like(math.nan), value)
        value = place.equals(math.inf).where(place.like(everything), value)
        value = shape.equals(math.inf).where(place.equals(math.inf).where(place.like(math.nan), none), value)
        value = place.equals(0.0).where(place.like(none), value)
        value = shape.equals(0.0).where((place > 0.0).where(place.like(everything), math.nan), value)
        return w.result(((shape < 0.0) | (place < 0.0)).where(place.like(math.nan), value))

    incomplete.__name__ = name


_register("igamma", upper=False)
_register("igammac", upper=True)
