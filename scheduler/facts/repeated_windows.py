"""Which tensors a stencil of a CPU makes each element of once, in its scratch, for all windows that cover it."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.expr.monoid import MAX, SUM
from ...ir.expr.value import Expr, Load, is_value, loads
from ...ir.expr.windows import MOST_TAPS, Extents, windows_of
from ...ir.graph.graph import Compute, Reduction, Scan
from ...ir.target import fills_windows


def made_once(node: Compute | Reduction | Scan, values: Sequence[Expr], extents: Extents) -> frozenset[str]:
    """The tensors that a reduction reads through the windows of a stencil alone, all of whose taps slide.

    The rule for stencils on CPUs copies what windows read into a scratch, and computes there what is made of an
    element. Programs of a GPU load for each tap.
    """
    if not isinstance(node, Reduction) or node.monoid not in (SUM, MAX) or not fills_windows(node.types[0].device):
        return frozenset()
    taps = {a: extents[a] for a in node.reduce_axes}
    count = 1
    for extent in taps.values():
        if not extent.is_Integer:
            return frozenset()
        count *= int(extent)
    if count > MOST_TAPS or not values[0].dtype.is_float:
        return frozenset()
    along = {a: extents[a] for a in node.axes}
    found: dict[str, bool] = {}
    for v in values:
        for load in loads(v):
            found[load.buffer] = found.get(load.buffer, True) and _slides(load, along, taps)
    return frozenset(name for name, slides in found.items() if slides)


def _slides(load: Load, along: Extents, taps: Extents) -> bool:
    """Whether a load reads windows along whole axes, one for each tap."""
    if any(is_value(i) for i in load.indices):
        return False
    windows = windows_of(load, along, taps)
    return {w.tap for w in windows} == set(taps) and all(w.step.is_Integer for w in windows)
