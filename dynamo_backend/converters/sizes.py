"""Symbolic sizes: torch's ShapeEnv expressions in the symbols of the IR, and what is known about each symbol.

Nothing here asks the ShapeEnv a question that could install a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import (
    CeilDiv,
    CleanDiv,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Max,
    Mod,
    ModularIndexing,
    PythonMod,
    ToFloat,
)
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.size_regions import ANYWHERE, SizeRegion
from ...ir.expr.symbols import PositivePart, Size, SymbolTable, is_indexed
from ...ir.expr.value import Const, Expr, IndexValue, call, cast, const, symbol
from ...ir.graph.graph import MADE_SIZE, GraphInput, Input, Library, Node, TensorType
from .registry import NoConversion

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_INTEGERS: tuple[sympy.Integer, ...] = tuple(sympy.Integer(k) for k in range(4097))


def integer(value: int) -> sympy.Integer:
    """The sympy integer; small ones without a look-up in sympy's cache."""
    return _INTEGERS[value] if 0 <= value <= 4096 else sympy.Integer(value)


class SizeMap:
    """Translates SymInts and fake tensors; remembers the ShapeEnv symbols that it met.

    Sizes beyond the arithmetic of kernels (``int(1.5 * n)``) get a symbol each, whose name is added to ``names``, those
    of the graph; ``made`` says what it is in the other symbols. Integers that may be negative, as arguments and data
    may be, are the difference of two made sizes, since no symbol of the IR is negative. A truth value among the
    arguments is a symbol that is 1 where it is true, since nobody may give what it was decided by.

    In a ``region`` of sizes more is known of them than the ShapeEnv knows. What can be one number there is that number.
    """

    def __init__(self, names: set[str], region: SizeRegion = ANYWHERE) -> None:
        self.made: dict[sympy.Symbol, sympy.Basic] = {}
        self._region = region
        self._names = names
        self._theirs: dict[sympy.Symbol, sympy.Expr] = {}
        self._exprs: dict[sympy.Expr, sympy.Expr] = {}
        self._strides: dict[sympy.Expr, sympy.Expr] = {}
        self._not_one: set[sympy.Expr] = set()
        # What stands for ShapeEnv's symbols, and under which symbols the graph is told them.
        self._symbols: dict[sympy.Basic, sympy.Basic] = {}
        self._told: dict[sympy.Symbol, sympy.Symbol] = {}
        # The two symbols of integers that may be negative, and the integers.
        self._split: dict[sympy.Symbol, tuple[sympy.Symbol, sympy.Expr]] = {}
        self._shape_env: Any = None
        self._types: dict[int, tuple[Any, TensorType]] = {}

    def size(self, value: Any) -> sympy.Expr:
        """An int, SymInt, SymFloat or SymBool as an expression over the IR's symbols."""
        if type(value) is int:
            return integer(value)
        if isinstance(value, SYMBOLIC):
            if self._shape_env is None:
                self._shape_env = value.node.shape_env
            return self.expr(value.node.expr)
        return sympy.sympify(value)

    def expr(self, expr: sympy.Expr) -> sympy.Expr:
        """An expression over ShapeEnv symbols in our own."""
        known = self._exprs.get(expr)
        if known is None:
            for s in expr.free_symbols:
                if s not in self._symbols:
                    told = self.plain(s)
                    fixed = self._region.value_of(self._size(told, s)) if told in self._region.symbols else None
                    if fixed is not None:
                        self._symbols[s] = integer(fixed)
                        continue
                    self._symbols[s] = self._parts(s, told) if s.is_integer and self._may_be_negative(s) else told
            beyond = {part: self._made_of(part) for part in self._beyond(expr)}
            known = self._exprs[expr] = expr.xreplace({**self._symbols, **beyond} if beyond else self._symbols)
        return known

    def told(self, value: Any) -> sympy.Expr:
        """The same of what a caller or a node gives: a number that may be negative is one symbol, which nothing but
        the sizes made of it may read."""
        size = self.size(value)
        theirs = value.node.expr if isinstance(value, SYMBOLIC) else None
        if (
            theirs is None
            or size.is_Integer
            or theirs.atoms(sympy.Function)
            or all(self._symbols[s].is_Symbol for s in theirs.free_symbols)
        ):
            return size
        return theirs.xreplace(self._told)

    def argument(self, value: Any) -> sympy.Expr:
        """The same of an argument, of whose truth value the symbol is told."""
        told = self.told(value)
        if not isinstance(value, torch.SymBool) or told in (True, False):
            return told
        theirs = value.node.expr
        match theirs:
            case sympy.Eq(args=(sympy.Symbol() as decided, sympy.S.One)) if self._range(decided).upper == 1:
                return self.plain(decided)
        made = self._made("truth", None, told)
        self._symbols[theirs] = self._exprs[theirs] = sympy.Eq(made, 1)
        return made

    def plain(self, theirs: sympy.Symbol) -> sympy.Symbol:
        """The symbol under which the graph is told one of ShapeEnv's, whatever that is known to be."""
        return self._told.setdefault(theirs, symbol(theirs.name))

    def sources(self, size: sympy.Basic) -> set[sympy.Symbol]:
        """The symbols that a size is computed of in the end."""
        found: set[sympy.Symbol] = set()
        for s in size.free_symbols:
            found |= self.sources(self.made[s]) if s in self.made else {s}
        return found

    def is_negative(self, size: sympy.Expr) -> bool | None:
        """Whether an integer is, as far as ranges and the guards that there are already tell."""
        if size.is_Integer:
            return bool(size < 0)
        if size.is_nonnegative or self._shape_env is None:
            return False if size.is_nonnegative else None
        whole = {above: theirs + below for above, (below, theirs) in self._split.items()}
        back = {**{ours: theirs for theirs, ours in self._told.items()}, **self._theirs}
        asked = size.xreplace(whole).xreplace(back) < 0
        known = asked if asked in (True, False) else self._shape_env._maybe_evaluate_static(asked)
        return None if known is None else known == sympy.true

    def _beyond(self, expr: sympy.Basic) -> Iterator[sympy.Expr]:
        """The outermost integers in an expression that kernels cannot compute."""
        if expr.is_integer and not (is_indexed(expr) and self._is_divided_well(expr)):
            yield expr
        else:
            for part in expr.args:
                yield from self._beyond(part)

    def _is_divided_well(self, expr: sympy.Basic) -> bool:
        """Whether a quotient is rounded alike everywhere: kernels divide by what is positive."""
        match expr:
            case CeilDiv():
                return not any(self._may_be_negative(a) for a in expr.args)
            case FloorDiv() | CleanDiv() | Mod() | PythonMod() | ModularIndexing():
                return not any(self._may_be_negative(a) for a in expr.args[1:])
        return True

    def _may_be_negative(self, theirs: sympy.Expr) -> bool:
        if theirs.is_Integer:
            return bool(theirs < 0)
        if theirs.is_Symbol and (self._shape_env is None or theirs not in self._shape_env.var_to_range):
            return False
        return (self._range(theirs).lower >= 0) != True  # noqa: E712 (sympy's truth)

    def _made_of(self, theirs: sympy.Expr) -> sympy.Expr:
        """What stands for an integer that only the host program computes."""
        if theirs not in self._exprs:
            made = self._made("size", theirs, theirs.xreplace(self._symbols))
            self._exprs[theirs] = self._parts(theirs, made) if self._may_be_negative(theirs) else made
        return self._exprs[theirs]

    def _parts(self, theirs: sympy.Expr, told: sympy.Symbol) -> sympy.Expr:
        """The integer that the host program knows as ``told``, whatever its sign."""
        above = self._made(f"{told.name}_above", Max(0, theirs), PositivePart(told))
        below = self._made(f"{told.name}_below", Max(0, -theirs), PositivePart(-told))
        self._split[above] = below, theirs
        return above - below

    def _made(self, stem: str, theirs: sympy.Expr | None, ours: sympy.Basic) -> sympy.Symbol:
        name = next(n for k in count() if (n := f"{stem}_{k}") not in self._names)
        self._names.add(name)
        made = symbol(name)
        self.made[made] = ours
        if theirs is not None:
            self._theirs[made] = theirs
        return made

    def _range(self, theirs: sympy.Expr) -> ValueRanges[Any]:
        env = self._shape_env
        return bound_sympy(theirs, env.var_to_range if env is not None else None)

    def stride(self, value: Any) -> sympy.Expr:
        """A stride, without the ``Max(1, n)`` by which torch gives tensors of no element their strides."""
        if type(value) is int:
            return integer(value)
        stride = self.size(value)
        if stride.is_Symbol or stride.is_Integer:
            return stride
        known = self._strides.get(stride)
        if known is None:
            plain = {m: m.args[1] for m in stride.atoms(Max) if len(m.args) == 2 and m.args[0] == 1}
            plain |= {m: m.args[0] for m in stride.atoms(Max) if len(m.args) == 2 and m.args[1] == 1}
            known = self._strides[stride] = stride.xreplace(plain) if plain else stride
        return known

    def sizes(self, values: Iterable[Any]) -> tuple[sympy.Expr, ...]:
        return tuple([integer(v) if type(v) is int else self.size(v) for v in values])

    def extents(self, values: Iterable[Any]) -> tuple[sympy.Expr, ...]:
        """Sizes of a tensor's dimensions. Those that a guard makes 1 are 1: they are broadcast where they are read."""
        return tuple([integer(v) if type(v) is int else self._extent(v) for v in values])

    def _extent(self, value: Any) -> sympy.Expr:
        expr = self.size(value)
        if expr.is_Symbol or expr.is_Integer or expr in self._not_one:
            return expr
        theirs = value.node.expr
        # Asked without the hint, which would be no proof, and in a way that installs no guard.
        if value.node.has_hint() and value.node.hint == 1:
            if self._shape_env._maybe_evaluate_static(sympy.Eq(theirs, 1)) == sympy.true:
                self._exprs[theirs] = sympy.S.One
                return sympy.S.One
        self._not_one.add(expr)
        return expr

    def tensor_type(self, val: torch.Tensor) -> TensorType:
        """The type of a fake tensor. Raises IRError for element types that the IR lacks."""
        known = self._types.get(id(val))
        if known is not None:
            return known[1]
        if val.layout is not torch.strided:
            raise NoConversion(f"layout {val.layout}")
        kind = TensorType(
            self.extents(val.shape), self.sizes(val.stride()), DType.from_torch(val.dtype), str(val.device)
        )
        self._types[id(val)] = (val, kind)
        return kind

    def hint(self, expr: sympy.Expr) -> int:
        """A typical value of a size: for heuristics, never for decisions of correctness."""
        return int(expr) if expr.is_Integer else self.table().hint(expr)

    def table(self, order: Iterable[sympy.Symbol] = ()) -> SymbolTable:
        """What the ShapeEnv knows of every symbol met: those in ``order`` first."""
        fixed = {s for s, ours in self._symbols.items() if ours.is_Integer}
        back = {ours: theirs for theirs, ours in self._told.items() if theirs not in fixed}
        ordered = dict.fromkeys([*(s for s in order if s in back), *back])
        found = SymbolTable(tuple(self._describe(ours, back[ours]) for ours in ordered))
        for made in self.made:
            found = SymbolTable((*found.sizes, self._describe_made(made, found)))
        return found

    def _describe_made(self, made: sympy.Symbol, others: SymbolTable) -> Size:
        if made not in self._theirs:
            return Size(made, 0, 1, 1, 1)
        bounds = self._range(self._theirs[made])
        return Size(made, _finite(bounds.lower) or 0, _finite(bounds.upper), 1, others.hint(self.made[made]))

    def with_made(self, inputs: Iterable[GraphInput], nodes: Iterable[Node]) -> Iterator[Node]:
        """A graph's nodes, and before them, or behind those that tell what they are made of, the sizes in ``made`` that
        are no input's."""
        waiting = dict(self.made)
        for i in inputs if waiting else ():
            for told in (*i.type.shape, *i.type.strides) if isinstance(i, Input) else (i.value,):
                waiting.pop(told, None)
        # Sizes decided by data that are not told yet, and those not made yet.
        unknown = {s.name for expr in waiting.values() for s in expr.free_symbols}
        unknown &= {name for n in nodes for name, t in zip(n.names, n.types, strict=True) if t is None}
        unknown |= {made.name for made in waiting}

        def known() -> Iterator[Node]:
            for made, expr in list(waiting.items()):
                if unknown.isdisjoint(s.name for s in expr.free_symbols):
                    unknown.discard(made.name)
                    yield Library((made.name,), (None,), MADE_SIZE, (waiting.pop(made),), (), "size made of others")

        yield from known()
        for node in nodes:
            yield node
            if not unknown.isdisjoint(node.names):
                unknown.difference_update(node.names)
                yield from known()

    def _describe(self, ours: sympy.Symbol, theirs: sympy.Symbol) -> Size:
        return self._region.told(self._size(ours, theirs))

    def _size(self, ours: sympy.Symbol, theirs: sympy.Symbol) -> Size:
        env = self._shape_env
        lower, upper = 0, None
        bounds = env.var_to_range.get(theirs) if env is not None else None
        if bounds is not None:
            lower = _finite(bounds.lower) or 0
            upper = _finite(bounds.upper)
        return Size(ours, lower, upper, self._divisor(theirs), self._hint(theirs))

    def _hint(self, theirs: sympy.Symbol) -> int | None:
        env = self._shape_env
        # torch 2.13 renamed the table of values, and warns of the old name.
        values = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
        for table in ("var_to_hint_override", values):
            known = getattr(env, table, None) or {}
            key = theirs if theirs in known else theirs.name
            if key in known and _finite(known[key]) is not None:
                return _finite(known[key])
        return None

    def _divisor(self, theirs: sympy.Symbol) -> int:
        result = 1
        for fact in getattr(self._shape_env, "divisible", ()) or ():
            if len(fact.args) == 2 and fact.args[0] == theirs and fact.args[1].is_Integer:
                result = int(sympy.ilcm(result, fact.args[1]))
        return result


