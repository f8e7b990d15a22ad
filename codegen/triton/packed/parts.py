"""Elements that lie interleaved in memory and are operands of several products: read once as they lie, and dealt out.

Where each element of one operand is a part of a word, the products of its parts are written out, and each takes every
second (fourth, eighth) element of the other operand. Those are one contiguous tile, whose halves ``tl.split`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Load, is_value
from ....ir.nest.loops import Buffer, Scope
from ...kernel import ALIGNMENT
from ..program import BlockInfo
from ..values import Values
from ..writer import Dims, SourceWriter, Value

# Bytes that are loaded as one where single ones are wanted.
WORD = 2
# The least that a copy to shared memory takes at a time.
COPIED = 4


@dataclass(frozen=True, slots=True)
class WrittenIteration:
    """One iteration of a loop that is written out: ``infos`` are the blocks in it as the loop has them, ``outer`` the
    iteration of the loop around it that is written out too."""

    loop: sympy.Symbol
    count: int
    at: int
    infos: Mapping[str, BlockInfo]
    outer: WrittenIteration | None = None


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where the lanes of a load are in loops that are written out: ``rest + count * lane + at``, each ``at`` below
    ``count`` in one iteration of them."""

    side: BlockInfo
    rest: sympy.Expr
    lane: sympy.Symbol
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class WrittenPlace:
    """Where a load is in loops that are written out: ``at`` of ``count`` elements side by side, which the loops
    ``parts`` tell. ``place`` has these, and what others are."""

    side: BlockInfo
    place: sympy.Expr
    parts: tuple[sympy.Symbol, ...]
    count: int
    at: int


