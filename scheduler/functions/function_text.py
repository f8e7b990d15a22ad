"""A tensor function as text: what its key is made of, and what reports show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ...ir.expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, is_value
from ...ir.nest.loops import Buffer
from ...ir.text.printer_expr import index_text
from .function import TensorFunction


def function_key(function: TensorFunction) -> str:
    """SHA-256, in hex, of a function without its name. Typical sizes count to the nearest power of two, since schedules
    go by them."""
    return hashlib.sha256(function_text(function).encode()).hexdigest()


def function_text(function: TensorFunction) -> str:
    """The function, one definition a line; equal functions give equal texts."""
    writer = _Writer()
    lines = writer.lines
    for s in function.symbols.sizes:
        typical = None if s.hint is None else s.hint.bit_length()
        lines.append(f"size {s.symbol} in [{s.lower}, {s.upper}], divisible by {s.divisor}, 2**{typical}")
    if function.table:
        lines.append("for each row of a table")
    lines += [f"{kind} {d.var} < {index_text(d.extent)}" for kind, dims in
              (("row", function.rows), ("inner", function.inner), ("extra", function.extra)) for d in dims]  # fmt: skip
    lines += [f"input {_buffer(b)}" for b in function.inputs]
    for stage in function.stages:
        values = [writer.value(v) for v in stage.values]
        how = f"{stage.monoid.name} {'up to' if stage.scan else 'of'} " if stage.monoid is not None else ""
        place = "at every point" if stage.inner else "at every row"
        if stage.axes is not None:
            place = f"at every [{', '.join(a.name for a in stage.axes)}]"
        if stage.over is not None:
            place += f" over [{', '.join(a.name for a in stage.over)}]"
        if stage.into:
            place += f" into {stage.into}"
        lines.append(f"{', '.join(stage.results)} = {how}{', '.join(values)} {place}")
    for o in function.outputs:
        lines.append(f"output {_buffer(o.buffer)} at [{writer.indices(o.indices)}] = {o.result}")
    return "\n".join(lines)


def _buffer(b: Buffer) -> str:
    shape, strides = (", ".join(map(index_text, e)) for e in (b.shape, b.strides))
    return f"{b.name}: {b.dtype.value}[{shape}] strides [{strides}] align {b.align}"


class _Writer:
    """Texts of values; expressions are graphs with shared parts, and each part is written once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[int, str] = {}
        self._by_text: dict[str, str] = {}
        # Keeps the ids above from being given to other objects.
        self._alive: list[Expr] = []

    def indices(self, items: Iterable[Index]) -> str:
        return ", ".join(self.value(i) if is_value(i) else index_text(i) for i in items)

    def value(self, e: Expr) -> str:
        known = self._known.get(id(e))
        if known is not None:
            return known
        match e:
            case Load():
                text = f"{e.buffer}[{self.indices(e.indices)}]"
            case Const():
                text = f"{e.value!r}:{e.dtype.value}"
            case Var():
                text = e.name
            case IndexValue():
                text = f"index({index_text(e.index)}):{e.dtype.value}"
            case Cast():
                text = f"{e.dtype.value}({self.value(e.value)})"
            case Call():
                text = f"{e.fn}({', '.join([self.value(a) for a in e.args])}):{e.dtype.value}"
            case Select():
                text = f"select({self.value(e.condition)}, {self.value(e.if_true)}, {self.value(e.if_false)})"
        if isinstance(e, (Call, Select)):
            name = self._by_text.get(text)
            if name is None:
                name = self._by_text[text] = f"v{len(self._by_text)}"
                self.lines.append(f"{name} = {text}")
            text = name
        self._known[id(e)] = text
        self._alive.append(e)
        return text
