"""bind, parallel, vectorize, unroll: what a loop's iterations become on the machine."""

from __future__ import annotations

from dataclasses import replace

from ...ir.loops import BLOCK_KINDS, AxisKind, LoopKind, LoopNest
from ..error import ScheduleError
from .tree import blocks_under, find_loop, loops_under, with_node

MAX_UNROLL = 64
MAX_LANES = 256
_BINDINGS = {k.value: k for k in (*BLOCK_KINDS, LoopKind.THREAD_X)}


def bind(nest: LoopNest, loop: str, thread: str) -> LoopNest:
    """Bind a loop to a program id of the grid ("blockIdx.x", ".y", ".z") or to an axis of the program's tile
    ("threadIdx.x").

    Rewrites::

        for i in range(n):     ->     for i in blockIdx.x(n):

    Requires: a grid axis is bound at most once around any block, and carries no reduction; a tile axis has a
    constant extent.
    Raises: ScheduleError.    Source: TVM ``Schedule.bind``. Tiles are laid over threads by Triton.
    """
    asked = f"bind({loop}, {thread!r})"
    kind = _BINDINGS.get(thread)
    if kind is None:
        raise ScheduleError(asked, f"there is no {thread!r}; there are {', '.join(_BINDINGS)}")
    node, outer = find_loop(nest, loop, asked)
    if kind in BLOCK_KINDS:
        if any(lp.kind is kind for lp in (*outer, *loops_under(node))):
            raise ScheduleError(asked, f"another loop around the same blocks is bound to {thread}", nest, loop)
        _refuse_reduction(nest, loop, asked)
    elif not node.extent.is_Integer:
        raise ScheduleError(asked, f"extent {node.extent} is not constant", nest, loop, "split the loop first")
    return with_node(nest, node, replace(node, kind=kind))


def parallel(nest: LoopNest, loop: str) -> LoopNest:
    """Give the iterations of a loop to the threads of a team.

    Rewrites::

        for i in range(n):     ->     for i in parallel(n):

    Requires: the loop is outermost, and carries no reduction.
    Raises: ScheduleError.    Source: Halide ``Func.parallel``.
    """
    asked = f"parallel({loop})"
    node, outer = find_loop(nest, loop, asked)
    if outer:
        raise ScheduleError(asked, f"it stands inside {outer[-1].var}; a team runs outermost loops", nest, loop)
    _refuse_reduction(nest, loop, asked)
    return with_node(nest, node, replace(node, kind=LoopKind.PARALLEL))


def vectorize(nest: LoopNest, loop: str) -> LoopNest:
    """Run the iterations of a loop in the lanes of vectors. Over a reduction the lanes keep a partial result each.

    Rewrites::

        for i in range(8):     ->     for i in vectorized(8):

    Requires: a constant extent, and no loop inside.
    Raises: ScheduleError.    Source: Halide ``Func.vectorize``.
    """
    asked = f"vectorize({loop})"
    node, _ = find_loop(nest, loop, asked)
    _refuse_long(nest, loop, asked, MAX_LANES)
    if loops_under(node):
        raise ScheduleError(asked, "there are loops inside", nest, loop, "reorder it innermost")
    return with_node(nest, node, replace(node, kind=LoopKind.VECTORIZED))


def unroll(nest: LoopNest, loop: str) -> LoopNest:
    """Write out the iterations of a loop. Over a reduction each copy keeps a partial result.

    Rewrites::

        for i in range(4):     ->     for i in unrolled(4):

    Requires: a constant extent.
    Raises: ScheduleError.    Source: Halide ``Func.unroll``.
    """
    asked = f"unroll({loop})"
    node, _ = find_loop(nest, loop, asked)
    _refuse_long(nest, loop, asked, MAX_UNROLL)
    return with_node(nest, node, replace(node, kind=LoopKind.UNROLLED))


def _refuse_long(nest: LoopNest, loop: str, asked: str, limit: int) -> None:
    node, _ = find_loop(nest, loop, asked)
    if not node.extent.is_Integer:
        raise ScheduleError(asked, f"extent {node.extent} is not constant", nest, loop, "split the loop first")
    if int(node.extent) > limit:
        raise ScheduleError(
            asked, f"{node.extent} iterations are more than {limit}", nest, loop, "split the loop first"
        )


def _refuse_reduction(nest: LoopNest, loop: str, asked: str) -> None:
    node, _ = find_loop(nest, loop, asked)
    for b in blocks_under(node):
        for axis, binding in zip(b.axes, b.bindings, strict=True):
            if axis.kind is not AxisKind.SPATIAL and node.var in binding.free_symbols:
                raise ScheduleError(
                    asked,
                    f"{b.name} reduces over it",
                    nest,
                    loop,
                    "use rfactor, then bind the loop over partial results",
                )
