"""Structural keys: equal for functions that differ only in names, so that equal kernels are compiled once.

Sizes are numbered in the order of the function's table, loops by depth, axes by place in their block, buffers and
values in order of appearance. Origins, hints and reasons do not count; what is known of a size (bounds, divisors)
does, since code is specialised on it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sympy

from ..expr.symbols import SymbolTable
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, is_value
from ..function.function import Dim, TensorFunction
from ..graph.graph import (
    CallRegion,
    CallTensor,
    Compute,
    Graph,
    Input,
    IRModule,
    Library,
    Node,
    Reduction,
    Ref,
    Scan,
    Scatter,
    TensorType,
    View,
    node_values,
)
from ..nest.hints import Annotations
from ..nest.loops import Block, Buffer, LoopNest, Store, Update
from ..nest.loops import Node as LoopNode
from .printer_expr import argument

Numbering = dict[sympy.Symbol, str]
# Numbers, and the numbered sizes; names that end in a digit stay.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|s\d+)(?![\w.])")


def structural_key(function: LoopNest | TensorFunction | Graph, module: IRModule | None = None) -> str:
    """SHA-256, in hex, of a function without its names. ``module`` resolves the functions that a graph calls.

    Equal keys mean equal calling conventions too: parameters and sizes count in their order. Of a graph's
    ``constants`` only names and types count; a cache of graphs must add what their values are.
    """
    return hashlib.sha256(structural_text(function, module).encode()).hexdigest()


def sizeless_key(nest: LoopNest) -> str:
    """SHA-256, in hex, of a nest without its names and its numbers: equal for nests that differ in sizes, be they
    numbers or symbols, and in the constants that follow from them."""
    lines = (line for line in structural_text(nest).split("\n") if not line.startswith("size "))
    return hashlib.sha256("\n".join(_NUMBER.sub("#", line) for line in lines).encode()).hexdigest()


def function_key(function: TensorFunction) -> str:
    """SHA-256, in hex, of what the code of a tensor function depends on: its structure, the names in it but its own,
    and typical sizes to the nearest power of two, since schedules go by them."""
    results = (r for s in function.stages for r in s.results)
    named = ((b.name for b in function.params), (d.var.name for d in function.dims), results)
    sizes = (f"{s.symbol.name} 2**{None if s.hint is None else s.hint.bit_length()}" for s in function.symbols.sizes)
    lines = [*sizes, *(" ".join(names) for names in named), structural_text(function)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def structural_text(function: LoopNest | TensorFunction | Graph, module: IRModule | None = None) -> str:
    """What ``structural_key`` hashes: equal texts are equal functions up to names."""
    writer = _StructureWriter(function.symbols, module)
    match function:
        case LoopNest():
            writer.nest(function)
        case TensorFunction():
            writer.function(function)
        case Graph():
            writer.graph(function)
    return "\n".join(writer.lines)


@lru_cache(maxsize=65536)
def _symbols_of(expr: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    return tuple(expr.free_symbols)


@lru_cache(maxsize=65536)
def _canonical(expr: sympy.Expr, symbols: tuple[sympy.Symbol, ...], numbers: tuple[str, ...]) -> str:
    """Text with numbered symbols. Sums and products are sorted by that text: sympy's own order goes by names."""
    table = dict(zip(symbols, numbers))

    def go(e: sympy.Expr) -> str:
        if e.is_Symbol:
            return table[e]
        if not e.args:
            return str(e)
        parts = [go(a) for a in e.args]
        if e.is_Add or e.is_Mul or type(e).__name__ in ("Max", "Min"):
            parts.sort()
        return f"{type(e).__name__}({','.join(parts)})"

    return go(expr)


