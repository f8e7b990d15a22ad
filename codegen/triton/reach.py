"""How far the indices of a kernel reach, as an expression in its sizes.

A kernel whose sizes are symbols has indices of 32 bits at the sizes where all of them fit, and of 64 bits at others. A
launch tells by the largest index that the kernel computes, in lanes that a mask switches off too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import (
    CeilDiv,
    CleanDiv,
    FloorDiv,
    Max,
    Min,
    Mod,
    ModularIndexing,
    PowByNatural,
    PythonMod,
)

from ...ir.errors import IRError
from ...ir.expr.symbols import interval
from ..kernel import INDEX_MAX
from .index import Ranges

# The least and the greatest value of an expression at given sizes.
Ends: TypeAlias = tuple[sympy.Expr, sympy.Expr]


def reach_of(indices: Iterable[sympy.Expr], ranges: Ranges) -> sympy.Expr | None:
    """The magnitude that no index, nor any number on the way to one, exceeds, in sizes; None where none is known, and
    where it is above 2**31 - 1 at all sizes."""
    reach = _Reach(ranges)
    try:
        for index in dict.fromkeys(indices):
            reach.note(index)
    except IRError:
        return None
    found = Max(*reach.greatest())
    least = found.xreplace({s.symbol: sympy.Integer(s.lower) for s in ranges.table.sizes})
    return None if not least.is_Integer or int(least) > INDEX_MAX else found


class _Reach:
    """Interval arithmetic whose ends are expressions in sizes."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        # Bounds of magnitudes of what was noted.
        self.noted: dict[sympy.Expr, None] = {}
        self.least = 0
        self.least_sizes = {s.symbol: s.symbol + s.lower for s in ranges.table.sizes if s.lower > 0}
        self._known: dict[sympy.Expr, Ends] = {}

    def note(self, expr: sympy.Expr) -> Ends:
        """Let an expression count, and give its ends. Sums and products wrap and come back, so that of their parts only
        those count that are divided or compared."""
        low, high = self.ends(expr)
        self.noted[high] = None
        if not low.is_Integer:
            self.noted[-low] = None
        elif low < 0:
            self.least = min(self.least, int(low))
        return low, high

    def greatest(self) -> list[sympy.Expr]:
        """What was noted, less what never exceeds another."""
        kept: list[sympy.Expr] = []
        relaxed = dict.fromkeys((*map(_relaxed, self.noted), sympy.Integer(-self.least)))
        # The longest first: it mostly exceeds the others.
        for e in sorted(relaxed, key=lambda e: -len(e.args)):
            if not any(self._exceeds(k, e) for k in kept):
                kept = [k for k in kept if not self._exceeds(e, k)]
                kept.append(e)
        return kept

    def _exceeds(self, one: sympy.Expr, other: sympy.Expr) -> bool:
        """Whether ``one >= other`` at all sizes; not where that is not known, as of fractions inside of other terms."""
        rest = sympy.expand((one - _without_quotients(other)).xreplace(self.least_sizes))
        scale = math.lcm(*(int(t.as_coeff_Mul()[0].q) for t in sympy.Add.make_args(rest)))
        try:
            return interval(sympy.expand(rest * scale), {})[0] >= 0
        except IRError:
            return False

    def ends(self, expr: sympy.Expr) -> Ends:
        """Bounds of an expression; what is divided or compared on the way to it is noted. Raises IRError."""
        found = self._known.get(expr)
        if found is None:
            low, high = self._ends(expr)
            known = self.ranges.of(expr)[0]
            found = self._known[expr] = (sympy.Integer(known), high) if known >= 0 else (low, high)
        return found

    def _ends(self, expr: sympy.Expr) -> Ends:
        if expr.is_Integer:
            return expr, expr
        if expr.is_Symbol:
            extent = self.ranges.extents.get(expr)  # type: ignore[call-overload]
            return sympy.S.Zero, expr if extent is None else self.note(extent)[1] - 1
        if expr.is_Add:
            parts = [self.ends(a) for a in expr.args]
            return sympy.Add(*(low for low, _ in parts)), sympy.Add(*(high for _, high in parts))
        if expr.is_Mul:
            result, *rest = map(self.ends, expr.args)
            for other in rest:
                result = self._product(result, other)
            return result
        if (expr.is_Pow or isinstance(expr, PowByNatural)) and expr.args[1].is_Integer and expr.args[1] >= 0:
            base, result = self.ends(expr.args[0]), (sympy.S.One, sympy.S.One)
            for _ in range(int(expr.args[1])):
                result = self._product(result, base)
            return result
        ends = [self.note(a) for a in expr.args]
        match expr:
            case FloorDiv() | CleanDiv() | CeilDiv():
                return self._quotient(ends[0], ends[1], expr.args[1], isinstance(expr, CeilDiv))
            case Mod() | PythonMod():
                return sympy.S.Zero, ends[1][1] - 1
            case ModularIndexing():
                return sympy.S.Zero, ends[2][1] - 1
            case sympy.Max() | Max():
                return Max(*(low for low, _ in ends)), Max(*(high for _, high in ends))
            case sympy.Min() | Min():
                return Min(*(low for low, _ in ends)), Min(*(high for _, high in ends))
        raise IRError(f"no bounds known for {expr} ({type(expr).__name__})")

    def _product(self, a: Ends, b: Ends) -> Ends:
        for one, other in ((a, b), (b, a)):
            if one[0] == one[1] and one[0].is_Integer:
                ends = one[0] * other[0], one[0] * other[1]
                return ends if one[0] >= 0 else (ends[1], ends[0])
        if _is_positive(a) and _is_positive(b):
            return a[0] * b[0], a[1] * b[1]
        most = self._magnitude(a) * self._magnitude(b)
        return -most, most

    def _quotient(self, a: Ends, b: Ends, by: sympy.Expr, up: bool) -> Ends:
        """Of the divisor ``by``, which is not less than one."""
        if by.is_Integer:
            divide = CeilDiv if up else FloorDiv
            return divide(a[0], by), divide(a[1], by)
        if not _is_positive(a):
            most = self._magnitude(a)
            return -most, most
        if by != b[1] or up:
            return sympy.S.Zero, a[1]
        # (n * by - 1) // by is n - 1; else each term is divided that can be, and those above zero grow by no division.
        whole = _divided(a[1] + 1, by)
        if whole is not None:
            return sympy.S.Zero, whole - 1
        parts = [(t, _divided(t, by)) for t in sympy.Add.make_args(_relaxed(a[1]))]
        rest = [t if q is None else q for t, q in parts if q is not None or not _is_never_negative(-t)]
        sound = all(q is not None or _is_never_negative(t) or _is_never_negative(-t) for t, q in parts)
        return sympy.S.Zero, sympy.Add(*rest) if sound else a[1]

    def _magnitude(self, ends: Ends) -> sympy.Expr:
        low, high = -ends[0], ends[1]
        if self._exceeds(high, low):
            return high
        return low if self._exceeds(low, high) else Max(low, high)


