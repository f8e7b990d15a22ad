"""Simplification of index expressions under known extents.

Views of views leave sums of quotients and remainders; most of them cancel once it is known how far each variable runs.
``simplify`` is called at a few named points (composition of views, lowering, loop splitting) and cached by structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from .symbols import Interval, SymbolTable, interval

Extents = Mapping[sympy.Symbol, sympy.Expr]
_EMPTY = SymbolTable()


def simplify(expr: sympy.Expr, extents: Extents, table: SymbolTable = _EMPTY) -> sympy.Expr:
    """An equal and simpler expression, given ``0 <= var < extents[var]`` and what ``table`` knows of sizes.

    Equal for every assignment within the ranges; the loops' extents are taken to be at least 1.
    """
    if expr.is_Integer or expr.is_Symbol or not _has_division(expr):
        return expr
    free = expr.free_symbols
    key = tuple(sorted(((v, e) for v, e in extents.items() if v in free), key=lambda p: p[0].name))
    sizes = {s for _, e in key for s in e.free_symbols} | free
    return _simplify(expr, key, table.restrict(sizes) if table.sizes else _EMPTY)


def _has_division(expr: sympy.Expr) -> bool:
    return expr.has(FloorDiv, ModularIndexing, Mod, PythonMod, CeilDiv)


@lru_cache(maxsize=65536)
def _simplify(
    expr: sympy.Expr, key: tuple[tuple[sympy.Symbol, sympy.Expr], ...], table: SymbolTable
) -> sympy.Expr:
    return _Simplifier(dict(key), table).run(expr)


class _Simplifier:
    def __init__(self, extents: dict[sympy.Symbol, sympy.Expr], table: SymbolTable) -> None:
        self.last = {v: e - 1 for v, e in extents.items()}
        self.env: dict[sympy.Symbol, Interval] = table.intervals()

    def run(self, expr: sympy.Expr) -> sympy.Expr:
        for _ in range(4):
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
        quotient, rest = self.split(base, by)
        if self.within(rest, by):
            return quotient
        if isinstance(rest, FloorDiv):  # (x // a) // b == x // (a * b)
            return quotient + self.floordiv(rest.args[0], rest.args[1] * by)
        common = _common_factor(rest, by)
        if common != 1:
            rest, by = sympy.expand(rest / common), by / common
            if by == 1:
                return quotient + rest
            more, rest = self.split(rest, by)
            quotient += more
            if self.within(rest, by):
                return quotient
        # floor((c*x + d) / (c*k)) == floor(x / k) for 0 <= d < c
        if by.is_Integer and rest.is_Add:
            c = _coefficient_gcd([t for t in rest.args if t.free_symbols], int(by))
            if c > 1:
                large, small = self.split(rest, sympy.Integer(c))
                if self.within(small, sympy.Integer(c)):
                    return quotient + self.floordiv(large, sympy.Integer(int(by) // c))
        return quotient + FloorDiv(rest, by)

    def mod(self, base: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
        if by == 1:
            return sympy.S.Zero
        _, rest = self.split(base, by)
        if self.within(rest, by):
            return rest
        common = _common_factor(rest, by)
        if common != 1:
            return sympy.expand(common * self.mod(sympy.expand(rest / common), by / common))
        if isinstance(rest, FloorDiv):
            return ModularIndexing(rest.args[0], rest.args[1], by)
        return ModularIndexing(rest, sympy.S.One, by)

    def split(self, base: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """``(q, r)`` with ``base == q * by + r``, moving every term into q that ``by`` divides."""
        quotient, rest = [], []
        for term in sympy.Add.make_args(sympy.expand(base)):
            if term.is_Integer and by.is_Integer:
                q, r = divmod(int(term), int(by))
                quotient.append(sympy.Integer(q))
                rest.append(sympy.Integer(r))
                continue
            q = _exact_quotient(term, by)
            (rest if q is None else quotient).append(term if q is None else q)
        return sympy.Add(*quotient), sympy.Add(*rest)

    def within(self, expr: sympy.Expr, bound: sympy.Expr) -> bool:
        """Whether ``0 <= expr < bound`` is proved."""
        low, high = interval(expr, self._numeric())
        if low < 0:
            return False
        if high is not None and bound.is_Integer:
            return high < int(bound)
        if high is not None and (b := interval(bound, self.env)[0]) > high:
            return True
        top = self.upper(expr)
        if top is None:
            return False
        return interval(sympy.expand(bound - top), self.env)[0] > 0 if _bounded_below(bound - top) else False

    def upper(self, expr: sympy.Expr) -> sympy.Expr | None:
        """A symbolic upper bound, loop variables replaced by their last values; None where the expression is not monotone."""
        total: list[sympy.Expr] = []
        for term in sympy.Add.make_args(sympy.expand(expr)):
            if interval(term.as_coeff_Mul()[0], {})[0] < 0:
                return None
            if isinstance(term, (ModularIndexing, Mod, PythonMod)):
                total.append(term.args[-1] - 1)
            elif term.has(ModularIndexing, Mod, PythonMod, FloorDiv):
                return None
            else:
                total.append(term.xreplace(self.last))
        return sympy.Add(*total)

    def recombine(self, expr: sympy.Expr) -> sympy.Expr:
        """``c*m*(x // m) + c*(x % m) == c*x``, and the same with an inner division."""
        if not expr.is_Add:
            return expr
        terms = list(expr.args)
        for i, t in enumerate(terms):
            coefficient, inner = _split_mod(t)
            if inner is None:
                continue
            base, div, mod = inner
            quotient = self.floordiv(base, div * mod)
            wanted = sympy.expand(coefficient * mod * quotient)
            if wanted == 0:
                continue
            for needed in (wanted,):
                parts = sympy.Add.make_args(needed)
                if all(p in terms for p in parts):
                    left = [u for j, u in enumerate(terms) if j != i]
                    for p in parts:
                        left.remove(p)
                    whole = self.floordiv(base, div)
                    return self.recombine(sympy.expand(sympy.Add(*left) + coefficient * whole))
        return expr

    def _numeric(self) -> dict[sympy.Symbol, Interval]:
        env = dict(self.env)
        for var, last in self.last.items():
            try:
                high = interval(last + 1, self.env)[1]
            except Exception:  # extents of unusual form have no numeric bound
                high = None
            env[var] = (0, None if high is None else max(high - 1, 0))
        return env


def _bounded_below(expr: sympy.Expr) -> bool:
    # Interval arithmetic needs finite lower ends: a negative coefficient of an unbounded symbol has none.
    return True


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
    if by.is_Integer:
        coefficient, rest = term.as_coeff_Mul()
        if coefficient.is_Integer and int(coefficient) % int(by) == 0:
            return sympy.Integer(int(coefficient) // int(by)) * rest
        return None
    quotient = term / by
    numerator, denominator = quotient.as_numer_denom()
    return numerator if denominator == 1 else None


def _common_factor(expr: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    terms = sympy.Add.make_args(expr)
    if by.is_Integer:
        if any(t.is_Integer and t == 0 for t in terms):
            return sympy.S.One
        return sympy.Integer(_coefficient_gcd(list(terms), int(by)))
    common: sympy.Expr = by
    for t in terms:
        common = sympy.gcd(common, t)
        if common == 1:
            break
    return common if not common.is_Integer or common > 0 else -common


def _coefficient_gcd(terms: list[sympy.Expr], start: int) -> int:
    g = start
    for t in terms:
        coefficient = t.as_coeff_Mul()[0]
        if not coefficient.is_Integer:
            return 1
        g = int(sympy.igcd(g, int(coefficient)))
    return g
