"""A function of a host program in LLVM IR under construction: its lines, and sizes that are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from ...ir.expr.symbols import PositivePart
from ..kernel import EmitError


@dataclass(slots=True)
class SizedCode:
    """``name`` is that of the program. ``known`` has the registers of sizes: those of symbols are put there before
    anything is computed of them."""

    name: str
    lines: list[str] = field(default_factory=list)
    known: dict[sympy.Expr, str] = field(default_factory=dict)
    count: int = 0

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def fresh(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def value(self, text: str) -> str:
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    def at(self, base: str, word: int) -> str:
        return self.value(f"getelementptr inbounds i64, ptr %{base}, i64 {word}")

    def load(self, base: str, word: int, kind: str = "i64") -> str:
        return self.value(f"load {kind}, ptr {self.at(base, word)}")

    def store(self, base: str, word: int, value: str, kind: str = "i64") -> None:
        self.line(f"store {kind} {value}, ptr {self.at(base, word)}")

    # --- sizes ------------------------------------------------------------------------------------------------------

    def size(self, expr: sympy.Expr | int) -> str:
        """A size as a 64-bit integer; each expression is computed once."""
        if isinstance(expr, int) or expr.is_Integer:
            return str(int(expr))
        known = self.known.get(expr)
        if known is None:
            if expr.is_Symbol:
                raise EmitError(f"{self.name}: nothing gives the size {expr}")
            known = self.known[expr] = self.computed(expr)
        return known

    def computed(self, expr: sympy.Expr) -> str:
        match expr:
            case sympy.Add():
                return self.folded("add i64 {}, {}", expr.args)
            case sympy.Mul() if all(a.is_integer for a in expr.args):
                return self.folded("mul i64 {}, {}", expr.args)
            case sympy.Pow() if expr.args[1].is_Integer and 0 < int(expr.args[1]) < 16:
                return self.folded("mul i64 {}, {}", [expr.args[0]] * int(expr.args[1]))
            case Max() | sympy.Max():
                return self.folded("call i64 @llvm.smax.i64(i64 {}, i64 {})", expr.args)
            case PositivePart():
                return self.value(f"call i64 @llvm.smax.i64(i64 {self.size(expr.args[0])}, i64 0)")
            case Min() | sympy.Min():
                return self.folded("call i64 @llvm.smin.i64(i64 {}, i64 {})", expr.args)
            case FloorDiv() | CleanDiv():
                return self.divided(self.size(expr.args[0]), expr.args[1])[0]
            case Mod() | PythonMod():
                return self.divided(self.size(expr.args[0]), expr.args[1])[1]
            case ModularIndexing():
                return self.divided(self.divided(self.size(expr.args[0]), expr.args[1])[0], expr.args[2])[1]
            case CeilDiv():
                negative = self.value(f"sub i64 0, {self.size(expr.args[0])}")
                return self.value(f"sub i64 0, {self.divided(negative, expr.args[1])[0]}")
        raise EmitError(f"{self.name}: no native code for the size {expr} ({type(expr).__name__})")

    def folded(self, form: str, terms: Sequence[sympy.Expr]) -> str:
        first, *others = (self.size(t) for t in terms)
        for other in others:
            first = self.value(form.format(first, other))
        return first

    def divided(self, number: str, by: sympy.Expr) -> tuple[str, str]:
        """Quotient, rounded down, and remainder. What may be zero stays with Python, which raises."""
        positive = any(a.is_Integer and a > 0 for a in (by.args if isinstance(by, (Max, sympy.Max)) else (by,)))
        if not positive:
            raise EmitError(f"{self.name}: no native code for a division by {by}, which may be zero")
        divisor = self.size(by)
        quotient, rest = (self.value(f"{op} i64 {number}, {divisor}") for op in ("sdiv", "srem"))
        negative = self.value(f"icmp slt i64 {rest}, 0")
        less = self.value(f"zext i1 {negative} to i64")
        more = self.value(f"select i1 {negative}, i64 {divisor}, i64 0")
        return self.value(f"sub i64 {quotient}, {less}"), self.value(f"add i64 {rest}, {more}")