class _StructureWriter:
    def __init__(self, table: SymbolTable, module: IRModule | None) -> None:
        self.lines: list[str] = []
        self.module = module
        self._sizes: Numbering = {s.symbol: f"s{k}" for k, s in enumerate(table.sizes)}
        # Those in force where we are.
        self._numbers: Numbering = self._sizes
        self._names: dict[str, str] = {}
        # Each distinct value is a line, and is known by the line's number however often it is shared.
        self._values: dict[str, str] = {}
        self._seen: dict[int, str] = {}
        for s in table.sizes:
            self.lines.append(f"size {s.lower} {s.upper} {s.divisor}")

    # --- parts --------------------------------------------------------------------------------------------------------

    def name(self, name: str) -> str:
        return self._names.setdefault(name, f"n{len(self._names)}")

    def index(self, expr: sympy.Expr) -> str:
        if expr.is_Integer:
            return str(expr)
        if expr.is_Symbol:
            return self._numbers.get(expr) or f"?{expr.name}"
        symbols = _symbols_of(expr)
        return _canonical(expr, symbols, tuple(self._numbers.get(s) or f"?{s.name}" for s in symbols))

    def indices(self, exprs: Iterable[Index]) -> str:
        return ",".join([self.value(e) if is_value(e) else self.index(e) for e in exprs])

    def type(self, kind: TensorType | Buffer) -> str:
        return f"{kind.dtype.value}[{self.indices(kind.shape)}|{self.indices(kind.strides)}]"

    def value(self, e: Expr) -> str:
        """The number of a value, whose line is written where it is new."""
        known = self._seen.get(id(e))
        if known is not None:
            return known
        match e:
            case Load():
                text = f"{self.name(e.buffer)}[{self.indices(e.indices)}]{e.dtype.value}"
            case Const():
                text = f"{e.value!r}:{e.dtype.value}"
            case Var():
                text = f"var {e.name}:{e.dtype.value}"
            case IndexValue():
                text = f"index {self.index(e.index)}:{e.dtype.value}"
            case Cast():
                text = f"{'stored' if e.when_stored else 'cast'} {self.value(e.value)}:{e.dtype.value}"
            case Call():
                text = f"{e.fn}({','.join([self.value(a) for a in e.args])}){e.dtype.value}"
            case Select():
                text = f"{self.value(e.condition)}?{self.value(e.if_true)}:{self.value(e.if_false)}"
        number = self._values.get(text)
        if number is None:
            number = self._values[text] = f"v{len(self._values)}"
            self.lines.append(text)
        self._seen[id(e)] = number
        return number

    # --- nests --------------------------------------------------------------------------------------------------------

    def nest(self, nest: LoopNest) -> None:
        for b in nest.params:
            self.lines.append(f"param {self.name(b.name)} {self.type(b)} {b.scope.value} {b.align}")
        for b in nest.locals:
            self.lines.append(f"local {self.name(b.name)} {self.type(b)} {b.scope.value} {b.align}")
        self.lines.append(f"outputs {','.join(map(self.name, nest.outputs))} {_annotations(nest.annotations)}")
        self._nodes(nest.body, 0)

    def _nodes(self, nodes: tuple[LoopNode, ...], depth: int) -> None:
        for n in nodes:
            if isinstance(n, Block):
                self._block(n)
                continue
            self.lines.append(f"{n.kind.value} {self.index(n.extent)} {_annotations(n.annotations)}{{")
            outer = self._numbers
            self._numbers = {**outer, n.var: f"l{depth}"}
            self._nodes(n.body, depth + 1)
            self._numbers = outer
            self.lines.append("}")

    def _block(self, block: Block) -> None:
        bindings = self.indices(block.bindings)
        where = ",".join(f"{self.index(b.lhs)}<{self.index(b.rhs)}" for b in block.predicate)
        axes = ",".join(f"{a.kind.value} {self.index(a.extent)}" for a in block.axes)
        self.lines.append(f"block {axes}|{bindings}|{where}|{_annotations(block.annotations)}")
        outer = self._numbers
        self._bind(*(a.var for a in block.axes))
        for s in block.body:
            self._statement(s)
        self._numbers = outer

    def _bind(self, *axes: sympy.Symbol) -> None:
        self._numbers = {**self._sizes, **{v: f"a{k}" for k, v in enumerate(axes)}}
        self._seen.clear()

    def _statement(self, s: Store | Update) -> None:
        if isinstance(s, Store):
            value = self.value(s.value)
            self.lines.append(f"{self.name(s.buffer)}[{self.indices(s.indices)}]={value}")
            return
        values = ",".join([self.value(v) for v in s.values])
        targets = ",".join([f"{self.name(t.buffer)}[{self.indices(t.indices)}]" for t in s.targets])
        self.lines.append(f"{targets}{'' if s.begins else '+'}={s.monoid.name} {values}")

    # --- tensor functions -------------------------------------------------------------------------------------------

    def function(self, function: TensorFunction) -> None:
        for b in function.params:
            self.lines.append(f"param {self.name(b.name)} {self.type(b)} {b.align}")
        if function.table:
            self.lines.append("table")
        for kind, dims in function.dims_by_kind.items():
            self.lines.append(f"{kind.value} {self.indices(d.extent for d in dims)}")
        self._bind(*(d.var for d in function.dims))
        for s in function.stages:
            role = "" if s.role is None else s.role.value
            how = f"{'' if s.monoid is None else s.monoid.name} {s.scan} {self.name(s.into) if s.into else ''} {role}"
            axes, over = self._dims(function.axes_of(s)), self._dims(function.over_of(s))
            values = ",".join([self.value(v) for v in s.values])
            own = "own" if s.axes is not None else ""
            kept = {k for o in s.origins for k in o.keeps}
            own += f" keeps {sorted(kept)}" if kept else ""
            self.lines.append(f"{','.join(map(self.name, s.results))}={how} {own} {axes}|{over} {values}")
        for o in function.outputs:
            self.lines.append(f"{self.name(o.buffer.name)}[{self.indices(o.indices)}]={self.name(o.result)}")

    def _dims(self, dims: tuple[Dim, ...]) -> str:
        return self.indices(d.var for d in dims)

    # --- graphs -------------------------------------------------------------------------------------------------------

    def graph(self, graph: Graph) -> None:
        for i in graph.inputs:
            if isinstance(i, Input):
                self.lines.append(f"input {self.name(i.name)} {self._tensor(i.type)} {i.static}")
            else:
                self.lines.append(f"input {self.index(i.value)}")
        for name, constant in graph.constants.items():
            kind = constant.kind if isinstance(constant.kind, str) else self._tensor(constant.kind)
            self.lines.append(f"constant {name} {kind}")
        for n in graph.nodes:
            self._node(n)
        outputs = [
            "None" if o is None else self.name(o) if isinstance(o, str) else self.index(o) for o in graph.outputs
        ]
        self.lines.append(f"return {','.join(outputs)}")

    def _bound_values(self, axes: tuple[sympy.Symbol, ...], values: tuple[Expr, ...]) -> str:
        self._bind(*axes)
        text = ",".join([self.value(v) for v in values])
        self._numbers = self._sizes
        return text

    def _tensor(self, kind: TensorType | None) -> str:
        return "None" if kind is None else f"{self.type(kind)}{kind.device}"

    def _node(self, n: Node) -> None:
        if isinstance(n, CallRegion):
            around, self._names = self._names, {}
            self._seen.clear()
            self.graph(n.region)
            self._names = around
            self._seen.clear()
        types = ",".join(map(self._tensor, n.types))
        match n:
            case Compute() | Reduction() | Scan():
                how = ""
                if isinstance(n, Reduction):
                    how = f"{n.monoid.name} {len(n.axes)} {self.indices(n.reduce_shape)} "
                    self._bind(*n.axes, *n.reduce_axes)
                else:
                    self._bind(*n.axes)
                    if isinstance(n, Scan):
                        how = f"{n.monoid.name} along {self.index(n.scan_axis)} "
                how += ",".join([self.value(v) for v in node_values(n)])
            case Scatter():
                how = f"{n.monoid.name if n.monoid else 'set'} into {self._bound_values(n.axes, n.values[:1])} "
                how += f"over {self.indices(n.source_shape)} {self._bound_values(n.source_axes, n.values[1:])}"
            case View():
                how = f"view {self.name(n.source)} {self.index(n.offset)} "
                self._bind(*n.axes)
                how += self.indices(n.indices)
            case Library():
                named = "".join(f",{k}={self._argument(v)}" for k, v in n.kwargs)
                how = f"{n.target} {self._argument(n.args)}{named}"
            case CallTensor():
                args = ",".join(map(self.name, n.args))
                into = ",".join("" if t is None else self.name(t) for t in n.into)
                how = f"call {self._callee(n.function)} {args} {self.indices(n.sizes)} {into} {n.count}"
            case CallRegion():
                rows = (n.carried, *n.taken, n.shared)
                how = f"repeat {n.times} {' '.join(','.join(map(self.name, row)) for row in rows)}"
        self._numbers = self._sizes
        self.lines.append(f"{','.join(map(self.name, n.names))} {types} {how}")

    def _callee(self, function: str) -> str:
        callee = self.module.functions.get(function) if self.module else None
        return function if callee is None else structural_key(callee, self.module)

    def _argument(self, arg: Any) -> str:
        match arg:
            case Ref():
                return self.name(arg.name)
            case tuple() | list():
                return f"{type(arg).__name__}({','.join(map(self._argument, arg))})"
            case sympy.Expr():
                return f"size {self.index(arg)}"
        return argument(arg)


def _annotations(annotations: Annotations) -> str:
    return repr(annotations) if annotations else ""
