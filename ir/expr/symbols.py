"""What is known about symbolic sizes: bounds, divisors and typical values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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

from ..errors import IRError

# What kernels and host programs compute in, beside sums, products and powers.
_OPERATIONS = (
    CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod, sympy.Max, sympy.Min,
)  # fmt: skip


class PositivePart(sympy.Function):
    """``max(x, 0)`` of an integer that may be negative, though sympy is told that every symbol is none: unlike a
    ``Max``, it is left as it stands.

    Numbers that may be negative are two symbols, ``PositivePart(x) - PositivePart(-x)``, which the host program makes,
    so all that is computed of them is right about their sign.
    """

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return sympy.Integer(max(int(x), 0)) if x.is_Integer else None


# Inclusive bounds; None above means unbounded.
Interval = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Size:
    """One size symbol: inclusive bounds (``upper`` None: unbounded), a number that divides it, and for heuristics a
    typical value, and the ``most`` that it is where a program runs: code is right beyond it."""

    symbol: sympy.Symbol
    lower: int = 0
    upper: int | None = None
    divisor: int = 1
    hint: int | None = field(default=None, compare=False)
    most: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SymbolTable:
    """The size symbols of a graph or nest, in the order in which they are passed to kernels."""

    sizes: tuple[Size, ...] = ()
    # Typical values that were asked for: not compared, as the hints of sizes are not.
    _typical: dict[tuple[sympy.Expr, int], int] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _weighed: list[SymbolTable] = field(default_factory=list, init=False, repr=False, compare=False, hash=False)

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        return tuple(s.symbol for s in self.sizes)

    def restrict(self, used: set[sympy.Symbol]) -> SymbolTable:
        """Only the symbols in ``used``, order kept."""
        return SymbolTable(tuple(s for s in self.sizes if s.symbol in used))

    def intervals(self) -> dict[sympy.Symbol, Interval]:
        return {s.symbol: (s.lower, s.upper) for s in self.sizes}

    def hint(self, expr: sympy.Expr | int, default: int = 64) -> int:
        """A typical value of an expression over sizes: for heuristics, never for decisions of correctness."""
        if isinstance(expr, int):
            return expr
        if expr.is_Integer:
            return int(expr)
        found = self._typical.get((expr, default))
        if found is None:
            found = self._typical[expr, default] = self._evaluated(expr, default)
        return found

    def weighed(self) -> tuple[SymbolTable, ...]:
        """The tables at whose typical values costs are compared, by their mean: this one, and where a program is told
        the most that a size is, one with that instead. What saves nothing at typical sizes may save much at those."""
        if not self._weighed:
            largest = tuple(s if s.most is None else replace(s, hint=s.most) for s in self.sizes)
            alike = all(a.hint == b.hint for a, b in zip(self.sizes, largest, strict=True))
            self._weighed.extend([self] if alike else [self, SymbolTable(largest)])
        return tuple(self._weighed)

    def _evaluated(self, expr: sympy.Expr, default: int) -> int:
        known = {s.symbol: sympy.Integer(s.hint if s.hint is not None else max(default, s.lower)) for s in self.sizes}
        value = expr.xreplace(known)
        if value.free_symbols:
            value = value.xreplace({s: sympy.Integer(default) for s in value.free_symbols})
        return int(value)

    def most(self, expr: sympy.Expr) -> int | None:
        """The most that an expression is where the program runs, None where that is not known: for heuristics."""
        known = {s.symbol: (s.lower, s.upper if s.most is None else s.most) for s in self.sizes}
        try:
            return interval(expr, known)[1]
        except IRError:
            return None

    def bounds(self, expr: sympy.Expr, loops: Mapping[sympy.Symbol, sympy.Expr] | None = None) -> Interval:
        """Inclusive numeric bounds of an index expression; ``loops`` gives the extents of loop variables."""
        env = self.intervals()
        for var, extent in (loops or {}).items():
            high = interval(extent, env)[1]
            env[var] = (0, None if high is None else max(high - 1, 0))
        return interval(expr, env)

    def divisor(self, expr: sympy.Expr) -> int:
        """A number (the greatest that is easily seen) that divides the expression for all values of all symbols."""
        return divisor(expr, {s.symbol: s.divisor for s in self.sizes})

    def is_divisible(self, expr: sympy.Expr, by: int) -> bool:
        return self.divisor(expr) % by == 0


def is_indexed(expr: sympy.Basic) -> bool:
    """Whether the outermost operation of an integer expression is one that kernels and host programs compute in."""
    if expr.is_Pow or isinstance(expr, PowByNatural):
        return bool(expr.args[1].is_Integer and expr.args[1] >= 0)
    return bool(expr.is_Integer or expr.is_Symbol or expr.is_Add or expr.is_Mul) or isinstance(expr, _OPERATIONS)


def divisor(expr: sympy.Expr, known: Mapping[sympy.Symbol, int]) -> int:
    """A divisor of ``expr`` given divisors of its symbols; 0 for the constant zero, which everything divides."""
    if expr.is_Integer:
        return abs(int(expr))
    if expr.is_Symbol:
        return known.get(expr, 1)
    if expr.is_Add:
        return math.gcd(*(divisor(a, known) for a in expr.args))
    if expr.is_Mul:
        return math.prod(divisor(a, known) for a in expr.args)
    if isinstance(expr, (Max, Min)):
        return math.gcd(*(divisor(a, known) for a in expr.args))
    if isinstance(expr, (Mod, PythonMod)):
        return math.gcd(divisor(expr.args[0], known), divisor(expr.args[1], known))
    if isinstance(expr, ModularIndexing) and expr.args[1] == 1:
        return math.gcd(divisor(expr.args[0], known), divisor(expr.args[2], known))
    if isinstance(expr, (FloorDiv, CleanDiv)) and expr.args[1].is_Integer:
        base, by = divisor(expr.args[0], known), int(expr.args[1])
        return base // by if base % by == 0 else 1
    return 1


def interval(expr: sympy.Expr, env: Mapping[sympy.Symbol, Interval]) -> Interval:
    """Inclusive bounds by interval arithmetic; symbols that ``env`` lacks are not negative. Raises IRError."""
    if expr.is_Integer:
        return (int(expr), int(expr))
    if expr.is_Symbol:
        return env.get(expr, (0, None))
    args = [interval(a, env) for a in expr.args]
    if expr.is_Add:
        return (sum(lo for lo, _ in args), _sum_or_none([hi for _, hi in args]))
    if expr.is_Mul:
        result = args[0]
        for a in args[1:]:
            result = _mul(result, a)
        return result
    if (expr.is_Pow or isinstance(expr, PowByNatural)) and expr.args[1].is_Integer and expr.args[1] >= 0:
        result = (1, 1)
        for _ in range(int(expr.args[1])):
            result = _mul(result, args[0])
        return result
    match expr:
        case FloorDiv() | CleanDiv():
            return _floordiv(args[0], args[1], 0)
        case CeilDiv():
            return _floordiv(args[0], args[1], 1)
        case Mod() | PythonMod():
            return _mod(args[0], args[1])
        case ModularIndexing():
            return _mod(_floordiv(args[0], args[1], 0), args[2])
        case sympy.Max() | Max():
            highs = [hi for _, hi in args if hi is not None]
            return (max(lo for lo, _ in args), max(highs) if len(highs) == len(args) else None)
        case PositivePart():
            return (0, None)
        case sympy.Min() | Min():
            highs = [hi for _, hi in args if hi is not None]
            return (min(lo for lo, _ in args), min(highs) if highs else None)
    raise IRError(f"no bounds known for {expr} ({type(expr).__name__})")


def _sum_or_none(values: list[int | None]) -> int | None:
    total = 0
    for v in values:
        if v is None:
            return None
        total += v
    return total


_INFINITE = 1 << 80
_FAR = 1 << 60


def _mul(a: Interval, b: Interval) -> Interval:
    # A huge integer stands for infinity inside, and its negative for a lower bound that there is not.
    corners = [
        x * y for x in (a[0], _INFINITE if a[1] is None else a[1]) for y in (b[0], _INFINITE if b[1] is None else b[1])
    ]
    high = max(corners)
    return (max(min(corners), -_INFINITE), None if high >= _FAR else high)


def _floordiv(a: Interval, b: Interval, up: int) -> Interval:
    """Of a positive divisor, rounded down, or up where ``up`` is 1."""
    low, high = max(b[0], 1), b[1]

    def div(x: int, y: int) -> int:
        return -(-x // y) if up else x // y

    if a[0] <= -_FAR:
        least = -_INFINITE
    elif a[0] < 0:
        least = div(a[0], low)
    else:
        least = div(a[0], _INFINITE if high is None else max(high, low))
    if a[1] is None:
        return (least, None)
    return (least, div(a[1], low) if a[1] >= 0 else div(a[1], _INFINITE if high is None else max(high, low)))


def _mod(a: Interval, b: Interval) -> Interval:
    """Of a positive divisor; the result is never negative."""
    low, high = max(b[0], 1), None if b[1] is None else max(b[1] - 1, 0)
    if a[0] < 0 or a[1] is None:
        return (0, high)
    return a if a[1] < low else (0, a[1] if high is None else min(high, a[1]))
