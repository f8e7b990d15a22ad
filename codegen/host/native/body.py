"""The body of a native host program under construction: lines of LLVM IR, words of the table, of the frame and of
scratch, sizes that are computed once, and who holds the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from ....ir.expr.symbols import PositivePart
from ...kernel import EmitError
from .table import OWN, place


@dataclass(slots=True)
class Body:
    """``name`` is that of the program. In the text, ``%table`` is the table, ``%frame``, ``%numbers`` and
    ``%arguments`` are words on the stack, and ``%thread`` keeps the state of the thread while the lock is released."""

    name: str
    lines: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    own: dict[tuple[str, str], int] = field(default_factory=dict)
    known: dict[sympy.Expr, str] = field(default_factory=dict)
    released: bool = False
    count: int = 0
    # Scratch words of the step at hand, and of the step that needs most of them.
    scratch: int = 0
    most_scratch: int = 0

    # --- text -------------------------------------------------------------------------------------------------------

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

    def function(self, name: str) -> str:
        return self.load("table", place(name), "ptr")

    def own_word(self, kind: str, name: str) -> str:
        """A word of the table that is this program's own."""
        return self.load("table", OWN + self.own.setdefault((kind, name), len(self.own)), "ptr")

    def constant(self, kind: str, values: Sequence[int]) -> str:
        text = f"[{len(values)} x {kind}] [{', '.join(f'{kind} {v}' for v in values)}]"
        return self.constants.setdefault(text, f"@c{len(self.constants)}")

    def numbers(self, count: int) -> int:
        """Scratch words of this step."""
        at, self.scratch = self.scratch, self.scratch + count
        self.most_scratch = max(self.most_scratch, self.scratch)
        return at

    def array(self, exprs: Sequence[sympy.Expr]) -> str:
        """A pointer to sizes."""
        if not exprs:
            return "null"
        if all(e.is_Integer for e in exprs):
            return self.constant("i64", [int(e) for e in exprs])
        values = [self.size(e) for e in exprs]
        start = self.numbers(len(values))
        for k, v in enumerate(values):
            self.store("numbers", start + k, v)
        return self.at("numbers", start)

    # --- the interpreter's lock -------------------------------------------------------------------------------------

    def release(self) -> None:
        if not self.released:
            self.let_go()
            self.released = True

    def acquire(self) -> None:
        if self.released:
            self.take_back()
            self.released = False

    def let_go(self) -> None:
        thread = self.value(f"call ptr {self.function('PyEval_SaveThread')}()")
        self.line(f"store ptr {thread}, ptr %thread")

    def take_back(self) -> None:
        restore = self.function("PyEval_RestoreThread")
        thread = self.value("load ptr, ptr %thread")
        self.line(f"call void {restore}(ptr {thread})")

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
