"""Places of operands that data name: which rows a product multiplies is asked once, before the loop that sums them.

A tile of an operand whose addresses are known before the loop is copied ahead as any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy

from ....ir.expr.product import factors
from ....ir.expr.value import Expr, Load, Select, children, free_symbols, is_value, loads
from ....ir.nest.loops import Scope, Update
from ..program import BlockInfo
from ..values import Values


def load_places(values: Values, inside: Sequence[BlockInfo], within: set[sympy.Symbol]) -> None:
    """Write down the indices of operands of the blocks ``inside`` a loop that are values, where none of the variables
    ``within`` it moves them."""
    for info in inside:
        for update in info.block.body if info.operands else ():
            if isinstance(update, Update):
                for factor in (f for v in update.values for f in factors(v)):
                    _of_factor(values, info, factor, within)


def _of_factor(values: Values, info: BlockInfo, factor: Expr, within: set[sympy.Symbol]) -> None:
    for place in _places(factor):
        moving = {s for v in free_symbols(place) & info.axes.keys() for s in info.axes[v].free_symbols}
        known = all(_is_parameter(values, ld) for ld in loads(place))
        side = next((o for o in info.operands if moving & info.tile <= o.spatial), None)
        if known and side is not None and not moving & within:
            values.enter(_before(side, within))
            values.value(place)


def _before(info: BlockInfo, within: set[sympy.Symbol]) -> BlockInfo:
    """A block at the first place of the axes that a loop moves."""
    return replace(
        info,
        axes={v: sympy.S.Zero if e.free_symbols & within else e for v, e in info.axes.items()},
        bounds=tuple(b for b in info.bounds if not (b[0].free_symbols | b[1].free_symbols) & within),
        elements=tuple(b for b in info.elements if not (b[0].free_symbols | b[1].free_symbols) & within),
    )


def _places(value: Expr) -> Iterator[Expr]:
    """The indices of loads that are values; not of those that stand under a condition."""
    if isinstance(value, Load):
        yield from (i for i in value.indices if is_value(i))
    elif not isinstance(value, Select):
        for inner in children(value):
            yield from _places(inner)


def _is_parameter(values: Values, load: Load) -> bool:
    """Whether a load is of memory that the kernel does not write."""
    buffer = values.program.buffers[load.buffer]
    return buffer.scope is Scope.GLOBAL and buffer.name not in values.program.nest.outputs