class Parts:
    """Loads of operands in loops over parts."""

    def __init__(self, values: Values, out: SourceWriter) -> None:
        self.values = values
        self.out = out
        self.iteration: WrittenIteration | None = None

    def load(self, buffer: Buffer, expr: Load) -> Value | None:
        """The tile of a load that takes every ``count``-th element of contiguous ones, or one of several that lie side
        by side in each row; None for other loads."""
        place = self._place(buffer, expr)
        if place is None:
            return self._neighbours(buffer, expr)
        key = ("load", buffer.name, "parts", place.rest, place.count)
        found = self.out.known(key)
        if found is None:
            found = self._split(buffer, place.rest, place.lane, place.count)
            if found is None:
                return None
            self.out.remember(key, found)
        return found[place.at]  # type: ignore[index, no-any-return]

    def word(self, expr: Load) -> tuple[Value, int] | None:
        """The tile of words of two bytes in which a load takes every second byte, and the bit at which that begins;
        None for other loads."""
        buffer = self.values.program.buffers[expr.buffer]
        place = self._place(buffer, expr)
        if place is None or place.count != WORD or buffer.dtype.itemsize != 1 or buffer.align % WORD:
            return None
        halved = sympy.expand(place.rest / WORD)
        if not all(t.as_coeff_Mul()[0].is_Integer for t in sympy.Add.make_args(halved)):
            return None
        key = ("load", buffer.name, "words", place.rest)
        found = self.out.known(key)
        if found is None:
            values = self.values
            offset = sympy.expand(halved + place.lane)
            dims = values.dims(offset)
            mask = values.all_of(values.bounds(dims))
            if mask is not None and not mask.dims <= dims:
                return None
            suffix = self.values.program.types.masked(mask.text, DType.UINT16) if mask is not None else ""
            pointer = f"tl.cast({buffer.name}_ptr, tl.pointer_type(tl.uint16), bitcast=True)"
            name = self.out.assign(f"{buffer.name}_", f"tl.load({pointer} + ({values.index(offset)}){suffix})")
            found = Value(name, dims, DType.UINT16)
            self.out.remember(key, found)
        return found, 8 * place.at  # type: ignore[return-value]

    def _place(self, buffer: Buffer, expr: Load) -> PartPlace | None:
        found = self._written(buffer, expr)
        if found is None:
            return None
        lanes = [s for s in found.place.free_symbols & found.side.reduced_tile if found.place.coeff(s) == found.count]
        if found.count == 1 or len(lanes) != 1:
            return None
        (lane,) = lanes
        rest = sympy.expand(found.place.xreplace(dict.fromkeys(found.parts, sympy.S.Zero)) - found.count * lane)
        if rest.free_symbols & {lane, *found.parts} or self._has_tail(found.side, {lane, *found.parts}):
            return None
        return PartPlace(found.side, rest, lane, found.count, found.at)

    def _written(self, buffer: Buffer, expr: Load) -> WrittenPlace | None:
        now, info, program = self.iteration, self.values.info, self.values.program
        if now is None or info is None or buffer.scope is not Scope.GLOBAL or buffer.name in program.nest.outputs:
            return None
        if any(is_value(i) for i in expr.indices):
            return None
        around = [now]
        while (outer := around[-1].outer) is not None:
            around.append(outer)
        side = next((o for o in around[-1].infos[info.block.name].operands if o.spatial == info.spatial), None)
        if side is None:
            return None
        place = sympy.expand(
            sympy.Add(*(i.xreplace(side.axes) * s for i, s in zip(expr.indices, buffer.strides, strict=True)))  # type: ignore[union-attr]
        )
        # Each loop over parts is a digit above those before it; others are where they are.
        count, at, parts = 1, 0, list[sympy.Symbol]()
        for i in sorted(around, key=lambda i: place.coeff(i.loop)):
            if place.coeff(i.loop) == count and i.count & (i.count - 1) == 0:
                at, count = at + count * i.at, count * i.count
                parts.append(i.loop)
        place = place.xreplace({i.loop: sympy.Integer(i.at) for i in around if i.loop not in parts})
        return WrittenPlace(side, place, tuple(parts), count, at)

    def _neighbours(self, buffer: Buffer, expr: Load) -> Value | None:
        """The element of each row, or column, of which iterations that are written out take those side by side, as the
        scales of groups are: they are loaded together, in words that are copied ahead. None for other loads."""
        found = self._written(buffer, expr)
        if found is None or not COPIED <= found.count * buffer.dtype.itemsize <= ALIGNMENT or found.count == 1:
            return None
        rest = found.place.xreplace(dict.fromkeys(found.parts, sympy.S.Zero))
        moving = {*found.parts, *found.side.reduced_tile}
        dims = self.values.dims(rest)
        if rest.free_symbols & moving or len(dims) != 1 or self._has_tail(found.side, set(found.parts)):
            return None
        key = ("load", buffer.name, "neighbours", rest, found.count)
        tiles = self.out.known(key)
        if tiles is None:
            tiles = self._loaded_together(buffer, rest, dims, found.count)
            if tiles is None:
                return None
            self.out.remember(key, tiles)
        return tiles[found.at]  # type: ignore[index, no-any-return]

    def _loaded_together(self, buffer: Buffer, rest: sympy.Expr, dims: Dims, count: int) -> tuple[Value, ...] | None:
        values = self.values
        mask = values.all_of(values.bounds(dims))
        if mask is not None and not mask.dims <= dims:
            return None
        (lane,) = dims
        dim, extent = values.program.tile[lane]
        place, back = ("[None, :]", "[:, None]") if dim == 0 else ("[:, None]", "[None, :]")
        suffix = values.program.types.masked(mask.text, buffer.dtype) if mask is not None else ""
        offset = f"{values.index(rest)} + tl.arange(0, {count}){place}"
        whole = self.out.assign(f"{buffer.name}_", f"tl.load({buffer.name}_ptr + ({offset}){suffix})")
        rows = whole if dim == 0 else f"tl.permute({whole}, (1, 0))"
        halves = ", ".join(["2"] * (count.bit_length() - 1))
        tiles = self._dealt(f"tl.reshape({rows}, [{extent}, {halves}])", count)
        return tuple(Value(f"{name}{back}", dims, buffer.dtype) for name in tiles)

    def _has_tail(self, side: BlockInfo, moving: set[sympy.Symbol]) -> bool:
        """Whether some of the elements are not there."""
        own = [(a, b) for a, b in side.bounds if (a.free_symbols | b.free_symbols) & moving]
        return any(not self.values.program.ranges.below(a, b) for a, b in own)

    def _split(self, buffer: Buffer, rest: sympy.Expr, lane: sympy.Symbol, count: int) -> tuple[Value, ...] | None:
        values, program = self.values, self.values.program
        dim, extent = program.tile[lane]
        dims = values.dims(rest)
        mask = values.all_of(values.bounds(dims))
        across = dims | (mask.dims if mask is not None else frozenset())
        copies = values.info.spatial & {program.copies} if values.info is not None else frozenset()
        across |= copies  # a vector is copied as the columns that it stands for
        if len(across) > 1:
            return None
        place = "[:, None]" if dim == 0 else "[None, :]"
        offset = f"{values.index(rest)} + tl.arange(0, {count * extent}){place}"
        if copies:
            offset += f" + tl.zeros({values.shape(copies)}, tl.int32)"
        suffix = values.program.types.masked(mask.text, buffer.dtype) if mask is not None else ""
        whole = self.out.assign(f"{buffer.name}_", f"tl.load({buffer.name}_ptr + ({offset}){suffix})")
        other = next((program.tile[s][1] for s in across), 1)
        levels = count.bit_length() - 1
        halves = ", ".join(["2"] * levels)
        if dim == 1:
            parts = f"tl.reshape({whole}, [{other}, {extent}, {halves}])"
        else:
            order = ", ".join(map(str, (0, levels + 1, *range(1, levels + 1))))
            parts = f"tl.permute(tl.reshape({whole}, [{extent}, {halves}, {other}]), ({order}))"
        return tuple(Value(name, across | {lane}, buffer.dtype) for name in self._dealt(parts, count))

    def _dealt(self, text: str, count: int) -> list[str]:
        """A tile whose last dimensions are the bits of a part's number, the lowest last: the tiles of all parts."""
        tiles, levels = [text], count.bit_length() - 1
        for _ in range(levels):
            tiles = [name for whole in tiles for name in self._halves(whole)]
        return [tiles[int(f"{k:0{levels}b}"[::-1], 2)] for k in range(count)]

    def _halves(self, text: str) -> tuple[str, str]:
        names = self.out.fresh("part"), self.out.fresh("part")
        self.out.line(f"{names[0]}, {names[1]} = tl.split({text})")
        return names
