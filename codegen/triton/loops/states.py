"""States that a loop carries: what a block that scans over the loop writes is there in the next iteration, and after.

Each is one variable of the text, given before the loop and again in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ....ir.nest.loops import AxisKind, Scope
from ...kernel import EmitError
from ..program import BlockInfo
from ..values import Tile, Values
from ..writer import SourceWriter, Value


def begin_states(values: Values, out: SourceWriter, inside: Sequence[BlockInfo], var: sympy.Symbol) -> None:
    """Before the loop over ``var``: a variable for each buffer that blocks inside carry over it by stores.

    Raises EmitError where nothing was in the buffer before.
    """
    buffers = values.program.buffers
    for info in inside:
        if info.block.is_scan or not any(
            var in info.axes[a.var].free_symbols for a in info.block.axes_of(AxisKind.SCAN)
        ):
            continue
        for write in info.block.writes:
            positions = [i.xreplace(info.axes) for i in write.indices if isinstance(i, sympy.Expr)]
            if buffers[write.buffer].scope is Scope.GLOBAL or any(var in p.free_symbols for p in positions):
                continue
            if write.buffer in values.carried:
                continue
            tile = values.tiles.get(write.buffer)
            if tile is None:
                raise EmitError(
                    f"block {info.block.name} carries {write.buffer} over the loop {var}, and nothing was there before"
                )
            dims = values.program.dims({s for p in tile.position for s in p.free_symbols})
            start = values.broadcast(tile.value, dims)
            name = out.assign("state", start.text)
            value = Value(name, dims, tile.value.dtype)
            values.tiles[write.buffer] = Tile(value, tile.position, tile.path, tile.partial)
            values.carried[write.buffer] = name
