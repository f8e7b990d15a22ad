"""cache_read."""

from __future__ import annotations

from dataclasses import replace

from ....ir.nest.loops import LoopNest
from ...error import ScheduleError
from ..analysis.dependence import accesses
from ..analysis.tree import blocks_under, find_block, with_node
from .copies import cache_buffer, cache_scope, copy_block, redirected, top_of


def cache_read(nest: LoopNest, block: str, buffer: str, scope: str = "local") -> tuple[LoopNest, list[str]]:
    """Let a block read a buffer from a copy of it in a scope nearer by ("local", "shared"); returns the name of the
    block that copies.

    Rewrites::

        for i in range(n):                         for i in range(n):
            for j in range(m):                         A_local[i] = A[i]
                C[i, j] = A[i] * B[j]     ->       for i in range(n):
                                                       for j in range(m):
                                                           C[i, j] = A_local[i] * B[j]

    The copy, of all elements, stands before the outermost loop of the block, and its own loops are serial;
    ``compute_at`` then moves it where only the tile that is needed is copied.

    Requires: the block reads the buffer and does not write it; nothing in its outermost loop does.
    Raises: ScheduleError.    Source: TVM ``Schedule.cache_read``, Halide ``Func.in``.
    """
    asked = f"cache_read({block}, {buffer}, {scope!r})"
    node, outer = find_block(nest, block, asked)
    where = cache_scope(scope, asked, nest)
    known = nest.buffers
    if buffer not in accesses(node).read | {w.buffer for w in node.writes}:
        names = ", ".join(sorted(accesses(node).read)) or "nothing"
        raise ScheduleError(asked, f"it does not read {buffer}", nest, block, f"it reads {names}")
    at = top_of(nest, node)
    for other in blocks_under(nest.body[at]):
        if buffer in accesses(other).written:
            says = "it writes" if other is node else f"{other.name}, in the same loop {outer[0].var}, writes"
            raise ScheduleError(asked, f"{says} {buffer}", nest, other.name, "cache_read before the loops are merged")
    cache = cache_buffer(nest, known[buffer], where)
    body = tuple(redirected(s, {buffer: cache.name}, {}) for s in node.body)
    changed = with_node(nest, node, replace(node, body=body))
    copy = copy_block(nest, cache.name, known[buffer], cache)
    result = (*changed.body[:at], copy, *changed.body[at:])
    return replace(changed, body=result, locals=(*nest.locals, cache)), [cache.name]
