"""Value expressions as Triton statements.

Every value has one name; equal computations are found by the names of their operands, so that an expression with
shared parts is written once and costs no more than its parts.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.ops import DRAWN_TOGETHER
from ...ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, Var, children, is_value, walk
from ...ir.nest.loops import Scope
from ..kernel import EmitError
from .functions import call_text, takes_literals
from .index import Ranges
from .lanes import Lanes, bare
from .program import BlockInfo, TritonProgram
from .types import FP8, literal, type_text
from .writer import SCALAR, Dims, SourceWriter, Value

_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
                "ne": operator.ne}  # fmt: skip
_ZEROS = ("0", "0.0", "False")


class Expressions(Lanes, ABC):
    """Emits the expressions of a block; what they load is another's affair."""

    def __init__(self, program: TritonProgram, writer: SourceWriter) -> None:
        super().__init__(program, writer)
        # Loads that are zero where one of these masks is off.
        self.masked: dict[str, frozenset[str]] = {}
        # Conversions that something else than a conversion of each element does.
        self.tile_cast: Callable[[Cast, Mapping[str, Value], tuple[Value, ...]], Value | None] = lambda *_: None
        # Random numbers of a tile, where neighbours share what makes them.
        self.tile_draw: Callable[[Call, Mapping[str, Value], tuple[Value, ...]], Value | None] = lambda *_: None
        # Positions as numbers, where they are not to be computed in place.
        self.tile_position: Callable[[sympy.Expr, DType], Value | None] = lambda *_: None
        self._memo: dict[tuple[int, tuple[Value, ...]], tuple[Expr, Value]] = {}
        self._loading: dict[int, tuple[Expr, bool]] = {}

    @abstractmethod
    def _load(self, expr: Load, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        """The elements that a load reads, in the lanes where ``guard`` holds."""

    def enter(self, info: BlockInfo, ended: bool = False) -> None:
        super().enter(info, ended)
        self._memo, self._loading = {}, {}

    def value(self, expr: Expr, env: Mapping[str, Value] | None = None, guard: tuple[Value, ...] = ()) -> Value:
        """The value of an expression in the lanes where ``guard`` holds; ``env`` binds the Vars."""
        key = (id(expr), guard)
        if key in self._memo:
            return self._memo[key][1]
        result = self._compute(expr, env or {}, guard)
        self._memo[key] = (expr, result)
        return result

    def _compute(self, expr: Expr, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        match expr:
            case Const():
                type_text(expr.dtype)
                if expr.dtype in FP8:
                    return self.named(self.program.types.eight_bits(expr.value, expr.dtype), SCALAR, expr.dtype)
                return Value(literal(expr.value), SCALAR, expr.dtype, literal=True)
            case Var():
                return env[expr.name]
            case IndexValue():
                return self._index_value(expr)
            case Load():
                return self._load(expr, env, guard)
            case Cast():
                tile = self.tile_cast(expr, env, guard)
                if tile is not None:
                    return tile
                value = self.value(self._before(expr), env, guard)
                if value.dtype is expr.dtype:
                    return value
                made = self.named(self.program.types.cast(value.typed, value.dtype, expr.dtype), value.dims, expr.dtype)
                if value.text in self.masked:  # a zero stays one
                    self.masked[made.text] = self.masked[value.text]
                return made
            case Call():
                if (known := self._known(expr)) is not None:
                    return Value(str(known), SCALAR, DType.BOOL, literal=True)
                drawn = self.tile_draw(expr, env, guard) if expr.fn in DRAWN_TOGETHER else None
                return drawn or self._call(expr, [self.value(a, env, guard) for a in expr.args])
            case Select():
                return self._select(expr, env, guard)
        raise EmitError(f"no Triton code for {expr}")

    def _before(self, expr: Cast) -> Expr:
        """What a conversion is of: a byte that a float32 was, if all that such bytes are is exact in the type."""
        match expr.value:
            case Cast(value, DType.FLOAT32) if expr.dtype.is_half and value.dtype in self.program.types.as_bytes:
                return expr.value if expr.dtype in FP8 else value
        return expr.value

    def named(self, text: str, dims: Dims, dtype: DType) -> Value:
        """A value by its text, written down where it is not yet known."""
        found = self.out.known(("value", text))
        if found is not None:
            assert isinstance(found, Value)
            # An operand of a product names its lanes by the axis that is summed, another block by its own.
            return replace(found, dims=dims)
        value = Value(self.out.assign("v", bare(text)), dims, dtype)
        self.out.remember(("value", text), value)
        return value

    def _call(self, expr: Call, args: list[Value]) -> Value:
        bare = takes_literals(expr.fn) and not all(a.literal for a in args)
        texts = tuple(a.text if bare else a.typed for a in args)
        dims = frozenset[sympy.Symbol]().union(*(a.dims for a in args))
        of = args[0].dtype if args else expr.dtype
        made = self.named(call_text(expr.fn, texts, of, expr.dtype, self.program.types), dims, expr.dtype)
        if expr.fn == "mul" and all(a.text in self.masked for a in args):  # zero times zero
            self.masked[made.text] = frozenset.intersection(*(self.masked[a.text] for a in args))
        return made

    def is_zero_outside(self, value: Value, mask: tuple[Value, ...]) -> bool:
        """Whether a value is zero wherever a mask of conjuncts is off, since what it is made of was not loaded."""
        return {c.text for c in mask} <= self.masked.get(value.text, frozenset())

    def _index_value(self, expr: IndexValue) -> Value:
        index = simplify(expr.index.xreplace(self._axes), self._extents, self.program.nest.symbols)
        if index.is_Integer:
            return Value(literal(int(index)), SCALAR, expr.dtype, literal=True)
        if (ahead := self.tile_position(index, expr.dtype)) is not None:
            return ahead
        text = f"tl.cast({self.index(index)}, {type_text(expr.dtype)})"
        return self.named(text, self.dims(index), expr.dtype)

    def _select(self, expr: Select, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        if (known := self._known(expr.condition)) is not None:
            return self.value(expr.if_true if known else expr.if_false, env, guard)
        condition = self._bound(expr.condition) or self._decided(expr.condition)
        condition = condition or self.value(expr.condition, env, guard)
        if condition.literal:
            return self.value(expr.if_true if condition.text == "True" else expr.if_false, env, guard)
        branches = []
        for branch, holds in ((expr.if_true, True), (expr.if_false, False)):
            inner = guard
            if self._loads(branch) and not (self._loads(expr.condition) and self._is_beside(branch, condition)):
                when = condition if holds else self.named(f"({condition.text} == 0)", condition.dims, DType.BOOL)
                inner = (*guard, when) if when not in guard else guard
            branches.append(self.value(branch, env, inner))
        a, b = branches
        if b.literal and b.text in _ZEROS and condition.text in self.masked.get(a.text, ()):
            return a  # a load gives zero where its mask is off
        text = f"tl.where({condition.text}, {a.typed}, {b.typed})"
        return self.named(text, condition.dims | a.dims | b.dims, expr.dtype)

    def decided(self, condition: Expr) -> bool | None:
        """Whether a condition of positions holds, where that is known here."""
        found = self._bound(condition) or self._decided(condition)
        return found.text == "True" if found is not None and found.literal else None

    def _known(self, condition: Expr) -> bool | None:
        """What a condition is for all lanes of all iterations of the loop that is written."""
        if not self.facts or self.info is None or condition.dtype is not DType.BOOL:
            return None
        match condition:
            case Call(fn="logical_not", args=(x,)):
                inner = self._known(x)
                return None if inner is None else not inner
            case Call(fn="logical_and" | "logical_or" | "bit_and" | "bit_or" as fn, args=(x, y)):
                parts, decides = (self._known(x), self._known(y)), fn.endswith("_or")
                return decides if decides in parts else None if None in parts else not decides
            case Call() if (conjunct := self.conjunct(condition, self.info)) is not None:
                return self.told(*conjunct)
        return None

    def _decided(self, condition: Expr) -> Value | None:
        """A comparison of positions that are numbers here."""
        if not isinstance(condition, Call) or condition.fn not in _COMPARISONS:
            return None
        a, b = map(self._number, condition.args)
        if a is None or b is None:
            return None
        return Value(str(_COMPARISONS[condition.fn](a, b)), SCALAR, DType.BOOL, literal=True)

    def number(self, expr: Expr) -> int | None:
        """A whole number that is known here, as constants and many positions are."""
        while isinstance(expr, Cast) and expr.dtype.is_int and expr.value.dtype.is_int:
            expr = expr.value  # what selects a part of a word is small
        return self._number(expr)

    def _number(self, expr: Expr) -> int | None:
        if isinstance(expr, Const) and expr.dtype.is_int:
            return int(expr.value)
        if not isinstance(expr, IndexValue):
            return None
        index = simplify(expr.index.xreplace(self._axes), self._extents, self.program.nest.symbols)
        return int(index) if index.is_Integer else None

    def _bound(self, condition: Expr) -> Value | None:
        """A condition that one position is below another, or that several are, under the names that they have as bounds
        of a block, so that what either guards is read once. What is proved is left out."""
        match condition:
            case Call(fn="logical_and", args=(one, other)):
                parts = [self._bound(part) or self._decided(part) for part in (one, other)]
                return self._both(*parts) if all(parts) else None  # type: ignore[arg-type]
            case Call(fn="lt" | "gt" | "le" | "ge"):
                conjunct = self.conjunct(condition, self.info) if self.info is not None else None
                if conjunct is None:
                    return None
                low, high = conjunct
                told = low < high if low.is_Integer and high.is_Integer else self.told(low, high)
                if told is not None:
                    return Value(str(bool(told)), SCALAR, DType.BOOL, literal=True)
                found = self._conjuncts([(low, high)])
                return found[0] if found else Value("True", SCALAR, DType.BOOL, literal=True)
        return None

    def conjunct(self, condition: Call, info: BlockInfo) -> tuple[sympy.Expr, sympy.Expr] | None:
        """A comparison of positions in a block as ``low < high`` in loops; None for other calls."""
        if condition.fn not in ("lt", "gt", "le", "ge"):
            return None
        a, b = (self._place(x, info) for x in condition.args)
        if a is None or b is None:
            return None
        low, high = (a, b) if condition.fn in ("lt", "le") else (b, a)
        return (low if condition.fn in ("lt", "gt") else low - 1), high

    def _both(self, a: Value, b: Value) -> Value:
        if a.literal or b.literal:
            decided, other = (a, b) if a.literal else (b, a)
            return other if decided.text == "True" else decided
        return a if a.text == b.text else self.named(f"({a.text} & {b.text})", a.dims | b.dims, DType.BOOL)

    def _place(self, expr: Expr, info: BlockInfo) -> sympy.Expr | None:
        """A position or a number of a block, in loops."""
        if isinstance(expr, Const) and expr.dtype.is_int:
            return sympy.Integer(int(expr.value))
        if not isinstance(expr, IndexValue):
            return None
        index = expr.index.xreplace(info.axes)
        if not index.has(FloorDiv, ModularIndexing):
            return index
        return simplify(index, self.program.ranges.extents, self.program.nest.symbols)

    def _is_beside(self, branch: Expr, condition: Value) -> bool:
        """Whether all that a branch reads is there whatever a condition says, an element a lane as the condition is:
        then nobody waits for what the condition reads. Where one condition stands for many elements, it may spare
        reading them."""
        read = (e for e in walk(branch) if isinstance(e, Load))
        return all(self.program.buffers[e.buffer].scope is not Scope.GLOBAL or self._is_as(e, condition) for e in read)

    def _is_as(self, load: Load, condition: Value) -> bool:
        """Whether a load has no lanes that a condition has not, and is in range."""
        return self.in_range(load) and all(
            self.dims(i.xreplace(self._axes)) <= condition.dims  # type: ignore[union-attr]
            for i in load.indices
        )

    def in_range(self, load: Load) -> bool:
        """Whether indices are in range at all points of the block: within its bounds, whatever else is switched off."""
        if self.info is None or any(is_value(i) for i in load.indices):
            return False
        points = Ranges(self.program.nest.symbols)
        for axis in self.info.block.axes:
            points.loop(axis.var, axis.extent)
        shape = self.program.buffers[load.buffer].shape
        return all(points.of(i)[0] >= 0 and points.below(i, n) for i, n in zip(load.indices, shape, strict=True))

    def _loads(self, expr: Expr) -> bool:
        """Whether the expression reads memory."""
        found = self._loading.get(id(expr))
        if found is None:
            reads = isinstance(expr, Load) and self.program.buffers[expr.buffer].scope is Scope.GLOBAL
            found = (expr, reads or any([self._loads(c) for c in children(expr)]))
            self._loading[id(expr)] = found
        return found[1]
