"""pipeline."""

from __future__ import annotations

from ....ir.expr.value import is_value
from ....ir.nest.hints import NUM_STAGES
from ....ir.nest.loops import Block, Loop, LoopKind, LoopNest, Scope
from ...error import ScheduleError
from ..analysis.dependence import accesses
from ..analysis.tree import blocks_under, find_loop
from .annotate import annotate


def pipeline(nest: LoopNest, loop: str, stages: int) -> LoopNest:
    """Load what later iterations of a loop need while an earlier one computes.

    Rewrites::

        for k in range(n):              ->     for k in range(n):  # num_stages=3
            C[m, n] += A[m, k] * B[k, n]           C[m, n] += A[m, k] * B[k, n]

    ``stages`` iterations are in flight at once, each with a place of its own for what it has loaded.

    Requires: a serial loop of more than one iteration; it loads from memory at places that move with it, from buffers
    that nothing inside writes.
    Raises: ScheduleError.    Source: software pipelining (Lam 1988); TVM ``software_pipeline_stage``, Triton
    ``tl.range(num_stages=)``.
    """
    asked = f"pipeline({loop}, {stages})"
    node, _ = find_loop(nest, loop, asked)
    if stages < 2 or not NUM_STAGES.takes(stages):
        raise ScheduleError(asked, f"{stages} stages are not 2 to {NUM_STAGES.high}", nest, loop)
    if node.kind is not LoopKind.SERIAL:
        raise ScheduleError(
            asked, f"the loop is {node.kind.value}, and iterations in flight are serial ones", nest, loop
        )
    if node.extent == 1:
        raise ScheduleError(asked, "the loop has one iteration", nest, loop)
    inside = blocks_under(node)
    written = {w: b.name for b in inside for w in accesses(b).written}
    moving = {name: b.name for b in inside for name in _moving(nest, b, node)}
    if not moving:
        raise ScheduleError(asked, "nothing inside loads from memory at places that move with it", nest, loop)
    both = sorted(moving.keys() & written.keys())
    if both:
        raise ScheduleError(
            asked, f"{moving[both[0]]} loads {both[0]}, which {written[both[0]]} writes in the loop", nest,
            written[both[0]],
        )  # fmt: skip
    return annotate(nest, loop, NUM_STAGES.name, stages)


def _moving(nest: LoopNest, block: Block, loop: Loop) -> set[str]:
    """The buffers in memory that a block loads from at other places in other iterations of a loop."""
    axes = {a.var for a, b in zip(block.axes, block.bindings, strict=True) if loop.var in b.free_symbols}
    buffers = nest.buffers
    return {
        ld.buffer
        for ld in accesses(block).reads
        if buffers[ld.buffer].scope is Scope.GLOBAL and any(is_value(i) or i.free_symbols & axes for i in ld.indices)  # type: ignore[union-attr]
    }
