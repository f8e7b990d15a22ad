"""What a Triton program keeps in registers and in memory: tiles of LOCAL buffers, loads and stores.

Loads carry the mask of the lanes that perform them, and what was loaded once is known by its place and mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.value import Index, Load, is_value
from ...ir.nest.hints import EVICT, NARROW_ROWS, NUM_WARPS, TRANSPOSED
from ...ir.nest.kept import changed_where
from ...ir.nest.loops import AxisKind, Buffer, Scope, Store
from ..kernel import EmitError
from .expressions import Expressions
from .program import TritonProgram
from .writer import SCALAR, Dims, SourceWriter, Value

# Warps whose tensor cores multiply together.
WARPS_OF_GROUP = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """A LOCAL buffer as the program holds it: a value, the position it was written at, and where that holds.

    ``path`` are the loops of the program that were open then, ``partial`` the loop variables inside which it is an
    unfinished reduction.
    """

    value: Value
    position: tuple[sympy.Expr, ...]
    path: tuple[sympy.Symbol, ...]
    partial: frozenset[sympy.Symbol] = frozenset()


class Values(Expressions):
    """Emits the expressions, loads and stores of one block at a time (``enter``) into the writer."""

    def __init__(self, program: TritonProgram, writer: SourceWriter) -> None:
        super().__init__(program, writer)
        self.tiles: dict[str, Tile] = {}
        # Those of blocks that are written out apart: one for each place that their copies wrote.
        self.apart: dict[tuple[str, tuple[sympy.Expr, ...]], Tile] = {}
        self.stored: set[str] = set()
        # LOCAL buffers that a loop carries -> the variable of the text.
        self.carried: dict[str, str] = {}
        # Loop variables open at this point, and among them those that are loops of the program.
        self.open: list[sympy.Symbol] = []
        self.serial: list[sympy.Symbol] = []
        # Loads of whole tiles that something else than a load of each element does.
        self.tile_load: Callable[[Buffer, Load], Value | None] = lambda buffer, expr: None
        # The loads of this visit of a row, where each visit begins from what was loaded; None where none does.
        self.visit: set[str] | None = None

    # --- loads --------------------------------------------------------------------------------------------------------

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

    def _in_copies(self, text: str, place: sympy.Expr, parts: tuple[str, ...]) -> tuple[str, str]:
        """An offset without its constant, and the text that adds that: the parts of a row have the rest in common, and
        a load or store holds a constant itself, so that one address in registers is that of all of them."""
        if parts or not NARROW_ROWS.of(self.program.nest):
            return text, ""
        constant, rest = place.as_coeff_Add()
        return self.index(rest), f" + {constant}" if constant else ""

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
        if self._is_for_many(expr, guard):
            guard = ()
        text, own, linear, parts = self.address(buffer, expr.indices, env, guard)
        place: tuple[Any, ...] = ("load", buffer.name, linear, parts)
        if (lanes := self._lanes_of_operand(own)) is not None:
            text, own, place = f"{text} + tl.zeros({self.shape(lanes)}, tl.int32)", lanes, (*place, lanes)
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
        across = self._across(buffer, linear, own) if not parts and not guard else None
        lies = self.out.known(across[1]) if across is not None else None
        if lies is not None:
            assert isinstance(lies, Value)
            value = Value(self.out.assign(f"{buffer.name}_", f"tl.trans({lies.text})"), own, buffer.dtype)
            self.masked[value.text] = frozenset(_texts(bounds))
            self.out.remember(key, value)
            return value
        mask = self.all_of((*bounds, *guard))
        text, beyond = self._in_copies(text, linear, parts)
        if mask is not None and mask.dims and not own:
            text = f"{text} + tl.zeros({self.shape(mask.dims)}, tl.int32)"
        suffix = self.program.types.masked(mask.text, buffer.dtype) if mask is not None else ""
        policy = EVICT.of(self.info.block, buffer.name) or EVICT.of(self.program.nest, buffer.name)
        suffix += f', eviction_policy="{policy}"' if policy else ""
        where = self.pointer(buffer, text) + beyond
        loaded = f"tl.load({where}{suffix})"
        if not beyond and (mask is None or mask.dims <= own) and self._is_once_in_operand(linear, own):
            loaded = self._loaded_once(buffer, text, mask, own)
        name = self.out.assign(f"{buffer.name}_", loaded)
        value = Value(name, own | (mask.dims if mask else SCALAR), buffer.dtype)
        self.masked[name] = frozenset(_texts(bounds, guard))
        self.out.remember(key, value)
        if across is not None:
            self.out.remember(across[0], value)
        if self.visit is not None:
            self.visit.add(name)
        return value

    def _lanes_of_operand(self, own: Dims) -> Dims | None:
        """The lanes in which an operand of a product has what is one number for all of its tile: those of its rows, or
        columns. An operand has the layout of tensor cores from the start only if it is made of tiles that are loaded.
        """
        if own or self.info is None or not self._is_in_registers():
            return None
        lanes = self.program.dims(set(self.info.spatial)) - {self.program.copies}
        return lanes if len(lanes) == 1 else None

    def _is_in_registers(self) -> bool:
        """Whether this is an operand that threads hold as single warps multiply it. Groups of warps take it from shared
        memory."""
        target = self.program.target
        groups = target.has_group_products and NUM_WARPS.of(self.program.nest) >= WARPS_OF_GROUP
        return self.info is not None and self.info.is_operand and target.has_pairs and not groups

    def _is_once_in_operand(self, place: sympy.Expr, own: Dims) -> bool:
        """Whether an operand has one element of each row, or column, of which a loop copies none ahead that lie side by
        side."""
        if len(own) != 1 or not self._is_in_registers():
            return False
        (lane,) = own
        return place.coeff(lane) != 1 or not place.free_symbols & {self.program.loops[v] for v in self.serial}

    def _loaded_once(self, buffer: Buffer, text: str, mask: Value | None, own: Dims) -> str:
        """A load of one element of each row, or column: of a tile with one of them, older versions of Triton would load
        it for each that a thread has of the row."""
        (lane,) = own
        dim, extent = self.program.tile[lane]
        flat, back = f"tl.reshape({{}}, [{extent}])", "[None, :]" if dim else "[:, None]"
        suffix = self.program.types.masked(flat.format(mask.text), buffer.dtype) if mask is not None else ""
        return f"tl.load({self.pointer(buffer, flat.format(text))}{suffix}){back}"

    def _across(self, buffer: Buffer, place: sympy.Expr, own: Dims) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """How a tile that a product reads is known in this iteration, and how the same elements are known with rows as
        columns; None where tiles of the array are not transposed."""
        assert self.info is not None
        lanes = {axis: self.program.tile[axis] for axis in own}
        if not TRANSPOSED.of(self.program.nest, buffer.name) or not self.info.is_operand:
            return None
        if sorted(dim for dim, _ in lanes.values()) != [0, 1]:
            return None
        bounds = self.unproved(self.bounds_along(own))

        def known(turned: int) -> tuple[Any, ...]:
            here = {axis: sympy.Symbol(f"lane{dim ^ turned}_{extent}") for axis, (dim, extent) in lanes.items()}
            mask = frozenset((lhs.xreplace(here), rhs.xreplace(here)) for lhs, rhs in bounds)
            return "load", buffer.name, self.out.level, place.xreplace(here), mask

        return known(0), known(1)

    def _is_for_many(self, expr: Load, guard: tuple[Value, ...]) -> bool:
        """Whether lanes of which a guard switches some off read one element, which is there whatever the guard says: it
        is loaded once for all of them, and what is made of it is computed once."""
        if not guard or any(is_value(i) for i in expr.indices):
            return False
        own = SCALAR.union(*(self.dims(i.xreplace(self._axes)) for i in expr.indices))  # type: ignore[union-attr]
        return (not own or any(not g.dims <= own for g in guard)) and self.in_range(expr)

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

    def _summed(self, position: tuple[sympy.Expr, ...]) -> dict[sympy.Symbol, sympy.Symbol]:
        """The axis along which a product sums, in its left operand -> the axis of columns that has the same lanes."""
        found: dict[sympy.Symbol, sympy.Symbol] = {}
        for axis in {s for p in position for s in p.free_symbols} & self.program.turned.keys():
            place = self.program.tile[axis]
            own = next((s for s, at in self.program.tile.items() if at == place and s not in self.program.turned), None)
            if own is not None:
                found[axis] = own
        return found

    # --- stores -------------------------------------------------------------------------------------------------------

    def _store_state(self, buffer: str, position: tuple[sympy.Expr, ...], value: Value) -> None:
        """Give a variable that a loop carries its value for the next iteration."""
        tile, name = self.tiles[buffer], self.carried[buffer]
        if position != tile.position:
            raise EmitError(
                f"{buffer} is carried at {tile.position} and written at {position}: give both the same tile"
            )
        self.out.line(f"{name} = {self.broadcast(value, tile.value.dims).text}")
        self.out.forget_value(name)

    def store_changed(self, buffer: Buffer, statement: Store) -> None:
        """Write what a statement stores, and nothing to rows of which data say that they stay as they are."""
        found = changed_where(statement, buffer.dtype) if buffer.scope is Scope.GLOBAL else None
        if found is not None and self._loads(found[0]):
            condition, new = self.value(found[0]), found[1]
            rows, lanes = (
                SCALAR.union(
                    *(
                        self.dims(i.xreplace(self._axes))  # type: ignore[union-attr]
                        for i, stride in zip(statement.indices, buffer.strides, strict=True)
                        if (stride == 1) is beside and not is_value(i)
                    )
                )
                for beside in (False, True)
            )
            # Lanes beside one another store as one word only where all of them do.
            if condition.dims and condition.dims <= rows - lanes:
                value = self.value(new, guard=(condition,))
                self.store(buffer, statement.indices, value, guard=(condition,))
                return
        self.store(buffer, statement.indices, self.value(statement.value))

    def store(
        self, buffer: Buffer, indices: tuple[Index, ...], value: Value, ended: Dims | None = None,
        guard: tuple[Value, ...] = (),
    ) -> None:  # fmt: skip
        """Write a value to a buffer: a tile kept under its position, or a masked store to memory.

        ``ended`` are the loops over which a reduction has ended with this value; lanes outside of ``guard`` store
        nothing.
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
        single = value.dims - dims
        if not single <= self._single():
            raise EmitError(
                f"block {self.info.block.name} stores values of several lanes to one element of {buffer.name}"
            )
        dims |= single
        bounds = self.bounds(dims) if ended is None else self.bounds_of_results(dims, ended)
        mask = self.all_of((*bounds, *guard))
        if mask is not None and not mask.dims <= dims:
            raise EmitError(f"block {self.info.block.name}: the predicate varies along axes that the store lacks")
        suffix = f", mask={mask.text}" if mask is not None else ""
        self.out.forget(buffer.name)
        text, beyond = self._in_copies(text, linear, parts)
        where = self.pointer(buffer, text) + beyond
        if single:
            where = self.broadcast(Value(where, dims - single, buffer.dtype), dims).text
        kept = value.text if not value.literal else value.typed
        self.out.line(f"tl.store({where}, {kept}{suffix})")
        self.stored.add(buffer.name)
        if not single and not guard:
            self.out.remember(("load", buffer.name, linear, parts, _texts(bounds), ()), value)

    def _single(self) -> Dims:
        """The tile axes along which the block has one element: indices leave them out, and a mask the other lanes."""
        assert self.info is not None
        spatial = [a for a in self.info.block.axes if a.kind is AxisKind.SPATIAL and a.extent != 1]
        several = frozenset[sympy.Symbol]().union(*(self.dims(self._axes[a.var]) for a in spatial))
        return self.info.spatial - several


def _texts(*conjuncts: tuple[Value, ...]) -> tuple[str, ...]:
    """What tells masks apart: their parts, whatever the order."""
    return tuple(sorted({c.text for part in conjuncts for c in part}))
