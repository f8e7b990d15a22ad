"""Lanes of a program as Triton text: where a block's axes lie, shapes of tiles, and the masks that guard them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Index, is_value
from ...ir.nest.loops import AxisKind
from ..host.python.brackets import closes_at_end
from ..kernel import EmitError
from .index import index_text
from .loops.limits import verdict
from .program import BlockInfo, TritonProgram
from .writer import Dims, SourceWriter, Value

# Both sides of ``lhs < rhs``.
Bound: TypeAlias = tuple[sympy.Expr, sympy.Expr]


class Lanes:
    """Speaks of one block at a time (``enter``) in the variables of the text."""

    def __init__(self, program: TritonProgram, writer: SourceWriter) -> None:
        self.program = program
        self.out = writer
        # A variable of the text -> the expression in loop symbols that it stands for.
        self.meaning: dict[sympy.Symbol, sympy.Expr] = {}
        # The indices that are written down.
        self.indices: dict[sympy.Expr, None] = {}
        self.info: BlockInfo | None = None
        # Expressions above zero in all iterations of the loop that is written.
        self.facts: tuple[sympy.Expr, ...] = ()
        self._axes: dict[sympy.Symbol, sympy.Expr] = {}
        self._extents: dict[sympy.Symbol, sympy.Expr] = {}

    def enter(self, info: BlockInfo, ended: bool = False) -> None:
        """Name the block's axes; the expressions that follow speak of them. The reduction axes of a reduction that
        has ended have no value any more."""
        self.info = info
        self._axes, self._extents = {}, {}
        for axis in info.block.axes:
            if ended and axis.kind is AxisKind.REDUCTION:
                continue
            self._axes[axis.var] = self._variable(info.axes[axis.var])
            if self._axes[axis.var].is_Symbol:
                self._extents[self._axes[axis.var]] = axis.extent  # type: ignore[index]

    def _variable(self, expr: sympy.Expr) -> sympy.Expr:
        """A variable of the text that holds ``expr``; the expression itself where it is a symbol or has no loop in
        it."""
        if expr.is_Symbol or not (expr.free_symbols & self.program.ranges.extents.keys()):
            return expr
        found = self.out.known(("axis", expr))
        if found is not None:
            return found  # type: ignore[return-value]
        var = sympy.Symbol(self.out.fresh("x"), integer=True, nonnegative=True)
        self.program.ranges.value(var, expr)
        self.meaning[var] = expr
        self.out.line(f"{var.name} = {self.index(expr)}")
        self.out.remember(("axis", expr), var)
        return var

    # --- indices ------------------------------------------------------------------------------------------------------

    def index(self, expr: sympy.Expr) -> str:
        self.indices[expr] = None
        return bare(index_text(expr, lambda s: s.name, self.program.ranges, self.program.integer))

    def dims(self, expr: sympy.Expr) -> Dims:
        """The tile axes on which an index in the text's variables depends."""
        return self.program.dims(self.loops(expr))

    def loops(self, expr: sympy.Expr) -> set[sympy.Symbol]:
        found: set[sympy.Symbol] = set()
        for s in expr.free_symbols:
            found |= self.meaning[s].free_symbols if s in self.meaning else {s}
        return found

    def position(self, indices: tuple[Index, ...]) -> tuple[sympy.Expr, ...]:
        """Where a LOCAL buffer is accessed, in loop symbols. Raises EmitError for gathers."""
        assert self.info is not None
        if any(is_value(i) for i in indices):
            raise EmitError(
                f"block {self.info.block.name} gathers from a register tile, which has no addresses; "
                "give the buffer global scope"
            )
        return tuple(sympy.expand(i.xreplace(self.info.axes)) for i in indices)  # type: ignore[union-attr]

    def shape(self, dims: Dims) -> str:
        """The shape of a tile that varies along ``dims``."""
        sizes = [1] * self.program.rank
        for s in dims:
            dim, extent = self.program.tile[s]
            if sizes[dim] not in (1, extent):
                raise EmitError(
                    f"tiles of {sizes[dim]} and {extent} lanes meet in one expression of block "
                    f"{self.info.block.name if self.info else '?'}; split both loops alike"
                )
            sizes[dim] = extent
        return f"[{', '.join(map(str, sizes))}]"

    def broadcast(self, value: Value, dims: Dims) -> Value:
        """The value as a full tile along ``dims``."""
        if value.dims == dims:
            return value if not (value.literal and not dims) else Value(value.typed, dims, value.dtype)
        if not value.dims <= dims:
            raise EmitError(
                f"block {self.info.block.name if self.info else '?'}: a value varies along tile axes "
                "that its target lacks"
            )
        if value.dims:
            return Value(f"tl.broadcast_to({value.text}, {self.shape(dims)})", dims, value.dtype)
        if value.literal:
            return Value(
                f"tl.full({self.shape(dims)}, {value.text}, {self.program.types.text(value.dtype)})", dims, value.dtype
            )
        text = f"tl.broadcast_to({value.text}, {self.shape(dims)})"
        return Value(text, dims, value.dtype)

    # --- masks --------------------------------------------------------------------------------------------------------

    def bounds(self, dims: Dims) -> tuple[Value, ...]:
        """The conjuncts of the block's predicate that lanes along ``dims`` need, the proved ones dropped.

        A lane along an axis outside ``dims`` acts for all lanes of that axis, and the first of them is the last to be
        switched off.
        """
        return self._conjuncts(self.bounds_along(dims))

    def bounds_along(self, dims: Dims) -> list[Bound]:
        """The same as pairs in loops, with those that are proved."""
        assert self.info is not None
        return self._at_first((*self.info.bounds, *self.info.elements), self._outside(dims))

    def bounds_of_results(self, dims: Dims, ended: Dims) -> tuple[Value, ...]:
        """The same for what is there when the loops ``ended`` are: what guards them alone left out elements, and no
        result."""
        assert self.info is not None
        loops = {s for e in self.program.loops.values() for s in e.free_symbols} if ended else set()
        of_results = []
        for lhs, rhs in self.info.bounds:
            over = (lhs.free_symbols | rhs.free_symbols) & loops
            if not over or not over <= ended:
                of_results.append((lhs, rhs))
        return self._conjuncts(self._at_first(of_results, self._outside(dims) | ended))

    def _outside(self, dims: Dims) -> Dims:
        return frozenset(self.program.tile.keys() - dims)

    @staticmethod
    def _at_first(bounds: Iterable[Bound], symbols: Dims) -> list[Bound]:
        first = dict.fromkeys(symbols, sympy.S.Zero)
        return [(lhs.xreplace(first), rhs.xreplace(first)) for lhs, rhs in bounds]

    def reduction_bounds(self) -> tuple[Value, ...]:
        """The conjuncts that depend on the block's reduction axes: their lanes hold elements that are not there."""
        assert self.info is not None
        own = self.info.reduced_tile | self.info.reduced_serial
        bounds = [(a, b) for a, b in self.info.bounds if (a.free_symbols | b.free_symbols) & own]
        return self._conjuncts([*bounds, *self.info.elements])

    def _conjuncts(self, bounds: list[Bound]) -> tuple[Value, ...]:
        found: dict[str, Value] = {}
        for lhs, rhs in self.unproved(bounds):
            key = ("bound", lhs, rhs)
            value = self.out.known(key)
            if value is None:
                low, high = self.index(self._variable(lhs)), self.index(self._variable(rhs))
                # A number on the left would leave the comparison to Python.
                text = f"{high} > {low}" if lhs.is_Integer else f"{low} < {high}"
                dims = self.dims(lhs) | self.dims(rhs)
                value = Value(self.out.assign("m", text), dims, DType.BOOL)
                self.out.remember(key, value)
            found[value.text] = value  # type: ignore[attr-defined, assignment]
        return tuple(found.values())

    def unproved(self, bounds: list[Bound]) -> list[Bound]:
        """Those that some lane of some iteration here may break."""
        return [b for b in bounds if not self.program.ranges.below(*b) and not self.told(*b)]

    def told(self, lhs: sympy.Expr, rhs: sympy.Expr) -> bool | None:
        """Whether ``lhs < rhs`` for all lanes or for none, as the loop's iterations were chosen; None for neither."""
        return verdict(self.program, self.facts, rhs - lhs) if self.facts else None

    @staticmethod
    def all_of(conjuncts: tuple[Value, ...]) -> Value | None:
        if not conjuncts:
            return None
        dims = frozenset[sympy.Symbol]().union(*(c.dims for c in conjuncts))
        return Value(" & ".join(dict.fromkeys(c.text for c in conjuncts)), dims, DType.BOOL)


def bare(text: str) -> str:
    """The text without brackets around all of it."""
    return text[1:-1] if text.startswith("(") and closes_at_end(text) else text
