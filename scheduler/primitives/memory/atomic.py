"""atomic."""

from __future__ import annotations

from ....ir.nest.hints import ATOMIC
from ....ir.nest.loops import AxisKind, LoopNest, Update
from ...error import ScheduleError
from ..analysis.tree import find_block, with_annotation

# What a GPU combines in memory at once.
COMBINED = ("sum", "max", "min")


def atomic(nest: LoopNest, block: str) -> LoopNest:
    """Let a block scatter in any order and many places at once, by atomic operations, so that its loops can be bound.

    Rewrites::

        with block("b0"):                           with block("b0"):  # atomic
            x0 = scatter(n, i)             ->           x0 = scatter(n, i)
            C[A[x0]] = sum.update(B[x0])                C[A[x0]] = sum.update(B[x0])

    The order in which rounding sums are made is open then, and where several iterations store to one place without
    combining, which of them stays.

    Requires: the block has an axis along which it scatters; its updates are sums, maxima or minima.
    Raises: ScheduleError.    Source: Halide ``Stage.atomic``.
    """
    asked = f"atomic({block})"
    node, _ = find_block(nest, block, asked)
    if not node.axes_of(AxisKind.SCATTER):
        raise ScheduleError(asked, "it has no axis along which it scatters", nest, block)
    for s in node.body:
        if isinstance(s, Update) and s.monoid.name not in COMBINED:
            raise ScheduleError(
                asked, f"there is no atomic {s.monoid.name}", nest, block, f"there are {', '.join(COMBINED)}"
            )
    return with_annotation(nest, node, ATOMIC.name, True)
