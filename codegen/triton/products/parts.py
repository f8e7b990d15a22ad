"""Elements that lie interleaved in memory and are operands of several products: read once as they lie, and dealt out.

Where each element of one operand is a part of a word, the products of its parts are written out, and each takes every
second (fourth, eighth) element of the other operand. Those are one contiguous tile, whose halves ``tl.split`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ....ir.expr.value import Load, is_value
from ....ir.nest.loops import Buffer, Scope
from ..functions import masked
from ..program import BlockInfo
from ..values import Values
from ..writer import SourceWriter, Value


@dataclass(frozen=True, slots=True)
class WrittenIteration:
    """One iteration of a loop that is written out: ``infos`` are the blocks in it as the loop has them."""

    loop: sympy.Symbol
    count: int
    at: int
    infos: Mapping[str, BlockInfo]


class Parts:
    """Loads of operands in a loop over parts."""

    def __init__(self, values: Values, out: SourceWriter) -> None:
        self.values = values
        self.out = out
        self.iteration: WrittenIteration | None = None

    def load(self, buffer: Buffer, expr: Load) -> Value | None:
        """The tile of a load that takes every ``count``-th element of contiguous ones; None for other loads."""
        now, info, program = self.iteration, self.values.info, self.values.program
        if now is None or info is None or buffer.scope is not Scope.GLOBAL or buffer.name in program.nest.outputs:
            return None
        side = next((o for o in now.infos[info.block.name].operands if o.spatial == info.spatial), None)
        if side is None or now.count & (now.count - 1) or any(is_value(i) for i in expr.indices):
            return None
        place = sympy.expand(
            sympy.Add(*(i.xreplace(side.axes) * s for i, s in zip(expr.indices, buffer.strides, strict=True)))  # type: ignore[union-attr]
        )
        lanes = [s for s in place.free_symbols & side.reduced_tile if place.coeff(s) == now.count]
        if len(lanes) != 1 or place.coeff(now.loop) != 1:
            return None
        (lane,) = lanes
        rest = sympy.expand(place - now.count * lane - now.loop)
        if rest.free_symbols & {lane, now.loop} or self._has_tail(side, {lane, now.loop}):
            return None
        key = ("load", buffer.name, "parts", rest, now.count)
        found = self.out.known(key)
        if found is None:
            found = self._split(buffer, rest, lane, now.count)
            if found is None:
                return None
            self.out.remember(key, found)
        return found[now.at]  # type: ignore[index, no-any-return]

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
        if len(across) > 1:
            return None
        place = "[:, None]" if dim == 0 else "[None, :]"
        offset = f"{values.index(rest)} + tl.arange(0, {count * extent}){place}"
        suffix = masked(mask.text, buffer.dtype) if mask is not None else ""
        whole = self.out.assign(f"{buffer.name}_", f"tl.load({buffer.name}_ptr + ({offset}){suffix})")
        other = next((program.tile[s][1] for s in across), 1)
        levels = count.bit_length() - 1
        halves = ", ".join(["2"] * levels)
        if dim == 1:
            tiles = [f"tl.reshape({whole}, [{other}, {extent}, {halves}])"]
        else:
            order = ", ".join(map(str, (0, levels + 1, *range(1, levels + 1))))
            tiles = [f"tl.permute(tl.reshape({whole}, [{extent}, {halves}, {other}]), ({order}))"]
        # The last of the new dimensions is the lowest bit of a part's number.
        for _ in range(levels):
            tiles = [name for text in tiles for name in self._halves(text)]
        parts = [tiles[int(f"{k:0{levels}b}"[::-1], 2)] for k in range(count)]
        return tuple(Value(name, across | {lane}, buffer.dtype) for name in parts)

    def _halves(self, text: str) -> tuple[str, str]:
        names = self.out.fresh("part"), self.out.fresh("part")
        self.out.line(f"{names[0]}, {names[1]} = tl.split({text})")
        return names
