"""Loops that end where data say: behind the last element that counts for any lane of the tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from ....ir.nest.data_ends import data_end
from ....ir.nest.live import live_limits
from ....ir.nest.loops import Loop
from ...kernel import EmitError
from ..program import BlockInfo
from ..values import Values
from ..writer import SourceWriter


def live_ends(values: Values, out: SourceWriter, loop: Loop, low: str, high: str) -> tuple[str, str]:
    """From where to where a loop runs that would run from ``low`` to ``high``, by the numbers that the hints of all
    blocks in it name."""
    integer = values.program.integer
    begins, ends = live_limits(values.program.nest, loop)
    for name in begins:
        low = out.assign("low", f"tl.maximum(tl.cast({_number(values, name)}, {integer}), {low})")
    for name in ends:
        high = out.assign("high", f"tl.minimum(tl.cast({_number(values, name)}, {integer}), {high})")
    return low, high


def _number(values: Values, name: str) -> str:
    value = values.tiles[name].value
    return f"tl.max({value.typed})" if value.dims else value.typed


def end_of(values: Values, out: SourceWriter, inside: Sequence[BlockInfo], var: sympy.Symbol, high: str) -> str:
    """Where a loop ends that would run to ``high``. Raises EmitError where a block inside is not ended by data."""
    integer = values.program.integer
    for info in inside:
        found = data_end(info.block)
        place = info.axes[found[0]] if found is not None else sympy.S.Zero
        step = sympy.expand(place).coeff(var)
        if found is None or not step.is_Integer or step <= 0:
            raise EmitError(f"block {info.block.name} stands in a loop that data end, and no data end it")
        summed = info.reduced_serial | info.reduced_tile
        outside = tuple(b for b in info.bounds if not summed & (b[0].free_symbols | b[1].free_symbols))
        values.enter(replace(info, bounds=outside), ended=True)
        end = values.value(found[1])
        text = end.typed
        mask = values.all_of(values.bounds(end.dims))
        if mask is not None:
            text = f"tl.where({mask.text}, {text}, 0)"
        if end.dims:
            text = f"tl.max({text})"
        if step != 1:
            text = f"tl.cdiv({text}, {int(step)})"
        high = out.assign("high", f"tl.minimum(tl.cast({text}, {integer}), {high})")
    return high
