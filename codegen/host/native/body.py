"""The body of a native host program under construction: words of the table, of the frame and of scratch, and who holds
the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from ..code import SizedCode
from .table import OWN, place


@dataclass(slots=True)
class Body(SizedCode):
    """In the text, ``%table`` is the table, ``%frame``, ``%numbers`` and ``%arguments`` are words on the stack, and
    ``%thread`` keeps the state of the thread while the lock is released."""

    constants: dict[str, str] = field(default_factory=dict)
    own: dict[tuple[str, str], int] = field(default_factory=dict)
    released: bool = False
    # Scratch words of the step at hand, and of the step that needs most of them.
    scratch: int = 0
    most_scratch: int = 0

    # --- text -------------------------------------------------------------------------------------------------------

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
