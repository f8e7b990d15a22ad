"""Windows laid out as columns, and the sum of columns that overlap: gathers over the few windows of an element."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, call, const
from ..context import ImportContext, Tensor
from ..registry import converter
from ..terms import all_of, axes, index_value, select, within
from .pooling import finish, pair, window


def _positions(extent: sympy.Expr, kernel: int, spread: int, pad: int, step: int) -> sympy.Expr:
    """How many windows there are along a dim."""
    return FloorDiv(extent + 2 * pad - spread * (kernel - 1) - 1, step) + 1


@converter("aten.im2col.default")
def im2col(ctx: ImportContext, x: Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
    """``(N, C, H, W)`` to ``(N, C kh kw, windows)``."""
    kernel, spread, pads, steps = (pair(v, 2) for v in (kernel_size, dilation, padding, stride))
    out = ctx.type()
    at = axes(len(out.shape))
    row, column = at[-2:]
    extents = x.shape[-2:]
    across = _positions(extents[1], kernel[1], spread[1], pads[1], steps[1])
    windows = (FloorDiv(column, across), ModularIndexing(column, 1, across))
    offsets = (ModularIndexing(row, kernel[1], kernel[0]), ModularIndexing(row, 1, kernel[1]))
    places: list[sympy.Expr] = []
    conditions: list[Expr] = []
    for k in range(2):
        places.append(windows[k] * steps[k] + offsets[k] * spread[k] - pads[k])
        if pads[k]:
            conditions += within(places[k], 0, extents[k])
    value = ctx.at(x, [*at[:-2], FloorDiv(row, kernel[0] * kernel[1]), *places])
    return ctx.compute(select(all_of(conditions), value, const(0, value.dtype)))


def _window_at(place: sympy.Expr, count: sympy.Expr, step: int, below: int) -> tuple[sympy.Expr, list[Expr]]:
    """The window whose first element is at ``place >= -below``, and when there is one."""
    lifted = -(-below // step) * step
    number = FloorDiv(place + lifted, step) - lifted // step
    conditions = within(place, 0 if below else None, count * step)
    if step > 1:
        conditions.append(call("eq", index_value(ModularIndexing(place + lifted, 1, step)), index_value(0)))
    return number, conditions


@converter("aten.col2im.default")
def col2im(
    ctx: ImportContext, x: Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """``(N, C kh kw, windows)`` to ``(N, C, H, W)``: each element is the sum of the windows that it was in."""
    kernel, spread, pads, steps = (pair(v, 2) for v in (kernel_size, dilation, padding, stride))
    out = ctx.type()
    domain, kept, offsets = window(out.shape, kernel, 2)
    counts = [_positions(out.shape[k - 2], kernel[k], spread[k], pads[k], steps[k]) for k in range(2)]
    numbers: list[sympy.Expr] = []
    conditions: list[Expr] = []
    for k in range(2):
        first = kept[k - 2] + pads[k] - offsets[k] * spread[k]
        below = max((kernel[k] - 1) * spread[k] - pads[k], 0)
        number, inside = _window_at(first, counts[k], steps[k], below)
        numbers.append(number)
        conditions += inside
    row = (kept[-3] * kernel[0] + offsets[0]) * kernel[1] + offsets[1]
    value = ctx.at(x, [*kept[:-3], row, numbers[0] * counts[1] + numbers[1]])
    value = select(all_of(conditions), value, const(0, value.dtype))
    return finish(ctx, ctx.reduce(SUM, domain, (value,), x.device)[0], None)
