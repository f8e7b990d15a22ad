"""Random numbers of a tile, of which neighbours take the words of one call of Philox.

Element k of a tensor takes a word of a stream, or two of them, and Philox makes four. Lanes that are neighbours
therefore ask for the same four. They are made once, for a tile of a fourth of the lanes (of half of them, where an
element takes two words), and joined to a whole one. This holds in whatever layout the numbers are read: where results
of several widths want lanes of their own, the compiler moves the numbers, and makes no word again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import sympy

from ...ir.expr.index import simplify
from ...ir.expr.ops import DRAWN_TOGETHER
from ...ir.expr.symbols import divisor
from ...ir.expr.value import Call, IndexValue
from .lanes import bare
from .types import type_text
from .writer import SourceWriter, Value

if TYPE_CHECKING:
    from .values import Values


class Draws:
    """Calls of random functions, as hook of an ``Expressions``."""

    def __init__(self, values: Values, writer: SourceWriter) -> None:
        self.values = values
        self.out = writer

    def draw(self, e: Call, env: Mapping[str, Value], guard: tuple[Value, ...]) -> Value | None:
        """The numbers of a tile; None where no neighbours in it are neighbours of the stream, or where a group of them
        begins within the words of a call."""
        values, program = self.values, self.values.program
        seed, place = e.args
        if values.info is None or values.info.is_operand or not isinstance(place, IndexValue):
            return None
        index = self._in_loops(place)
        together, key = DRAWN_TOGETHER[e.fn], values.value(seed, env, guard)
        axis = next((s for s in program.tile if s in index.free_symbols and self._groups(index, s, together)), None)
        if axis is None or key.dims:
            return None
        dim = program.tile[axis][0]
        at = values.index(sympy.expand((index - axis) / together) + self._group(axis, together))
        shape, order = values.shape(values.dims(index)), self._order(dim, together)
        group = bare(f"tl.cast({at}, {type_text(place.dtype)})")
        return values.named(f"mlc_{e.fn}_tile({key.typed}, {group}, {order}, {shape})", values.dims(index), e.dtype)

    def _groups(self, index: sympy.Expr, axis: sympy.Symbol, together: int) -> bool:
        """Whether lanes along an axis are neighbours, so many of which begin where a call does."""
        program = self.values.program
        first = sympy.expand(index - axis)
        divisors = {s.symbol: s.divisor for s in program.nest.symbols.sizes}
        whole = divisor(first, divisors) % together == 0 and program.tile[axis][1] % together == 0
        return whole and axis not in first.free_symbols

    def _order(self, dim: int, together: int) -> list[int]:
        """The dimensions of a tile in order, those of a group's lanes behind the dimension of its groups."""
        rank = self.values.program.rank
        lanes = range(rank, rank + together.bit_length() - 1)
        return [*range(dim + 1), *lanes, *range(dim + 1, rank)]

    def _in_loops(self, place: IndexValue) -> sympy.Expr:
        program, info = self.values.program, self.values.info
        assert info is not None
        return sympy.expand(simplify(place.index.xreplace(info.axes), program.ranges.extents, program.nest.symbols))

    def _group(self, axis: sympy.Symbol, together: int) -> sympy.Symbol:
        """The variable of the text that numbers the groups of so many lanes along an axis."""
        found = self.out.known(("groups", axis, together))
        if found is not None:
            return found  # type: ignore[return-value]
        program = self.values.program
        dim, lanes = program.tile[axis]
        group = sympy.Symbol(self.out.fresh("g"), integer=True, nonnegative=True)
        program.ranges.loop(group, sympy.Integer(lanes // together))
        self.out.line(program.axis_text(group, dim, lanes // together))
        self.out.remember(("groups", axis, together), group)
        return group
