"""Functions of the table whose values take as many steps as data tell: what each step does, as value expressions.

The oracle, the emitters and the fallback have one loop for all of them. A vector of lanes, or a tile, goes on while any
of its elements does, and an element that has ended keeps what condition and result are made of. Every loop here ends
for all arguments, those of lanes that nobody uses included: NaN fails every comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..errors import IRError
from .dtypes import DType
from .value import Const, Expr, Select, Var, call, cast, const, walk

# What an element may take of steps where rounding keeps a series from its end.
_MOST = 2000.0


@dataclass(frozen=True, slots=True)
class Iteration:
    """``state = start; while condition: state = step; return result``.

    ``start`` speaks of ``args``; ``condition``, ``step`` and ``result`` of ``args`` and ``state``. None of them loads.
    Counts may go on where an element has ended, so a condition that fails must fail for higher counts too.
    """

    args: tuple[Var, ...]
    state: tuple[Var, ...]
    start: tuple[Expr, ...]
    condition: Expr
    step: tuple[Expr, ...]
    result: Expr

    @property
    def counts(self) -> frozenset[str]:
        """The states that are the same for all elements: they begin with a number and follow from themselves alone."""
        steps = zip(self.state, self.start, self.step, strict=True)
        return frozenset(v.name for v, e, step in steps if isinstance(e, Const) and _names(step) == {v.name})

    @property
    def kept(self) -> frozenset[str]:
        """The states that must stay what they are where an element has ended."""
        return (_names(self.condition) | _names(self.result)) - self.counts


def _names(expr: Expr) -> frozenset[str]:
    return frozenset(e.name for e in walk(expr) if isinstance(e, Var))


@cache
def iteration(fn: str, dtype: DType) -> Iteration:
    """The definition of ``fn`` for arguments of ``dtype``. Raises IRError where that type has no such function."""
    if (fn == "gcd") == dtype.is_float or dtype.is_half or dtype is DType.BOOL:
        kind = "an integer type" if fn == "gcd" else "float32 or float64"
        raise IRError(f"{fn} of {dtype.value}: cast to {kind} first")
    return ITERATIONS[fn](dtype)


def _gcd(dtype: DType) -> Iteration:
    """Euclid's algorithm, with remainders towards zero: the least integer is its own absolute value."""
    a, b, x, y = (Var(name, dtype) for name in ("a", "b", "x", "y"))
    start = (call("abs", a), call("abs", b))
    # Machines divide integers of 32 and of 64 bits.
    wide = DType.INT32 if dtype.bits < 32 else dtype
    further = call("ne", x, const(0, dtype))
    # An element that has ended divides by one: what a GPU makes of zero is nobody's business.
    rest = cast(call("fmod", cast(y, wide), cast(Select(further, x, const(1, dtype)), wide)), dtype)
    return Iteration((a, b), (x, y), start, further, (rest, x), y)


# --- orthogonal polynomials -------------------------------------------------------------------------------------------

# The polynomial of degree k + 1 of x from those of degrees k - 1 and k.
_Recurrence = Callable[[Expr, Expr, Expr, Expr], Expr]


def _polynomial(linear: Callable[[Expr], Expr], following: _Recurrence) -> Callable[[DType], Iteration]:
    """Orthogonal polynomials of a whole degree ``n >= 1`` by their recurrence; ``linear`` is that of degree 1."""

    def make(dtype: DType) -> Iteration:
        x, n, p, q = (Var(name, dtype) for name in ("x", "n", "p", "q"))
        # Counted in float64, where every whole number that a loop reaches is one.
        k = Var("k", DType.FLOAT64)
        start = (const(1.0, k.dtype), const(1.0, dtype), linear(x))
        step = (call("add", k, const(1.0, k.dtype)), q, following(x, cast(k, dtype), p, q))
        further = call("logical_and", call("lt", cast(k, dtype), n), call("logical_not", call("isnan", q)))
        return Iteration((x, n), (k, p, q), start, further, step, q)

    return make


def _times(*factors: Expr) -> Expr:
    product = factors[0]
    for f in factors[1:]:
        product = call("mul", product, f)
    return product


def _number(value: float, like: Expr) -> Expr:
    return const(value, like.dtype)


