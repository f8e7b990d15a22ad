"""Sizes as LLVM IR: expressions in size symbols, computed so that nothing wraps and nothing is divided by zero.

Callers of a library may give any sizes, and those are checked with what is computed here. So each step tells whether
it fits into 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from ...ir.expr.symbols import PositivePart
from ..kernel import EmitError

_COMPARED = {sympy.Eq: "eq", sympy.Ne: "ne", sympy.Lt: "slt", sympy.Le: "sle", sympy.Gt: "sgt", sympy.Ge: "sge"}
_STEPS = {"sadd": "add", "smul": "mul"}


@dataclass(slots=True)
class SizeWriter:
    """Lines of a function whose parameter ``%sizes`` holds the values of ``symbols`` in order.

    ``wrong`` is true of numbers that were not fit: it is the name of an i1.
    """

    symbols: Sequence[sympy.Symbol]
    lines: list[str] = field(default_factory=list)
    known: dict[sympy.Basic, str] = field(default_factory=dict)
    wrong: str = "false"
    count: int = 0

    def value(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def size(self, expr: sympy.Expr) -> str:
        """An integer, as i64. Raises: EmitError for what has no code."""
        if expr.is_Integer:
            if not -(1 << 63) <= int(expr) < 1 << 63:
                raise EmitError(f"the size {expr} has more than 64 bits")
            return str(int(expr))
        if expr not in self.known:
            self.known[expr] = self.computed(expr)
        return self.known[expr]

    def condition(self, test: sympy.Basic) -> str:
        """A condition, as i1. Raises: EmitError for what has no code."""
        if test not in self.known:
            self.known[test] = self.decided(test)
        return self.known[test]

    def decided(self, test: sympy.Basic) -> str:
        match test:
            case BooleanTrue():
                return "true"
            case BooleanFalse():
                return "false"
            case sympy.And():
                return self.joined("and", test.args)
            case sympy.Or():
                return self.joined("or", test.args)
            case sympy.Not():
                return self.value(f"xor i1 {self.condition(test.args[0])}, true")
        how = _COMPARED.get(type(test))
        if how is None:
            raise EmitError(f"no code for the condition {test} ({type(test).__name__})")
        left, right = (self.size(a) for a in test.args)
        return self.value(f"icmp {how} i64 {left}, {right}")

    def joined(self, how: str, tests: Sequence[Boolean]) -> str:
        first, *others = (self.condition(t) for t in tests)
        for other in others:
            first = self.value(f"{how} i1 {first}, {other}")
        return first

    def computed(self, expr: sympy.Expr) -> str:
        match expr:
            case sympy.Symbol():
                return self.symbol(expr)
            case sympy.Add():
                return self.folded("sadd", expr.args)
            case sympy.Mul() if all(a.is_integer for a in expr.args):
                return self.folded("smul", expr.args)
            case sympy.Pow() if expr.args[1].is_Integer and 0 < int(expr.args[1]) < 16:
                return self.folded("smul", [expr.args[0]] * int(expr.args[1]))
            case Max() | sympy.Max():
                return self.chosen("smax", [self.size(a) for a in expr.args])
            case Min() | sympy.Min():
                return self.chosen("smin", [self.size(a) for a in expr.args])
            case PositivePart():
                return self.chosen("smax", [self.size(expr.args[0]), "0"])
            case FloorDiv() | CleanDiv():
                return self.divided(self.size(expr.args[0]), expr.args[1])[0]
            case Mod() | PythonMod():
                return self.divided(self.size(expr.args[0]), expr.args[1])[1]
            case ModularIndexing():
                return self.divided(self.divided(self.size(expr.args[0]), expr.args[1])[0], expr.args[2])[1]
            case CeilDiv():
                quotient, rest = self.divided(self.size(expr.args[0]), expr.args[1])
                some = self.value(f"icmp ne i64 {rest}, 0")
                return self.value(f"add i64 {quotient}, {self.value(f'zext i1 {some} to i64')}")
        raise EmitError(f"no code for the size {expr} ({type(expr).__name__})")

    def symbol(self, symbol: sympy.Symbol) -> str:
        if symbol not in self.symbols:
            raise EmitError(f"nothing gives the size {symbol}; known are {', '.join(map(str, self.symbols)) or 'none'}")
        at = self.value(f"getelementptr inbounds i64, ptr %sizes, i64 {list(self.symbols).index(symbol)}")
        return self.value(f"load i64, ptr {at}")

    def folded(self, step: str, terms: Sequence[sympy.Expr]) -> str:
        first, *others = (self.size(t) for t in terms)
        for other in others:
            both = self.value(f"call {{ i64, i1 }} @llvm.{step}.with.overflow.i64(i64 {first}, i64 {other})")
            self.fault(self.value(f"extractvalue {{ i64, i1 }} {both}, 1"))
            first = self.value(f"extractvalue {{ i64, i1 }} {both}, 0")
        return first

    def chosen(self, how: str, values: Sequence[str]) -> str:
        first, *others = values
        for other in others:
            first = self.value(f"call i64 @llvm.{how}.i64(i64 {first}, i64 {other})")
        return first

    def divided(self, number: str, by: sympy.Expr) -> tuple[str, str]:
        """Quotient, rounded down, and remainder. A divisor below one is at fault."""
        divisor = self.size(by)
        if not by.is_Integer or int(by) < 1:
            self.fault(self.value(f"icmp slt i64 {divisor}, 1"))
            divisor = self.value(f"call i64 @llvm.smax.i64(i64 {divisor}, i64 1)")
        quotient, rest = (self.value(f"{op} i64 {number}, {divisor}") for op in ("sdiv", "srem"))
        negative = self.value(f"icmp slt i64 {rest}, 0")
        less = self.value(f"zext i1 {negative} to i64")
        more = self.value(f"select i1 {negative}, i64 {divisor}, i64 0")
        return self.value(f"sub i64 {quotient}, {less}"), self.value(f"add i64 {rest}, {more}")

    def fault(self, flag: str) -> None:
        self.wrong = flag if self.wrong == "false" else self.value(f"or i1 {self.wrong}, {flag}")
