"""Loop nests as plain Python functions over NumPy arrays: the text that the oracle runs.

One statement a scalar step, every index checked before it is used, nothing reordered, nothing clever. ``Select``
becomes ``if``, so a branch that is not taken is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
from ..expr.monoid import State
from ..expr.symbols import PositivePart
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, is_value
from ..nest.loops import BLOCK_KINDS, Axis, AxisKind, Block, LoopKind, LoopNest, Node, Store, Update, walk_nodes
from .ops import converter, function, scalar

Name = Callable[[sympy.Symbol], str]
# Python allows a hundred levels of indentation; a chain of selects goes on in a function of its own before that.
_MAX_DEPTH = 60


def index_text(expr: sympy.Expr, name: Name) -> str:
    """An index expression as Python over integers. Raises IRError on forms that are no index."""
    if expr.is_Integer:
        return str(int(expr)) if expr >= 0 else f"({int(expr)})"
    if expr.is_Symbol:
        return name(expr)
    args = [index_text(a, name) for a in expr.args]
    if expr.is_Add:
        return f"({' + '.join(args)})"
    if expr.is_Mul:
        return f"({' * '.join(args)})"
    match expr:
        case FloorDiv() | CleanDiv():
            return f"({args[0]} // {args[1]})"
        case CeilDiv():
            return f"(-(-{args[0]} // {args[1]}))"
        case Mod() | PythonMod():
            return f"({args[0]} % {args[1]})"
        case ModularIndexing():
            return f"({args[0]} // {args[1]} % {args[2]})"
        case Max() | sympy.Max():
            return f"max({', '.join(args)})"
        case Min() | sympy.Min():
            return f"min({', '.join(args)})"
        case PositivePart():
            return f"max({args[0]}, 0)"
        case PowByNatural():
            return f"({args[0]} ** {args[1]})"
    if expr.is_Pow and expr.args[1].is_Integer and expr.args[1] > 0:
        return f"({args[0]} ** {args[1]})"
    raise IRError(f"{expr} ({type(expr).__name__}) is no index expression")


class NestText:
    """The Python source of one nest, and the objects that it names."""

    def __init__(self, nest: LoopNest, backward: bool) -> None:
        self.nest = nest
        self.backward = backward
        self.globals: dict[str, Any] = {}
        self._functions: list[list[str]] = []
        self._lines: list[str] = []
        self._depth = 1
        self._count = 0
        # What is computed already in this scope, by identity; the expression is kept alive beside its name.
        self._known: list[dict[int, tuple[Expr, str]]] = [{}]
        self._axes: dict[sympy.Symbol, str] = {}
        self._loops: dict[sympy.Symbol, str] = {}
        self._sizes = {s: f"S_{k}" for k, s in enumerate(nest.symbols.symbols)}
        self._buffers = {b.name: f"B_{k}" for k, b in enumerate((*nest.params, *nest.locals))}

    def source(self) -> str:
        """``def kernel(buffers, sizes)`` and what it calls. Raises IRError on a name that nothing defines."""
        for symbol, name in self._sizes.items():
            self._line(f"{name} = sizes[{symbol.name!r}]")
        for buffer, name in self._buffers.items():
            self._line(f"{name} = buffers[{buffer!r}]")
        for node in self.nest.body:
            for inner, _ in walk_nodes((node,)):
                if isinstance(inner, Block):
                    self._empty_reduction(inner)
            self._node(node)
        self._line("return None")
        helpers = [line for f in self._functions for line in f]
        return "\n".join([*helpers, "def kernel(buffers, sizes):", *self._lines, ""])

    # --- statements ---------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines.append(" " * self._depth + text)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._depth += 1
        self._known.append({})
        yield
        self._known.pop()
        self._depth -= 1

    def _fresh(self, prefix: str = "t") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _constant(self, value: Any, prefix: str) -> str:
        name = self._fresh(prefix)
        self.globals[name] = value
        return name

    def _node(self, node: Node) -> None:
        if isinstance(node, Block):
            self._block(node)
            return
        var = self._fresh("L_")
        span = f"range({self._index(node.extent)})"
        if self.backward and (node.kind is LoopKind.PARALLEL or node.kind in BLOCK_KINDS):
            span = f"reversed({span})"
        self._line(f"for {var} in {span}:")
        outer = self._loops.get(node.var)
        self._loops[node.var] = var
        with self._scope():
            for inner in node.body:
                self._node(inner)
            if not node.body:
                self._line("pass")
        if outer is None:
            del self._loops[node.var]
        else:
            self._loops[node.var] = outer

    def _block(self, block: Block) -> None:
        guard = " and ".join(f"{self._index(b.lhs)} < {self._index(b.rhs)}" for b in block.predicate)
        self._line(f"if {guard or True}:  # {block.name}")
        with self._scope():
            values = [self._index(b) for b in block.bindings]
            self._bind(block)
            for axis, value in zip(block.axes, values, strict=True):
                name, extent = self._axes[axis.var], self._index(axis.extent)
                self._line(f"{name} = {value}")
                where = f"{block.name!r}, {axis.var.name!r}, {name}, {extent}"
                self._line(f"if not 0 <= {name} < {extent}: bad_axis({where})")
            for statement in block.body:
                # A statement may change what the next one loads.
                self._known.append({})
                self._statement(block, statement)
                self._known.pop()
            self._axes.clear()

    def _bind(self, block: Block) -> None:
        self._axes.update({axis.var: self._fresh("A_") for axis in block.axes})

    def _statement(self, block: Block, statement: Store | Update) -> None:
        if isinstance(statement, Store):
            value = self._value(block, statement.value)
            place = self._place(block, statement.buffer, statement.indices, "store to")
            self._line(f"{place} = {value}")
            return
        if statement.begins:
            running = (*self._reduction_axes(block), *block.axes_of(AxisKind.SCAN))
            first = " and ".join(f"{self._axes[a.var]} == 0" for a in running)
            self._line(f"if {first or True}:")
            with self._scope():
                self._identity(block, statement)
        values = [self._value(block, v) for v in statement.values]
        places = [self._place(block, t.buffer, t.indices, "update of") for t in statement.targets]
        old: State = tuple(Var(f"old{k}", v.dtype) for k, v in enumerate(statement.values))
        new: State = tuple(Var(f"new{k}", v.dtype) for k, v in enumerate(statement.values))
        for var, text in (*zip(old, places, strict=True), *zip(new, values, strict=True)):
            name = self._fresh()
            self._line(f"{name} = {text}")
            self._known[-1][id(var)] = (var, name)
        results = [self._value(block, e) for e in statement.monoid.combine(old, new)]
        for place, result in zip(places, results, strict=True):
            self._line(f"{place} = {result}")

    def _identity(self, block: Block, update: Update) -> None:
        identity = update.monoid.identity(tuple(v.dtype for v in update.values))
        for target, value in zip(update.targets, identity, strict=True):
            place = self._place(block, target.buffer, target.indices, "update of")
            self._line(f"{place} = {self._value(block, value)}")

    @staticmethod
    def _reduction_axes(block: Block) -> tuple[Axis, ...]:
        return block.axes_of(AxisKind.REDUCTION)

    def _empty_reduction(self, block: Block) -> None:
        """A reduction over nothing: no iteration begins it, so its identity is written before the loops around it."""
        reduced = self._reduction_axes(block)
        begun = any(isinstance(s, Update) and s.begins for s in block.body)
        if not begun or not any(a.extent.is_zero is not False for a in reduced):
            return
        self._line(f"if {' or '.join(f'{self._index(a.extent)} == 0' for a in reduced)}:  # {block.name} is empty")
        with self._scope():
            self._line("pass")
            self._bind(block)
            kept = [a for a in block.axes if a.kind is not AxisKind.REDUCTION]
            for axis in reduced:
                self._line(f"{self._axes[axis.var]} = 0")
            self._over(kept, lambda: self._identities(block))
            self._axes.clear()

    def _identities(self, block: Block) -> None:
        for statement in block.body:
            if isinstance(statement, Update) and statement.begins:
                self._identity(block, statement)

    def _over(self, axes: list[Axis], body: Callable[[], None]) -> None:
        if not axes:
            body()
            return
        self._line(f"for {self._axes[axes[0].var]} in range({self._index(axes[0].extent)}):")
        with self._scope():
            self._over(axes[1:], body)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _symbol(self, symbol: sympy.Symbol) -> str:
        # A body speaks of axes, never of loops.
        for table in (self._axes or self._loops, self._sizes):
            if symbol in table:
                return table[symbol]
        raise IRError(f"{self.nest.name}: nothing binds the symbol {symbol}")

    def _index(self, expr: sympy.Expr) -> str:
        return index_text(expr, self._symbol)

    def _place(self, block: Block, buffer: str, indices: tuple[Index, ...], verb: str) -> str:
        """``B[i, j]`` with both indices computed and checked."""
        if buffer not in self._buffers:
            raise IRError(f"{self.nest.name}: block {block.name}: {verb} {buffer!r}, which is no buffer of the nest")
        array, names = self._buffers[buffer], []
        for index in indices:
            text = f"int({self._value(block, index)})" if is_value(index) else self._index(index)
            names.append(self._fresh("i"))
            self._line(f"{names[-1]} = {text}")
        place = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
        inside = [f"0 <= {n} < {array}.shape[{k}]" for k, n in enumerate(names)]
        inside.append(f"{len(names)} == {array}.ndim")
        where = f"{block.name!r}, {verb!r}, {buffer!r}, {place}, {array}"
        self._line(f"if not ({' and '.join(reversed(inside))}): out_of_range({where})")
        return f"{array}[{place}]"

    def _value(self, block: Block, expr: Expr) -> str:
        """The name that holds the value; statements that compute it are written where it is not known yet."""
        for scope in reversed(self._known):
            if id(expr) in scope:
                return scope[id(expr)][1]
        name = self._compute(block, expr)
        self._known[-1][id(expr)] = (expr, name)
        return name

    def _compute(self, block: Block, expr: Expr) -> str:
        match expr:
            case Const():
                return self._constant(scalar(expr.value, expr.dtype), "c")
            case IndexValue():
                make = self._constant(expr.dtype.numpy.type, "make")
                return self._assign(f"{make}({self._index(expr.index)})")
            case Load():
                return self._assign(self._place(block, expr.buffer, expr.indices, "load of"))
            case Cast():
                fn = self._constant(converter(expr.value.dtype, expr.dtype), "cast_")
                return self._assign(f"{fn}({self._value(block, expr.value)})")
            case Call():
                of = expr.args[0].dtype if expr.args else expr.dtype
                fn = self._constant(function(expr.fn, of, expr.dtype), f"{expr.fn}_")
                return self._assign(f"{fn}({', '.join([self._value(block, a) for a in expr.args])})")
            case Select():
                return self._select(block, expr)
        raise IRError(f"{self.nest.name}: block {block.name}: nothing binds the value {expr}")

    def _assign(self, text: str) -> str:
        name = self._fresh()
        self._line(f"{name} = {text}")
        return name

    def _select(self, block: Block, expr: Select) -> str:
        condition = self._value(block, expr.condition)
        if self._depth > _MAX_DEPTH:
            return self._apart(block, expr, condition)
        name = self._fresh()
        for head, branch in ((f"if {condition}:", expr.if_true), ("else:", expr.if_false)):
            self._line(head)
            with self._scope():
                self._line(f"{name} = {self._value(block, branch)}")
        return name

    def _apart(self, block: Block, expr: Select, condition: str) -> str:
        """The select as a function of everything that is known here; ``condition`` is among it."""
        known = {name for scope in self._known for _, name in scope.values() if name not in self.globals}
        names = sorted({condition} | known | {n for t in (self._axes, self._sizes, self._buffers) for n in t.values()})
        fn = self._fresh("f")
        lines, depth, self._lines, self._depth = self._lines, self._depth, [], 1
        self._known.append({})
        self._line(f"return {self._select(block, expr)}")
        self._known.pop()
        self._functions.append([f"def {fn}({', '.join(names)}):", *self._lines])
        self._lines, self._depth = lines, depth
        return self._assign(f"{fn}({', '.join(names)})")
