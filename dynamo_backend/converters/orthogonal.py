"""Chebyshev polynomials of all four kinds, whose degree is data: their trigonometric and hyperbolic forms.

With ``a = acos |x|`` inside the unit interval and ``acosh |x|`` outside, where cosines become hyperbolic ones, the
first kind is ``cos(n a)``, the second ``sin((n + 1) a) / sin(a)``, and the third and fourth are the quotients of
cosines and of sines of ``(n + 1/2) a`` and ``a / 2``. A negative argument changes the sign of odd degrees, and the
third kind with the fourth.
"""

from __future__ import annotations

from .context import ImportContext, Scalar, Tensor
from .formula import Formula, Workspace
from .registry import converter

# What torch converts to an integer; other degrees count as negative.
_LARGEST = float(1 << 62)


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
    value = w.name(size.equals(1.0).where(at_one, value))
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


for _kind in "tuvw":
    _register(_kind, False)
    _register(_kind, True)