def _relaxed(expr: sympy.Expr) -> sympy.Expr:
    """Not less: ``c * (a // b) <= c / b * a``."""
    terms = []
    for term in sympy.Add.make_args(sympy.expand(expr)):
        coefficient, rest = term.as_coeff_Mul()
        quotients = [f for f in sympy.Mul.make_args(rest) if isinstance(f, FloorDiv) and f.args[1].is_Integer]
        if coefficient > 0 and quotients and int(coefficient) % int(quotients[0].args[1]) == 0:
            base, by = quotients[0].args
            others = rest / quotients[0]
            if _is_never_negative(others):
                term = sympy.expand(int(coefficient) // int(by) * others * base)
        terms.append(term)
    return sympy.Add(*terms)


def _divided(expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
    """A product without the factors of another; None where it lacks one."""
    left = list(sympy.Mul.make_args(expr))
    for factor in sympy.Mul.make_args(by):
        if factor not in left:
            return None
        left.remove(factor)
    return sympy.Mul(*left)


def _without_quotients(expr: sympy.Expr) -> sympy.Expr:
    """Not less, and a polynomial where only terms that are never negative have quotients."""
    terms = []
    for term in sympy.Add.make_args(expr):
        quotients = [q for q in sympy.Mul.make_args(term) if isinstance(q, FloorDiv) and q.args[1].is_Integer]
        if quotients and _is_never_negative(term) and all(map(_is_never_negative, quotients)):
            term = term.xreplace({q: q.args[0] / q.args[1] for q in quotients})
        terms.append(term)
    return sympy.Add(*terms)


def _is_never_negative(expr: sympy.Expr) -> bool:
    """Whether that is plain, of sizes of which nothing is known."""
    return interval(expr, {})[0] >= 0


def _is_positive(ends: Ends) -> bool:
    return bool(ends[0].is_Integer and ends[0] >= 0)
