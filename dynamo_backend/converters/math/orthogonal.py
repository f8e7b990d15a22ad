"""Orthogonal polynomials whose degree is data.

Those of Hermite, Laguerre and Legendre go by their recurrence, as torch's do (``ir/expr/iterations.py``).

Chebyshev polynomials of all four kinds have trigonometric and hyperbolic forms. With ``a = acos |x|`` inside the unit
interval and ``acosh |x|`` outside, where cosines become hyperbolic ones, the first kind is ``cos(n a)``, the second
``sin((n + 1) a) / sin(a)``, and the third and fourth are the quotients of cosines and of sines of ``(n + 1/2) a`` and
``a / 2``. A negative argument changes the sign of odd degrees, and the third kind with the fourth.
"""

from __future__ import annotations

import math

from ....ir.expr.dtypes import DType
from ..context import ImportContext, Scalar, Tensor
from ..formula import Formula, Workspace
from ..registry import converter

# What torch converts to an integer; other degrees count as negative.
_LARGEST = float(1 << 63)


def _degree(w: Workspace, n: Formula) -> Formula:
    """The whole part of a degree, or -1 where there is none."""
    valid = (n > -1.0) & (n < _LARGEST)
    return w.name(valid.where(n.call("trunc"), n.like(-1.0)))


def _chebyshev(w: Workspace, kind: str, x: Formula, n: Formula) -> Formula:
    size = w.name(abs(x))
    inside = size < 1.0
    angle = w.name(inside.where(size.call("acos"), size.call("acosh")))
    odd = w.name((n * 0.5).call("floor") * 2.0).call("ne", n)
    negative = x < 0.0

    def cosine(v: Formula) -> Formula:
        v = w.name(v)
        return inside.where(v.call("cos"), v.call("cosh"))

    def sine(v: Formula) -> Formula:
        v = w.name(v)
        return inside.where(v.call("sin"), v.call("sinh"))

    if kind == "t":
        value, at_one = cosine(n * angle), n.like(1.0)
    elif kind == "u":
        value, at_one = sine((n + 1.0) * angle) / sine(angle), n + 1.0
    else:
        of_sines = ~negative if kind == "w" else negative
        half, wide = angle * 0.5, (n + 0.5) * angle
        value = of_sines.where(sine(wide) / sine(half), cosine(wide) / cosine(half))
        at_one = of_sines.where(n * 2.0 + 1.0, 1.0)
    # What infinity makes of the recurrence: from the third degree on the difference of two.
    endless = (n < 3.0).where(size, math.nan)
    value = w.name(size.equals(1.0).where(at_one, size.equals(math.inf).where(endless, value)))
    value = (negative & odd).where(-value, value)
    value = n.equals(0.0).where(n.like(1.0), value)
    return (n < 0.0).where(n.like(0.0), value)


def _register(kind: str, shifted: bool) -> None:
    name = f"aten.special_{'shifted_' if shifted else ''}chebyshev_polynomial_{kind}"

    @converter(f"{name}.default", f"{name}.x_scalar", f"{name}.n_scalar")
    def polynomial(ctx: ImportContext, x: Tensor | Scalar, n: Tensor | Scalar) -> Tensor:
        w = Workspace(ctx)
        place, degree = w.operand(x), _degree(w, w.operand(n))
        if shifted:
            place = w.name(place * 2.0 - 1.0)
        return w.result(_chebyshev(w, kind, place, degree))


def _register_recurrence(function: str, suffix: str, limits: tuple[float, float] | None = None) -> None:
    """One of ``ir.iterations``; beyond a degree, that of float32 or of float64, it is NaN."""
    name = f"aten.special_{function}_polynomial_{suffix}"
    fn = f"{function}_{suffix}" if function == "hermite" else function

    @converter(f"{name}.default", f"{name}.x_scalar", f"{name}.n_scalar")
    def polynomial(ctx: ImportContext, x: Tensor | Scalar, n: Tensor | Scalar) -> Tensor:
        w = Workspace(ctx, ctx.type().dtype.compute)
        place, degree = w.operand(x), _degree(w, w.operand(n))
        one = place.like(1.0)
        # Where no step is needed, however high the degree: steps are zero there and the value is that of no degree.
        known = degree < 1.0
        if limits is not None:
            limit = limits[w.dtype is DType.FLOAT64]
            known = known | (degree > limit)
        elif fn == "laguerre":
            known = known | place.equals(0.0)
        else:
            known = known | abs(place).equals(1.0)
            odd = (degree * 0.5).call("floor") * 2.0
            one = ((place < 0.0) & odd.call("ne", degree)).where(-one, 1.0)
        known = w.name(known)
        value = known.where(one, place.call(fn, known.where(degree.like(0.0), degree)))
        if limits is not None:
            value = (degree > limit).where(degree.like(math.nan), value)
        return w.result((degree < 0.0).where(degree.like(0.0), value))


_register_recurrence("hermite", "h", (128.0, 512.0))
_register_recurrence("hermite", "he", (128.0, 512.0))
_register_recurrence("laguerre", "l")
_register_recurrence("legendre", "p")
for _kind in "tuvw":
    _register(_kind, False)
    _register(_kind, True)
