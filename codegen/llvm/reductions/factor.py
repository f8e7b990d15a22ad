"""What all terms of a sum have in common, taken out of it: one product at the end instead of one a term."""

from __future__ import annotations

from ....ir.expr.monoid import SUM, Monoid
from ....ir.expr.product import factors, product_of
from ....ir.expr.value import Expr, free_symbols
from ....ir.nest.hints import FACTOR
from ....ir.nest.loops import AxisKind, Block, Loop


def factored(
    block: Block, monoid: Monoid, values: tuple[Expr, ...], loop: Loop, inside: tuple[Loop, ...]
) -> tuple[tuple[Expr, ...], Expr | None]:
    """What is summed in the loops ``inside`` (``loop`` and those in it), and the factor of the whole.

    Only where the loop is told so (``FACTOR``): sums are rounded differently then, and infinite factors meet
    zeros of the sum instead of its terms.
    """
    if not FACTOR.of(loop) or monoid is not SUM or not values[0].dtype.is_float:
        return values, None
    running = {lp.var for lp in inside}
    moving = {
        axis.var
        for axis, binding in zip(block.axes, block.bindings, strict=True)
        if axis.kind is AxisKind.REDUCTION and binding.free_symbols & running
    }
    (value,) = values
    terms: list[Expr] = []
    common: list[Expr] = []
    for f in factors(value):
        (terms if free_symbols(f) & moving else common).append(f)
    if not terms or not common:
        return values, None
    return (product_of(terms),), product_of(common)
