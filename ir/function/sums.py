"""What a sum of a tensor function may be: one of products of operands, over taps of windows, along windows."""

from __future__ import annotations

from collections.abc import Collection

from ..expr.monoid import MAX, SUM
from ..expr.product import operands
from ..expr.value import Load, loads
from ..expr.windows import windows_along_sum, windows_of
from .function import Stage, TensorFunction


def is_product(function: TensorFunction, stage: Stage) -> bool:
    """Whether a stage sums products of operands that it reads along what it sums."""
    over = {d.var for d in function.over_of(stage)}
    return stage.monoid is SUM and len(operands(stage.values[0], over)) > 1


def has_windows(function: TensorFunction, stage: Stage) -> bool:
    """Whether a stage adds, or takes the greatest of, a fixed number of taps of windows that slide along its
    results."""
    taps = {d.var: d.extent for d in function.over_of(stage)}
    if stage.monoid not in (SUM, MAX) or not taps or not all(e.is_Integer for e in taps.values()):
        return False
    along = {d.var: d.extent for d in function.axes_of(stage)}
    return any(windows_of(ld, along, taps) for ld in _inputs(function, stage))


def has_taps(function: TensorFunction, stage: Stage) -> bool:
    """Whether a stage adds up what windows slide along, for each of a fixed number of taps."""
    over = {d.var: d.extent for d in function.over_of(stage)}
    taps = {d.var: d.extent for d in function.axes_of(stage) if d.extent.is_Integer and d.extent > 1}
    if stage.monoid is not SUM or not over:
        return False
    return any(windows_along_sum(ld, over, {t: e}) for ld in _inputs(function, stage) for t, e in taps.items())


def _inputs(function: TensorFunction, stage: Stage) -> Collection[Load]:
    made = function.made
    return [ld for v in stage.values for ld in loads(v) if ld.buffer not in made]
