"""Positions as numbers in the operands of products: where in a word of zero points the one of a column is.

Tensor cores take operands in a layout of their own. Triton gives it to the loads that an operand is made of, and all
that follows is computed in it, but only if everything begins with loads. Where a position is among it, a tile is
computed in another layout, and passes through shared memory for each product. So positions come from a load too, of
which no lane is performed, and which is ahead of all loops.
"""

from __future__ import annotations

import sympy

from ....ir.expr.dtypes import DType
from ..types import type_text
from ..values import Values
from ..writer import SourceWriter, Value


class Positions:
    """Positions in the operands of products; ``enabled`` where those stay in registers."""

    def __init__(self, values: Values, out: SourceWriter, enabled: bool) -> None:
        self.values = values
        self.out = out
        self.enabled = enabled

    def value(self, index: sympy.Expr, dtype: DType) -> Value | None:
        """A position that is the same in all loops of the program; None for others, and outside of operands."""
        values, program = self.values, self.values.program
        if not self.enabled or values.info is None or not values.info.is_operand or not values.dims(index):
            return None
        place = sympy.expand(index.xreplace(values.meaning))
        if not place.free_symbols <= {*program.tile, *program.program_ids, *program.nest.symbols.symbols}:
            return None
        key = ("position", place, dtype)
        found = self.out.known(key)
        if found is None:
            pointer = f"{program.nest.params[0].name}_ptr"
            text = f"mlc_as_loaded(tl.cast({values.index(place)}, {type_text(dtype)}), {pointer})"
            found = Value(self.out.assign_ahead("at", text), values.dims(place), dtype)
            self.out.remember_always(key, found)
        assert isinstance(found, Value)
        return found
