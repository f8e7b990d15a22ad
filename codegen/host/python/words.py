"""The words of a host program's text: names of tensors, sizes and ops, and literals."""

from __future__ import annotations

import keyword
import math
import re
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from ....ir.errors import IRError
from ....ir.graph.graph import ArgumentRef, ConstantRef, OpRef, Ref, TensorType
from ....ir.oracle.text import index_text
from ..memory.blocks import may_be_block
from .brackets import closes_at_end

# Before the name of an op that the text passes on rather than calls.
OP_OBJECT = "="
# Before that of one whose results lie in blocks of the pool.
OP_IN_BLOCKS = ">"


@dataclass(slots=True)
class Words:
    """Lines of a text, and what is known in it by which name."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    ops: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    hoisted: dict[sympy.Basic, str] = field(default_factory=dict)
    indent: str = "    "
    comment: str = ""
    # The GPU that is the current one while the program runs, "" where there is none such.
    guarded: str = ""
    # Shapes and strides of numbers as they are written.
    written: dict[tuple[sympy.Expr, ...], str] = field(default_factory=dict)

    def line(self, text: str, comment: str = "") -> None:
        if comment and comment != self.comment:
            self.lines.append(f"{self.indent}# {comment}")
        if comment:
            self.comment = comment
        self.lines.append(self.indent + text)

    def name(self, name: str) -> str:
        """A Python name for a tensor or symbol; the same one each time."""
        known = self.names.get(name)
        if known is None:
            plain = name.isidentifier() and name[-1] != "_"
            known = name if plain else re.sub(r"\W", "_", name).rstrip("_") or "x"
            if known[0].isdigit() or keyword.iskeyword(known) or known in ("torch", "args", "call", "max", "min"):
                known = f"v_{known}"
            while known in self.taken:
                known += "x"
            self.names[name] = known
            self.taken.add(known)
        return known

    def size(self, expr: sympy.Basic | int) -> str:
        """A size; anything but a number or a symbol was computed into a variable."""
        if isinstance(expr, int):
            return str(expr)
        if expr.is_Integer:
            return str(int(expr))
        if expr.is_Symbol:
            return self.name(expr.name)
        return self.hoisted[expr]

    def expression(self, expr: sympy.Basic) -> str:
        try:
            text = index_text(expr, lambda s: self.name(s.name))
        except IRError:
            # True divisions and the like: float arithmetic, which torch's printer knows.
            renamed = {s: sympy.Symbol(self.name(s.name), integer=True) for s in expr.free_symbols}
            text = re.sub(r"\bmath\.", "math_.", PythonPrinter().doprint(expr.xreplace(renamed)))
        while text.startswith("(") and text.endswith(")") and closes_at_end(text):
            text = text[1:-1]
        return text

    def sizes(self, exprs: tuple[sympy.Expr, ...]) -> str:
        known = self.written.get(exprs)
        if known is None:
            items = [self.size(e) for e in exprs]
            known = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            if all(isinstance(e, int) or e.is_Integer for e in exprs):
                self.written[exprs] = known
        return known

    def empty(self, kind: TensorType, rounded: bool = False) -> str:
        shape, strides, dtype = self.sizes(kind.shape), self.sizes(kind.strides), f"torch.{kind.dtype.value}"
        if may_be_block(kind):
            return f"block_cpu_({shape}, {strides}, {dtype}{', rounded=True' if rounded else ''})"
        if kind.device == "cpu":
            return f"empty_cpu_({shape}, {strides}, {dtype})"
        if kind.device == self.guarded:
            return f"empty_cuda_({shape}, {strides}, {dtype})"
        return f"empty_({shape}, {strides}, dtype={dtype}, device={kind.device!r})"

    def op(self, target: str) -> str:
        variable = re.sub(r"\W+", "_", target).strip("_") + "_"
        self.ops[variable] = target
        return variable

    def op_in_blocks(self, target: str) -> str:
        """An op whose results lie in blocks of the pool."""
        variable = re.sub(r"\W+", "_", target).strip("_") + "_in_blocks_"
        self.ops[variable] = f"{OP_IN_BLOCKS}{target}"
        return variable

    def op_object(self, target: str) -> str:
        """An op as a value, where ``op`` is the cheapest way to call it."""
        variable = re.sub(r"\W+", "_", target).strip("_") + "_op_"
        self.ops[variable] = f"{OP_OBJECT}{target}"
        return variable

    def constant(self, name: str) -> str:
        return self.constants.setdefault(name, f"constant_{len(self.constants)}_")

    def literal(self, arg: Any) -> str:
        """A library argument as Python."""
        match arg:
            case Ref(name) | ArgumentRef(name):
                return self.name(name)
            case ConstantRef(name):
                return self.constant(name)
            case OpRef(name):
                return self.op_object(name)
            case dict():
                return f"{{{', '.join(f'{k!r}: {self.literal(v)}' for k, v in arg.items())}}}"
            case tuple() | list():
                items = [self.literal(a) for a in arg]
                return f"[{', '.join(items)}]"
            case slice():
                return f"slice({self.literal(arg.start)}, {self.literal(arg.stop)}, {self.literal(arg.step)})"
            case sympy.Integer():
                return str(int(arg))
            case sympy.logic.boolalg.BooleanAtom():
                return str(bool(arg))
            case sympy.Basic():
                return repr(float(arg)) if arg.is_number else self.size(arg)
            case float() if not math.isfinite(arg):
                return f'float("{arg}")'
            case complex() if not (math.isfinite(arg.real) and math.isfinite(arg.imag)):
                return f"complex({self.literal(arg.real)}, {self.literal(arg.imag)})"
            case complex():
                return repr(arg)
            case torch.device():
                return f'"{arg}"'
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(arg)
        return repr(arg)