def _finite(bound: Any) -> int | None:
    if bound in (int_oo, -int_oo) or bound is None or not getattr(bound, "is_Integer", isinstance(bound, int)):
        return None
    # The greatest int64 stands for "no bound known".
    return None if abs(int(bound)) >= (1 << 62) else int(bound)


def is_float_of_data(symbol: Any) -> bool:
    """Whether a symbol is torch's for a float that data decide."""
    return symbol_is_type(symbol, SymT.UNBACKED_FLOAT)


def size_value(expr: sympy.Basic) -> Expr:
    """A size expression as a value: int64, float64 where it holds true divisions (a SymFloat), or bool where two are
    compared.

    Raises NoConversion for floats that data decide (``item``), since kernels are given integers.
    """
    if any(is_float_of_data(s) for s in expr.free_symbols):
        raise NoConversion("a float decided by data")
    if isinstance(expr, sympy.Eq):
        return call("eq", size_value(expr.lhs), size_value(expr.rhs))
    if expr.is_Integer:
        return const(int(expr), DType.INT64)
    if expr.is_number:
        return Const(float(expr), DType.FLOAT64)
    if isinstance(expr, ToFloat):
        return cast(size_value(expr.args[0]), DType.FLOAT64)
    if isinstance(expr, (IntTrueDiv, FloatTrueDiv)):
        return call("div", *(cast(size_value(a), DType.FLOAT64) for a in expr.args))
    if not expr.has(ToFloat, IntTrueDiv, FloatTrueDiv, sympy.Float) and expr.is_integer:
        return IndexValue(expr, DType.INT64)
    if expr.is_Add or expr.is_Mul:
        parts = [cast(size_value(a), DType.FLOAT64) for a in expr.args]
        result = parts[0]
        for p in parts[1:]:
            result = call("add" if expr.is_Add else "mul", result, p)
        return result
    if expr.func.__name__ in ("FloatPow", "PowByNatural", "Pow"):
        return call("pow", *(cast(size_value(a), DType.FLOAT64) for a in expr.args))
    if expr.func.__name__ == "OpaqueUnaryFn_sqrt":
        return call("sqrt", cast(size_value(expr.args[0]), DType.FLOAT64))
    raise NoConversion(f"the size expression {expr}")
