"""Index expressions of a kernel: their text, their ranges, and which bounds are proved.

``Ranges`` knows how far every loop variable of the program runs, lanes that a mask switches off included.
"""

from __future__ import annotations

from collections.abc import Callable

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
from ...ir.expr.symbols import Interval, SymbolTable, interval
from ..kernel import INDEX_MAX, EmitError


class Ranges:
    """Inclusive ranges of the program's index symbols, sizes included."""

    def __init__(self, table: SymbolTable) -> None:
        self.table = table
        self.env: dict[sympy.Symbol, Interval] = table.intervals()
        self.extents: dict[sympy.Symbol, sympy.Expr] = {}

    def loop(self, var: sympy.Symbol, extent: sympy.Expr) -> None:
        """A loop variable: it runs over ``range(extent)``."""
        high = self.of(extent)[1]
        self.env[var] = (0, None if high is None else max(high - 1, 0))
        self.extents[var] = extent

    def value(self, var: sympy.Symbol, expr: sympy.Expr) -> None:
        """A variable that stands for an expression."""
        self.env[var] = self.of(expr)

    def of(self, expr: sympy.Expr) -> Interval:
        """Inclusive bounds; unbounded where the form is unknown."""
        try:
            return interval(expr, self.env)
        except IRError:
            return (-(1 << 62), None)

    def fits_int32(self, expr: sympy.Expr) -> bool:
        """Whether the expression and every part of it stay below 2**31."""
        low, high = self.of(expr)
        if low < -INDEX_MAX or high is None or high > INDEX_MAX:
            return False
        # Sums and products wrap and come back; what is divided or compared has to be what it is.
        divided = {a for e in sympy.preorder_traversal(expr) if not (e.is_Add or e.is_Mul) for a in e.args}
        return all(self.fits_int32(a) for a in divided)

    def below(self, lhs: sympy.Expr, rhs: sympy.Expr) -> bool:
        """Whether ``lhs < rhs`` in every lane of every program, tails included."""
        low, high = self.of(rhs)[0], self.of(lhs)[1]
        if high is not None and high < low:
            return True
        top = self._upper(lhs)
        return top is not None and self.of(sympy.expand(self._exact(rhs) - top))[0] > 0

    def _upper(self, expr: sympy.Expr) -> sympy.Expr | None:
        """A bound from above in sizes alone: every loop variable at its last value. None where that is no bound."""
        total: list[sympy.Expr] = []
        for term in sympy.Add.make_args(sympy.expand(expr)):
            variables = term.free_symbols & self.extents.keys()
            if not variables:
                total.append(term)
                continue
            if not self._rises(term):
                return None
            total.append(term.xreplace({v: self.extents[v] - 1 for v in variables}))
        return self._relaxed(sympy.expand(sympy.Add(*total)))

    def _rises(self, expr: sympy.Expr) -> bool:
        """Whether an expression is never less where loop variables are greater."""
        if expr.is_Symbol or not expr.free_symbols & self.extents.keys():
            return True
        if expr.is_Mul:
            return all(self.of(a)[0] >= 0 and self._rises(a) for a in expr.args)
        if isinstance(expr, (FloorDiv, CleanDiv, CeilDiv)):
            base, by = expr.args
            return not by.free_symbols & self.extents.keys() and self.of(by)[0] > 0 and self._rises(base)
        return isinstance(expr, (sympy.Add, sympy.Max, sympy.Min, Max, Min)) and all(map(self._rises, expr.args))

    def _relaxed(self, expr: sympy.Expr) -> sympy.Expr:
        """Not less than ``expr``: a quotient is exact where the size's divisor says so, else ``c * (a // b) <= c/b *
        a``."""
        expr = self._exact(expr)
        terms = []
        for term in sympy.Add.make_args(sympy.expand(expr)):
            coefficient, rest = term.as_coeff_Mul()
            if isinstance(rest, FloorDiv) and rest.args[1].is_Integer and coefficient > 0:
                by = int(rest.args[1])
                if int(coefficient) % by == 0:
                    term = (int(coefficient) // by) * rest.args[0]
            terms.append(term)
        return sympy.expand(sympy.Add(*terms))

    def _exact(self, expr: sympy.Expr) -> sympy.Expr:
        """Equal to ``expr``, with divisions that known divisors make exact carried out."""

        def visit(e: sympy.Expr) -> sympy.Expr:
            if not e.args or not e.has(FloorDiv, CleanDiv, CeilDiv):
                return e
            e = e.func(*(visit(a) for a in e.args))
            if isinstance(e, (FloorDiv, CleanDiv, CeilDiv)) and e.args[1].is_Integer:
                base, by = sympy.expand(e.args[0]), int(e.args[1])
                constant, rest = base.as_coeff_Add()
                if constant.is_Integer and self.table.is_divisible(rest, by):
                    extra = -(-int(constant) // by) if isinstance(e, CeilDiv) else int(constant) // by
                    return sympy.expand(rest / by) + extra
            return e

        return visit(expr)


def index_text(expr: sympy.Expr, name: Callable[[sympy.Symbol], str], ranges: Ranges, integer: str) -> str:
    """An index expression as Triton text, computed in the type ``integer``. Raises EmitError on forms that are no
    index."""

    def factor(e: sympy.Expr) -> str:
        return f"({of(e)})" if e.is_Add or e.is_Mul else of(e)

    def of(e: sympy.Expr) -> str:
        if e.is_Integer:
            return str(int(e)) if e >= 0 else f"({int(e)})"
        if e.is_Symbol:
            return name(e)
        if e.is_Add:
            return _sum(e, of)
        if e.is_Mul:
            return " * ".join(factor(a) for a in _constant_last(e.args))
        args = [factor(a) for a in e.args]
        match e:
            case FloorDiv() | CleanDiv():
                return _division("//", "mlc_floordiv", e.args[0], args[0], args[1])
            case CeilDiv():
                return f"(({args[0]} + {args[1]} - 1) // {args[1]})"
            case Mod() | PythonMod():
                return _division("%", "mlc_remainder", e.args[0], args[0], args[1])
            case ModularIndexing():
                quotient = args[0] if e.args[1] == 1 else _division("//", "mlc_floordiv", e.args[0], args[0], args[1])
                return _division("%", "mlc_remainder", e.args[0], quotient, args[2])
            case Max() | sympy.Max():
                return _folded("tl.maximum", args)
            case Min() | sympy.Min():
                return _folded("tl.minimum", args)
            case PowByNatural():
                return _power(args[0], e.args[1])
        if e.is_Pow and e.args[1].is_Integer and e.args[1] > 0:
            return _power(args[0], e.args[1])
        raise EmitError(f"{e} ({type(e).__name__}) is no index expression")

    def _division(op: str, floor: str, numerator: sympy.Expr, a: str, b: str) -> str:
        # Triton divides towards zero, as C does; quotients of what may be negative need the floor.
        if ranges.of(numerator)[0] >= 0:
            return f"({a} {op} {b})"
        return f"{floor}({a}, tl.cast({b}, {integer}))"

    return of(expr)


def _constant_last(args: tuple[sympy.Expr, ...]) -> list[sympy.Expr]:
    return sorted(args, key=lambda a: a.is_Integer)


def _sum(expr: sympy.Expr, of: Callable[[sympy.Expr], str]) -> str:
    """Terms with larger coefficients first, constants last; a negative term is subtracted."""

    def rank(term: sympy.Expr) -> tuple[int, str]:
        return (-abs(int(term.as_coeff_Mul()[0])) if not term.is_Integer else 1 << 62, str(term))

    text = ""
    for term in sorted(expr.args, key=lambda t: (_is_negative(t), rank(t))):
        negative = _is_negative(term)
        part = of(-term if negative else term)
        text = (f"{text} - {part}" if negative else f"{text} + {part}") if text else (f"-{part}" if negative else part)
    return text


def _is_negative(term: sympy.Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _folded(fn: str, args: list[str]) -> str:
    text = args[0]
    for a in args[1:]:
        text = f"{fn}({text}, {a})"
    return text


def _power(base: str, exponent: sympy.Expr) -> str:
    if not exponent.is_Integer or exponent <= 0:
        raise EmitError(f"{base} ** {exponent}: an index takes whole, constant, positive powers alone")
    return "(" + " * ".join([base] * int(exponent)) + ")"
