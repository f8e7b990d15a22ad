"""Value expressions as Triton statements.

Every value has one name; equal computations are found by the names of their operands, so that an expression with
shared parts is written once and costs no more than its parts. Loads carry the mask of the lanes that perform them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.dtypes import DType
from ...ir.expr import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, children, is_value
from ...ir.index import simplify
from ...ir.loops import AxisKind, Buffer, Scope
from ..brackets import closes_at_end
from ..kernel import EmitError
from .functions import call_text, cast_text, literal, takes_literals, type_text
from .index import index_text
from .program import BlockInfo, Program
from .writer import SCALAR, Dims, Value, Writer

_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
                "ne": operator.ne}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """A LOCAL buffer as the program holds it: a value, the position it was written at, and where that holds.

    ``level`` is the depth of scopes it was written at, ``path`` the loops open then; ``partial`` the loop variables
    inside which it is an unfinished reduction.
    """

    value: Value
    position: tuple[sympy.Expr, ...]
    path: tuple[sympy.Symbol, ...]
    partial: frozenset[sympy.Symbol] = frozenset()


class Values:
    """Emits the expressions of one block at a time (``enter``) into the writer."""

    def __init__(self, program: Program, writer: Writer) -> None:
        self.program = program
        self.out = writer
        self.tiles: dict[str, Tile] = {}
        # Those of blocks that are written out apart: one for each place that their copies wrote.
        self.apart: dict[tuple[str, tuple[sympy.Expr, ...]], Tile] = {}
        self.stored: set[str] = set()
        # LOCAL buffers that a loop carries -> the variable of the text.
        self.carried: dict[str, str] = {}
        # Loop variables open at this point, and among them those that are loops of the program.
        self.open: list[sympy.Symbol] = []
        self.serial: list[sympy.Symbol] = []
        # A variable of the text -> the expression in loop symbols that it stands for.
        self.meaning: dict[sympy.Symbol, sympy.Expr] = {}
        # Loads of whole tiles that something else than a load of each element does.
        self.tile_load: Callable[[Buffer, Load], Value | None] = lambda buffer, expr: None
        # The loads of this visit of a row, where each visit begins from what was loaded; None where none does.
        self.visit: set[str] | None = None
        # Loads that are zero where one of these masks is off.
        self.masked: dict[str, frozenset[str]] = {}
        self.info: BlockInfo | None = None
        self._axes: dict[sympy.Symbol, sympy.Expr] = {}
        self._extents: dict[sympy.Symbol, sympy.Expr] = {}
        self._memo: dict[tuple[int, tuple[Value, ...]], tuple[Expr, Value]] = {}
        self._loading: dict[int, tuple[Expr, bool]] = {}

    def enter(self, info: BlockInfo, ended: bool = False) -> None:
        """Name the block's axes; the expressions that follow speak of them. The reduction axes of a reduction that
        has ended have no value any more."""
        self.info = info
        self._memo, self._loading = {}, {}
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
        return _bare(index_text(expr, lambda s: s.name, self.program.ranges, self.program.wide))

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
            return Value(f"tl.full({self.shape(dims)}, {value.text}, {type_text(value.dtype)})", dims, value.dtype)
        text = f"tl.broadcast_to({value.text}, {self.shape(dims)})"
        return Value(text, dims, value.dtype)

    # --- masks --------------------------------------------------------------------------------------------------------

    def bounds(self, dims: Dims, gone: Dims = SCALAR) -> tuple[Value, ...]:
        """The conjuncts of the block's predicate that lanes along ``dims`` need, the proved ones dropped.

        A lane along an axis outside ``dims`` acts for all lanes of that axis, and the first of them is the last to be
        switched off; ``gone`` are loops that have ended: what guards them alone left out elements, and no result.
        """
        assert self.info is not None
        first = {s: sympy.S.Zero for s in (*(self.program.tile.keys() - dims), *gone)}
        loops = {s for e in self.program.loops.values() for s in e.free_symbols} if gone else set()
        return self._conjuncts(
            [
                (lhs.xreplace(first), rhs.xreplace(first))
                for lhs, rhs in self.info.bounds
                if not (over := (lhs.free_symbols | rhs.free_symbols) & loops) or not over <= gone
            ]
        )

    def reduction_bounds(self) -> tuple[Value, ...]:
        """The conjuncts that depend on the block's reduction axes: their lanes hold elements that are not there."""
        assert self.info is not None
        own = self.info.reduced_tile | self.info.reduced_serial
        return self._conjuncts([(a, b) for a, b in self.info.bounds if (a.free_symbols | b.free_symbols) & own])

    def _conjuncts(self, bounds: list[tuple[sympy.Expr, sympy.Expr]]) -> tuple[Value, ...]:
        found: dict[str, Value] = {}
        for lhs, rhs in bounds:
            if self.program.ranges.below(lhs, rhs):
                continue
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

    @staticmethod
    def all_of(conjuncts: tuple[Value, ...]) -> Value | None:
        if not conjuncts:
            return None
        dims = frozenset[sympy.Symbol]().union(*(c.dims for c in conjuncts))
        return Value(" & ".join(dict.fromkeys(c.text for c in conjuncts)), dims, DType.BOOL)

    # --- expressions --------------------------------------------------------------------------------------------------

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
                return Value(literal(expr.value), SCALAR, expr.dtype, literal=True)
            case Var():
                return env[expr.name]
            case IndexValue():
                return self._index_value(expr)
            case Load():
                return self._load(expr, env, guard)
            case Cast():
                value = self.value(expr.value, env, guard)
                if value.dtype is expr.dtype:
                    return value
                made = self._named(cast_text(value.typed, value.dtype, expr.dtype), value.dims, expr.dtype)
                if value.text in self.masked:  # a zero stays one
                    self.masked[made.text] = self.masked[value.text]
                return made
            case Call():
                return self._call(expr, [self.value(a, env, guard) for a in expr.args])
            case Select():
                return self._select(expr, env, guard)
        raise EmitError(f"no Triton code for {expr}")

    def _named(self, text: str, dims: Dims, dtype: DType) -> Value:
        found = self.out.known(("value", text))
        if found is not None:
            assert isinstance(found, Value)
            # An operand of a product names its lanes by the axis that is summed, another block by its own.
            return replace(found, dims=dims)
        value = Value(self.out.assign("v", _bare(text)), dims, dtype)
        self.out.remember(("value", text), value)
        return value

    def _call(self, expr: Call, args: list[Value]) -> Value:
        bare = takes_literals(expr.fn) and not all(a.literal for a in args)
        texts = tuple(a.text if bare else a.typed for a in args)
        dims = frozenset[sympy.Symbol]().union(*(a.dims for a in args))
        of = args[0].dtype if args else expr.dtype
        made = self._named(call_text(expr.fn, texts, of, expr.dtype), dims, expr.dtype)
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
        text = f"tl.cast({self.index(index)}, {type_text(expr.dtype)})"
        return self._named(text, self.dims(index), expr.dtype)

    def _select(self, expr: Select, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        condition = self._bound(expr.condition) or self._decided(expr.condition)
        condition = condition or self.value(expr.condition, env, guard)
        if condition.literal:
            return self.value(expr.if_true if condition.text == "True" else expr.if_false, env, guard)
        branches = []
        for branch, holds in ((expr.if_true, True), (expr.if_false, False)):
            inner = guard
            if self._loads(branch):
                when = condition if holds else self._named(f"({condition.text} == 0)", condition.dims, DType.BOOL)
                inner = (*guard, when) if when not in guard else guard
            branches.append(self.value(branch, env, inner))
        a, b = branches
        if b.literal and b.text in _ZEROS and condition.text in self.masked.get(a.text, ()):
            return a  # a load gives zero where its mask is off
        text = f"tl.where({condition.text}, {a.typed}, {b.typed})"
        return self._named(text, condition.dims | a.dims | b.dims, expr.dtype)

    def _decided(self, condition: Expr) -> Value | None:
        """A comparison of positions that are numbers here."""
        if not isinstance(condition, Call) or condition.fn not in _COMPARISONS:
            return None
        a, b = map(self._number, condition.args)
        if a is None or b is None:
            return None
        return Value(str(_COMPARISONS[condition.fn](a, b)), SCALAR, DType.BOOL, literal=True)

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
            case Call(fn="lt" | "gt" | "le" | "ge", args=(one, other)):
                a, b = self._place(one), self._place(other)
                if a is None or b is None:
                    return None
                low, high = (a, b) if condition.fn in ("lt", "le") else (b, a)
                if a.is_Integer and b.is_Integer:
                    return Value(str(_COMPARISONS[condition.fn](a, b)), SCALAR, DType.BOOL, literal=True)
                found = self._conjuncts([(low if condition.fn in ("lt", "gt") else low - 1, high)])
                return found[0] if found else Value("True", SCALAR, DType.BOOL, literal=True)
        return None

    def _both(self, a: Value, b: Value) -> Value:
        if a.literal or b.literal:
            decided, other = (a, b) if a.literal else (b, a)
            return other if decided.text == "True" else decided
        return a if a.text == b.text else self._named(f"({a.text} & {b.text})", a.dims | b.dims, DType.BOOL)

    def _place(self, expr: Expr) -> sympy.Expr | None:
        """A position or a number, in loops."""
        if isinstance(expr, Const) and expr.dtype.is_int:
            return sympy.Integer(int(expr.value))
        if not isinstance(expr, IndexValue):
            return None
        index = expr.index.xreplace(self.info.axes if self.info is not None else {})
        if not index.has(FloorDiv, ModularIndexing):
            return index
        return simplify(index, self.program.ranges.extents, self.program.nest.symbols)

    def _loads(self, expr: Expr) -> bool:
        """Whether the expression reads memory."""
        found = self._loading.get(id(expr))
        if found is None:
            reads = isinstance(expr, Load) and self.program.buffers[expr.buffer].scope is Scope.GLOBAL
            found = (expr, reads or any([self._loads(c) for c in children(expr)]))
            self._loading[id(expr)] = found
        return found[1]

    # --- memory -------------------------------------------------------------------------------------------------------

    def address(
        self, buffer: Buffer, indices: tuple[Index, ...], env: Mapping[str, Value], guard: tuple[Value, ...]
    ) -> tuple[str, Dims, sympy.Expr, tuple[str, ...]]:
        """Text of the element offset, its dims, and the parts by which equal addresses are known."""
        linear: sympy.Expr = sympy.S.Zero
        parts: list[str] = []
        dims = SCALAR
        for index, stride in zip(indices, buffer.strides, strict=True):
            if is_value(index):
                at = self.value(index, env, guard)  # type: ignore[arg-type]
                text = at.typed if at.dtype is DType.INT64 else f"{at.typed}.to(tl.int64)"
                parts.append(text if stride == 1 else f"{text} * {self._factor(stride)}")
                dims |= at.dims
            else:
                linear += index.xreplace(self._axes) * stride  # type: ignore[union-attr]
        linear = self._resolved(simplify(sympy.expand(linear), self._extents, self.program.nest.symbols))
        dims |= self.dims(linear)
        texts = [*parts, *([self.index(linear)] if linear != 0 or not parts else [])]
        # Blocks name their axes each for themselves: one place is known by the loops that it stands for.
        place = sympy.expand(linear.xreplace(self.meaning)) if linear.free_symbols & self.meaning.keys() else linear
        return " + ".join(texts), dims, place, tuple(parts)

    def _resolved(self, index: sympy.Expr) -> sympy.Expr:
        """The index in loops rather than in the variables of the text, where that takes lanes out of a quotient: what
        is the same for a whole tile is loaded once for it."""
        if not index.has(FloorDiv, ModularIndexing):
            return index
        exact = simplify(index.xreplace(self.meaning), self.program.ranges.extents, self.program.nest.symbols)
        return exact if self.dims(exact) < self.dims(index) else index

    @staticmethod
    def pointer(buffer: Buffer, offset: str) -> str:
        """The pointer to an element, or to those of a tile."""
        if offset == "0":
            return f"{buffer.name}_ptr"
        # One offset, added once: pointer plus scalar plus tile would be 64-bit arithmetic a lane.
        return f"{buffer.name}_ptr + {offset}" if offset.isidentifier() else f"{buffer.name}_ptr + ({offset})"

    def _factor(self, stride: sympy.Expr) -> str:
        text = self.index(stride)
        return text if stride.is_Integer or stride.is_Symbol else f"({text})"

    def _load(self, expr: Load, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value:
        assert self.info is not None
        buffer = self.program.buffers[expr.buffer]
        if buffer.scope is not Scope.GLOBAL:
            return self._local(expr, buffer)
        tile = self.tile_load(buffer, expr) if not guard else None
        if tile is not None:
            return tile
        text, own, linear, parts = self.address(buffer, expr.indices, env, guard)
        place = ("load", buffer.name, linear, parts)
        key = (*place, _texts(self.bounds(own)), ())
        plain = self._visited(key, linear)
        if plain is not None:
            return plain
        if buffer.name in self.stored:
            raise EmitError(
                f"block {self.info.block.name} reads {buffer.name} after the kernel "
                "wrote it elsewhere: other "
                "programs may not have written it yet; keep the value in a LOCAL buffer"
            )
        bounds = self.bounds(own.union(*(g.dims for g in guard)))
        key = (*place, _texts(bounds, guard), ())
        found = self._visited(key, linear)
        if found is not None:
            return found
        mask = self.all_of((*bounds, *guard))
        if mask is not None and mask.dims and not own:
            text = f"{text} + tl.zeros({self.shape(mask.dims)}, tl.int32)"
        suffix = f", mask={mask.text}, other=0" if mask is not None else ""
        policy = dict(self.info.block.annotations).get(f"evict:{buffer.name}")
        policy = policy or self.program.nest.annotation(f"evict:{buffer.name}")
        suffix += f', eviction_policy="{policy}"' if policy else ""
        where = self.pointer(buffer, text)
        name = self.out.assign(f"{buffer.name}_", f"tl.load({where}{suffix})")
        value = Value(name, own | (mask.dims if mask else SCALAR), buffer.dtype)
        self.masked[name] = frozenset(_texts(bounds, guard))
        self.out.remember(key, value)
        if self.visit is not None:
            self.visit.add(name)
        return value

    def _visited(self, key: tuple[Any, ...], place: sympy.Expr) -> Value | None:
        """What was loaded before under a key, if it was. Of an earlier visit of a row, where visits are told apart,
        tiles of half types only, in a variable that the compiler does not know to be the same, or it would keep what it
        has made of them; what is the same for all rows is loaded again."""
        found = self.out.known(key)
        assert found is None or isinstance(found, Value)
        if found is None or self.visit is None or found.text in self.visit or not found.dims:
            return found
        rows = {self.program.loops[v] for v in self.serial}
        if not found.dtype.is_half or not rows & place.free_symbols:
            return found if rows & place.free_symbols else None
        value = replace(found, text=self.out.assign("held", f"mlc_held({found.text})"))
        self.out.remember(key, value)
        self.visit.add(value.text)
        return value

    def _local(self, expr: Load, buffer: Buffer) -> Value:
        assert self.info is not None
        tile, block = self.tiles.get(buffer.name), self.info.block.name
        tile = self.apart.get((buffer.name, self.position(expr.indices)), tile) if self.info.copy else tile
        if tile is None:
            raise EmitError(f"block {block} reads {buffer.name} before the program has written it")
        if tile.path != tuple(self.serial[: len(tile.path)]):
            raise EmitError(
                f"block {block} reads {buffer.name} outside the loop in which it was written: a register tile holds "
                "the last iteration alone; compute the producer here (compute_at or compute_inline)"
            )
        if tile.partial & set(self.open):
            raise EmitError(f"block {block} reads {buffer.name} inside the loop that is still reducing it")
        position = self.position(expr.indices)
        if position != tile.position:
            summed = self._summed(position)
            if tuple(p.xreplace(summed) for p in position) == tile.position:
                own = {v: k for k, v in summed.items()}
                return replace(tile.value, dims=frozenset(own.get(d, d) for d in tile.value.dims))
            raise EmitError(
                f"block {block} reads {buffer.name} at {position}, the program wrote it at {tile.position}: a register "
                "tile is read at the lane that wrote it; give both blocks the same tile"
            )
        return tile.value

    def _store_state(self, buffer: str, position: tuple[sympy.Expr, ...], value: Value) -> None:
        """Give a variable that a loop carries its value for the next iteration."""
        tile, name = self.tiles[buffer], self.carried[buffer]
        if position != tile.position:
            raise EmitError(
                f"{buffer} is carried at {tile.position} and written at {position}: give both the same tile"
            )
        self.out.line(f"{name} = {self.broadcast(value, tile.value.dims).text}")
        self.out.forget_value(name)

    def _summed(self, position: tuple[sympy.Expr, ...]) -> dict[sympy.Symbol, sympy.Symbol]:
        """The axis along which a product sums, in its left operand -> the axis of columns that has the same lanes."""
        found: dict[sympy.Symbol, sympy.Symbol] = {}
        for axis in {s for p in position for s in p.free_symbols} & self.program.turned.keys():
            place = self.program.tile[axis]
            own = next((s for s, at in self.program.tile.items() if at == place and s not in self.program.turned), None)
            if own is not None:
                found[axis] = own
        return found

    def store(self, buffer: Buffer, indices: tuple[Index, ...], value: Value, ended: Dims | None = None) -> None:
        """Write a value to a buffer: a tile kept under its position, or a masked store to memory.

        ``ended`` are the loops over which a reduction has ended with this value.
        """
        assert self.info is not None
        if value.dtype is not buffer.dtype:
            raise EmitError(
                f"block {self.info.block.name} stores {value.dtype.value} to {buffer.name} of {buffer.dtype.value}"
            )
        if buffer.scope is not Scope.GLOBAL:
            if buffer.name in self.carried:
                self._store_state(buffer.name, self.position(indices), value)
                return
            if value.text in self.carried.values():  # it is about to change
                value = Value(self.out.assign("v", value.text), value.dims, value.dtype)
            partial = self.info.carriers if ended is not None else frozenset()
            tile = Tile(value, self.position(indices), tuple(self.serial), partial)
            self.tiles[buffer.name] = tile
            if self.info.copy:
                self.apart[buffer.name, tile.position] = tile
            return
        text, dims, linear, parts = self.address(buffer, indices, {}, ())
        if not value.dims <= dims:
            raise EmitError(
                f"block {self.info.block.name} stores values of several lanes to one element of {buffer.name}"
            )
        bounds = self.bounds(dims, ended or SCALAR)
        mask = self.all_of(bounds)
        if mask is not None and not mask.dims <= dims:
            raise EmitError(f"block {self.info.block.name}: the predicate varies along axes that the store lacks")
        suffix = f", mask={mask.text}" if mask is not None else ""
        self.out.forget(buffer.name)
        where = self.pointer(buffer, text)
        kept = value.text if not value.literal else value.typed
        self.out.line(f"tl.store({where}, {kept}{suffix})")
        self.stored.add(buffer.name)
        self.out.remember(("load", buffer.name, linear, parts, _texts(bounds), ()), value)


_ZEROS = ("0", "0.0", "False")


def _texts(*conjuncts: tuple[Value, ...]) -> tuple[str, ...]:
    """What tells masks apart: their parts, whatever the order."""
    return tuple(sorted({c.text for part in conjuncts for c in part}))


def _bare(text: str) -> str:
    return text[1:-1] if text.startswith("(") and closes_at_end(text) else text
