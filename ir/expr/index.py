"""Simplification of index expressions under known extents.

Views of views leave sums of quotients and remainders; most of them cancel once it is known how far each variable runs.
``simplify`` is called at a few named points (composition of views, lowering, loop splitting) and cached by structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from ..errors import IRError
from .symbols import Interval, SymbolTable, interval

Extents = Mapping[sympy.Symbol, sympy.Expr]
_EMPTY = SymbolTable()
_ROUNDS = 4


def simplify(expr: sympy.Expr, extents: Extents, table: SymbolTable = _EMPTY) -> sympy.Expr:
    """An equal and simpler expression, given ``0 <= var < extents[var]`` and what ``table`` knows of sizes.

    Equal for every assignment within the ranges, where the extents of loops and all divisors are at least 1 (elsewhere
    there is no element, and nothing to compute).
    """
    if expr.is_Integer or expr.is_Symbol:
        return expr
    free = _free_if_divided(expr)
    if free is None:
        return expr
    key = tuple((v, e) for v, e in extents.items() if v in free)
    if not table.sizes:
        return _simplify(expr, key, _EMPTY)
    sizes = set(free)
    for _, e in key:
        sizes |= e.free_symbols
    return _simplify(expr, key, table.restrict(sizes))


def expanded(expr: sympy.Expr) -> sympy.Expr:
    """As ``sympy.expand``. A sum of products of numbers and symbols, as most indices are, is returned as it is."""
    for term in expr.args if expr.is_Add else (expr,):
        if term.args and not (term.is_Mul and not any([factor.args for factor in term.args])):
            return sympy.expand(expr)
    return expr


def is_within(expr: sympy.Expr, bound: sympy.Expr, extents: Extents, table: SymbolTable) -> bool:
    """Whether ``0 <= expr < bound`` is proved, given ``0 <= var < extents[var]`` and what ``table`` knows of sizes."""
    return _Simplifier(dict(extents), table).within(expr, bound)


@lru_cache(maxsize=65536)
def _free_if_divided(expr: sympy.Expr) -> frozenset[sympy.Symbol] | None:
    return frozenset(expr.free_symbols) if _has_division(expr) else None


@lru_cache(maxsize=65536)
def divisions(expr: sympy.Expr) -> int:
    """How many quotients and remainders of whole numbers an expression has."""
    return len(expr.atoms(FloorDiv, ModularIndexing, Mod, PythonMod, CeilDiv))


def _has_division(expr: sympy.Expr) -> bool:
    return expr.has(FloorDiv, ModularIndexing, Mod, PythonMod, CeilDiv)


@lru_cache(maxsize=65536)
def _simplify(expr: sympy.Expr, key: tuple[tuple[sympy.Symbol, sympy.Expr], ...], table: SymbolTable) -> sympy.Expr:
    return _Simplifier(dict(key), table).run(expr)


class _Simplifier:
    def __init__(self, extents: dict[sympy.Symbol, sympy.Expr], table: SymbolTable) -> None:
        self.last = {v: e - 1 for v, e in extents.items()}
        self.sizes: dict[sympy.Symbol, Interval] = table.intervals()
        for e in extents.values():
            if e.is_Symbol:
                self._at_least_one(self.sizes, e)
        self.env = dict(self.sizes)
        for v, e in extents.items():
            high = _interval(e, self.sizes)[1]
            self.env[v] = (0, None if high is None else max(high - 1, 0))

    @staticmethod
    def _at_least_one(env: dict[sympy.Symbol, Interval], size: sympy.Symbol) -> None:
        low, high = env.get(size, (0, None))
        env[size] = (max(low, 1), high)

    def run(self, expr: sympy.Expr) -> sympy.Expr:
        for _ in range(_ROUNDS):
            new = self.visit(expr)
            if new == expr:
                break
            expr = new
        return expr

    def visit(self, expr: sympy.Expr) -> sympy.Expr:
        if not expr.args or not _has_division(expr):
            return expr
        args = [self.visit(a) for a in expr.args]
        match expr:
            case FloorDiv():
                return self.floordiv(args[0], args[1])
            case Mod() | PythonMod():
                return self.mod(args[0], args[1])
            case ModularIndexing():
                return self.mod(self.floordiv(args[0], args[1]), args[2])
            case sympy.Add():
                return self.recombine(sympy.expand(sympy.Add(*args)))
            case sympy.Mul():
                return sympy.expand(sympy.Mul(*args))
            case _:
                return expr.func(*args)

    def floordiv(self, base: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        if by == 1:
            return base
        if by == 0:  # an extent of which it only shows here that the loop has no iteration
            return sympy.S.Zero
        quotient, rest = self.split(base, by)
        if self.within(rest, by):
            return quotient
        if self.within(rest + by, by):  # a flip: T - 1 - t
            return quotient - 1
        if isinstance(rest, FloorDiv):  # (x // a) // b == x // (a * b)
            return quotient + self.floordiv(rest.args[0], sympy.expand(rest.args[1] * by))
        if isinstance(rest, ModularIndexing):  # (y % m) // k == (y // k) % (m / k) where k divides m
            x, div, modulus = rest.args
            inner = _exact_quotient(modulus, by)
            if inner is not None:
                return quotient + self.mod(self.floordiv(x, sympy.expand(div * by)), inner)
        common = _common_factor(rest, by)
        if common != 1:
            return quotient + self.floordiv(sympy.expand(rest / common), sympy.expand(by / common))
        for large, _, _, inner in self.peel(rest, by):  # (c*x + d) // (c*k) == x // k for 0 <= d < c
            return quotient + self.floordiv(large, inner)
        return quotient + FloorDiv(rest, by)

    def mod(self, base: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        if by == 1 or by == 0:
            return sympy.S.Zero
        _, rest = self.split(base, by)
        if self.within(rest, by):
            return rest
        if self.within(rest + by, by):
            return rest + by
        common = _common_factor(rest, by)
        if common != 1:
            return sympy.expand(common * self.mod(sympy.expand(rest / common), sympy.expand(by / common)))
        if isinstance(rest, ModularIndexing) and _exact_quotient(rest.args[2], by) is not None:
            return self.mod(self.floordiv(rest.args[0], rest.args[1]), by)
        for large, small, c, inner in self.peel(rest, by):  # (c*x + d) % (c*k) == c * (x % k) + d for 0 <= d < c
            return sympy.expand(c * self.mod(large, inner) + small)
        if isinstance(rest, FloorDiv):
            return ModularIndexing(rest.args[0], rest.args[1], by)
        return ModularIndexing(rest, sympy.S.One, by)

    def split(self, base: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """``(q, r)`` with ``base == q * by + r``, moving every term into q that ``by`` divides."""
        base = sympy.expand(base)
        if by.is_Add:
            return self.split_by_sum(base, by)
        quotient, rest = [], []
        for term in sympy.Add.make_args(base):
            if term.is_Integer and by.is_Integer:
                q, r = divmod(int(term), int(by))
                quotient.append(sympy.Integer(q))
                rest.append(sympy.Integer(r))
                continue
            exact = _exact_quotient(term, by)
            (rest if exact is None else quotient).append(term if exact is None else exact)
        return sympy.Add(*quotient), sympy.Add(*rest)

    def split_by_sum(self, base: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """Long division by one term of a sum (a size like ``s0 + 1``); kept where the remainder is in range."""
        for lead in by.args:
            if lead.is_Integer:
                continue
            quotient, rest = sympy.S.Zero, base
            for _ in range(_ROUNDS):
                found = [q for t in sympy.Add.make_args(rest) if (q := _exact_quotient(t, lead)) is not None and q != 0]
                if not found:
                    break
                quotient += sympy.Add(*found)
                rest = sympy.expand(base - quotient * by)
            if quotient != 0 and self.within(rest, by):
                return quotient, rest
        return sympy.S.Zero, base

    def peel(self, rest: sympy.Expr, by: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr]]:
        """``(x, d, c, k)`` with ``rest == c*x + d``, ``0 <= d < c`` and ``by == c*k``: at most one."""
        if not rest.is_Add:
            return
        for c in _shared_factors(rest, by):
            large, small = self.split(rest, c)
            if large != 0 and small != rest and self.within(small, c):
                inner = _exact_quotient(by, c)
                if inner is not None:
                    yield large, small, c, inner
                    return

    def within(self, expr: sympy.Expr, bound: sympy.Expr) -> bool:
        """Whether ``0 <= expr < bound`` is proved."""
        low, high = _interval(expr, self.env)
        if low >= 0 and high is not None and high < _interval(bound, self.sizes)[0]:
            return True
        if isinstance(expr, FloorDiv) and self.within(expr.args[0], sympy.expand(expr.args[1] * bound)):
            return True
        env = dict(self.sizes)
        for factor in sympy.Mul.make_args(bound):  # it divides, so it is not zero
            if factor.is_Symbol:
                self._at_least_one(env, factor)
        if low < 0 and not _is_at_least(self.extreme(expr, False), 0, env):
            return False
        top = self.extreme(expr, True)
        return top is not None and _is_at_least(bound - top, 1, env)

    def extreme(self, expr: sympy.Expr, upper: bool) -> sympy.Expr | None:
        """A bound of an expression in sizes alone, term by term; None where a factor has none."""
        total: list[sympy.Expr] = []
        for term in sympy.Add.make_args(sympy.expand(expr)):
            coefficient, rest = term.as_coeff_Mul()
            if not coefficient.is_Integer:
                return None
            greatest = (coefficient > 0) == upper
            for factor in sympy.Mul.make_args(rest):
                bound = self._factor(factor, greatest)
                if bound is None:
                    return None
                coefficient = coefficient * bound
            total.append(coefficient)
        return sympy.Add(*total)

    def _factor(self, factor: sympy.Expr, greatest: bool) -> sympy.Expr | None:
        """A bound of a non-negative factor."""
        base, power = factor.as_base_exp()
        if base.is_Symbol and power.is_Integer and power > 0:
            last = self.last.get(base, base)
            return (last if greatest else sympy.S.Zero if base in self.last else base) ** power
        if factor is sympy.S.One:
            return factor
        low, high = _interval(factor, self.env)
        if low < 0:
            return None
        if not greatest:
            return sympy.Integer(low)
        if isinstance(factor, (ModularIndexing, Mod, PythonMod)) and high is None:
            return factor.args[-1] - 1
        return None if high is None else sympy.Integer(high)

    def recombine(self, expr: sympy.Expr) -> sympy.Expr:
        """``c*m*(x // (d*m)) + c*((x // d) % m) == c*(x // d)``."""
        if not expr.is_Add:
            return expr
        terms = list(expr.args)
        for i, t in enumerate(terms):
            coefficient, inner = _split_mod(t)
            if inner is None:
                continue
            base, div, mod = inner
            wanted = sympy.expand(coefficient * mod * self.floordiv(base, sympy.expand(div * mod)))
            parts = sympy.Add.make_args(wanted)
            if wanted != 0 and all(p in terms for p in parts):
                left = [u for j, u in enumerate(terms) if j != i]
                for p in parts:
                    left.remove(p)
                whole = self.floordiv(base, div)
                return self.recombine(sympy.expand(sympy.Add(*left) + coefficient * whole))
        return expr


def _interval(expr: sympy.Expr, env: Mapping[sympy.Symbol, Interval]) -> Interval:
    """As ``interval``; forms of which nothing is known have no bounds."""
    try:
        return interval(expr, env)
    except IRError:
        return (-1 << 80, None)


def _is_at_least(expr: sympy.Expr | None, least: int, env: Mapping[sympy.Symbol, Interval]) -> bool:
    if expr is None:
        return False
    expr = sympy.expand(expr)
    return _interval(expr, env)[0] >= least or _interval(sympy.factor_terms(expr), env)[0] >= least


def _split_mod(term: sympy.Expr) -> tuple[sympy.Expr, tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None]:
    factors = sympy.Mul.make_args(term)
    mods = [f for f in factors if isinstance(f, (ModularIndexing, Mod, PythonMod))]
    if len(mods) != 1:
        return term, None
    coefficient = sympy.Mul(*(f for f in factors if f is not mods[0]))
    m = mods[0]
    if isinstance(m, ModularIndexing):
        return coefficient, (m.args[0], m.args[1], m.args[2])
    return coefficient, (m.args[0], sympy.S.One, m.args[1])


def _exact_quotient(term: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
    """``term / by`` if it is a polynomial with integer coefficients."""
    coefficient, rest = term.as_coeff_Mul()
    number, monomial = by.as_coeff_Mul()
    if not (coefficient.is_Integer and number.is_Integer) or int(coefficient) % int(number):
        return None
    whole = sympy.Integer(int(coefficient) // int(number))
    if monomial is sympy.S.One:
        return whole * rest
    powers = rest.as_powers_dict()
    for base, power in monomial.as_powers_dict().items():
        left = powers.get(base, 0) - power
        if not (left.is_Integer and left >= 0):
            return None
        powers[base] = left
    return whole * sympy.Mul(*(base**power for base, power in powers.items()))


def _common_factor(expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """A positive monomial that divides every term of both."""
    terms = sympy.Add.make_args(expr)
    if expr == 0:
        return sympy.S.One
    number, monomial = by.as_coeff_Mul()
    if not number.is_Integer or monomial.is_Add:
        return sympy.S.One
    common = int(number)
    shared = monomial.as_powers_dict() if monomial is not sympy.S.One else {}
    for t in terms:
        coefficient, rest = t.as_coeff_Mul()
        if not coefficient.is_Integer:
            return sympy.S.One
        common = math.gcd(common, int(coefficient))
        powers = rest.as_powers_dict()
        shared = {b: min(p, powers[b]) for b, p in shared.items() if b in powers and powers[b].is_Integer}
    return sympy.Integer(common) * sympy.Mul(*(b**p for b, p in shared.items()))


def _shared_factors(expr: sympy.Expr, by: sympy.Expr) -> list[sympy.Expr]:
    """Factors that ``by`` shares with single terms of ``expr``, the greatest number first."""
    found = {_common_factor(t, by) for t in expr.args if t.free_symbols}
    return sorted((c for c in found if c != 1 and c != by), key=lambda c: (-int(c.as_coeff_Mul()[0]), str(c)))