def _hermite_h(x: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
    return call("sub", _times(call("add", x, x), q), _times(call("add", k, k), p))


def _hermite_he(x: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
    return call("sub", _times(x, q), _times(k, p))


def _laguerre(x: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
    factor = call("add", call("add", k, k), call("sub", _number(1.0, x), x))
    return call("div", call("sub", _times(factor, q), _times(k, p)), call("add", k, _number(1.0, k)))


def _legendre(x: Expr, k: Expr, p: Expr, q: Expr) -> Expr:
    factor = call("add", call("add", k, k), _number(1.0, k))
    return call("div", call("sub", _times(factor, x, q), _times(k, p)), call("add", k, _number(1.0, k)))


# --- parts of the incomplete gamma functions --------------------------------------------------------------------------


def _more(change: Expr, size: Expr, steps: Expr) -> Expr:
    """Whether the last change was not yet nothing beside what it changed."""
    epsilon = _number(2.0**-53 if size.dtype is DType.FLOAT64 else 2.0**-24, size)
    changes = call("gt", call("abs", change), _times(call("abs", size), epsilon))
    return call("logical_and", changes, call("lt", steps, _number(_MOST, steps)))


def _gamma_series(dtype: DType) -> Iteration:
    """The sum over k of ``x ** k / ((a + 1) (a + 2) … (a + k))`` (DLMF 8.11.4)."""
    a, x, k, term, total = (Var(name, dtype) for name in ("a", "x", "k", "term", "total"))
    one = const(1.0, dtype)
    count = call("add", k, one)
    following = _times(term, call("div", x, call("add", a, count)))
    step = (count, following, call("add", total, following))
    return Iteration((a, x), (k, term, total), (const(0.0, dtype), one, one), _more(term, total, k), step, total)


def _gamma_fraction(dtype: DType) -> Iteration:
    """``1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / (x + 5 - a - …)))`` for x > a, by Lentz's algorithm (DLMF
    8.9.2)."""
    names = ("a", "x", "k", "b", "c", "d", "change", "value")
    a, x, k, b, c, d, change, value = (Var(name, dtype) for name in names)
    one = const(1.0, dtype)
    first = call("sub", call("add", x, one), a)
    start = (
        const(0.0, dtype), first, const(math.inf, dtype), call("div", one, first), const(2.0, dtype),
        call("div", one, first),
    )  # fmt: skip
    count, below = call("add", k, one), call("add", b, const(2.0, dtype))
    above = _times(count, call("sub", a, count))
    next_c = call("add", below, call("div", above, c))
    next_d = call("div", one, call("add", _times(above, d), below))
    factor = _times(next_c, next_d)
    step = (count, below, next_c, next_d, factor, _times(value, factor))
    # Two roundings may lie between a factor and one for ever.
    further = _more(call("sub", change, one), const(4.0, dtype), k)
    return Iteration((a, x), (k, b, c, d, change, value), start, further, step, value)


def _gamma_difference(dtype: DType) -> Iteration:
    """The sum over k >= 1 of ``(-x) ** k / (k! (a + k))`` (DLMF 8.7.3)."""
    a, x, k, power, term, total = (Var(name, dtype) for name in ("a", "x", "k", "power", "term", "total"))
    one, zero = const(1.0, dtype), const(0.0, dtype)
    count = call("add", k, one)
    factor = _times(power, call("neg", call("div", x, count)))
    following = call("div", factor, call("add", a, count))
    step = (count, factor, following, call("add", total, following))
    return Iteration((a, x), (k, power, term, total), (zero, one, one, zero), _more(term, total, k), step, total)


ITERATIONS: dict[str, Callable[[DType], Iteration]] = {
    "gcd": _gcd,
    "hermite_h": _polynomial(lambda x: call("add", x, x), _hermite_h),
    "hermite_he": _polynomial(lambda x: x, _hermite_he),
    "laguerre": _polynomial(lambda x: call("sub", _number(1.0, x), x), _laguerre),
    "legendre": _polynomial(lambda x: x, _legendre),
    "gamma_series": _gamma_series,
    "gamma_fraction": _gamma_fraction,
    "gamma_difference": _gamma_difference,
}
