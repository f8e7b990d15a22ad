"""cache_write."""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.value import is_value
from ....ir.nest.loops import Block, LoopNest, Node, map_nodes, walk_nodes
from ...error import ScheduleError
from ..analysis.dependence import accesses, refuse_scatter
from ..analysis.tree import blocks_under, find_block
from .copies import cache_buffer, cache_scope, copy_block, redirected, top_of


def cache_write(nest: LoopNest, block: str, buffer: str, scope: str = "local") -> tuple[LoopNest, list[str]]:
    """Let a block write a buffer of a scope nearer by ("local", "shared"), from which another block writes out;
    returns the name of that block.

    Rewrites::

        for i in range(n):                         for i in range(n):
            for k in range(m):                         for k in range(m):
                C[i] += A[i, k]           ->               C_local[i] += A[i, k]
                                                   for i in range(n):
                                                       C[i] = C_local[i]

    The copy, of all elements, stands behind the outermost loop of the block, and its own loops are serial;
    ``reverse_compute_at`` then moves it where it writes what has just been made. Where the buffer is an output, blocks
    that read it read the cache.

    Requires: the block, and nobody else, writes the buffer, at all of its places. If the buffer is the nest's own,
    nothing in the block's outermost loop reads it.
    Raises: ScheduleError.    Source: TVM ``Schedule.cache_write``.
    """
    asked = f"cache_write({block}, {buffer}, {scope!r})"
    node, outer = find_block(nest, block, asked)
    refuse_scatter(nest, node, asked)
    where = cache_scope(scope, asked, nest)
    known = nest.buffers
    every = [n for n, _ in walk_nodes(nest.body) if isinstance(n, Block)]
    if buffer not in accesses(node).written:
        names = ", ".join(sorted(accesses(node).written))
        raise ScheduleError(asked, f"it does not write {buffer}", nest, block, f"it writes {names}")
    for other in every:
        if other is not node and buffer in accesses(other).written:
            raise ScheduleError(asked, f"{other.name} writes {buffer} too", nest, other.name)
    _refuse_part(nest, node, buffer, asked)
    at = top_of(nest, node)
    is_output = buffer in nest.outputs
    for other in blocks_under(nest.body[at]):
        if not is_output and other is not node and buffer in accesses(other).read:
            raise ScheduleError(
                asked, f"{other.name}, in the same loop {outer[0].var}, reads {buffer}", nest, other.name,
                "cache_write before the loops are merged",
            )  # fmt: skip
    cache = cache_buffer(nest, known[buffer], where)
    to = {buffer: cache.name}

    def visit(n: Node) -> Node | None:
        if not isinstance(n, Block):
            return None
        if n is node:
            return replace(n, body=tuple(redirected(s, to, to) for s in n.body))
        if is_output and buffer in accesses(n).read:
            return replace(n, body=tuple(redirected(s, to, {}) for s in n.body))
        return None

    body = map_nodes(nest.body, visit)
    copy = copy_block(nest, cache.name, cache, known[buffer])
    return replace(nest, body=(*body[: at + 1], copy, *body[at + 1 :]), locals=(*nest.locals, cache)), [cache.name]


def _refuse_part(nest: LoopNest, node: Block, buffer: str, asked: str) -> None:
    """The copy reads every element, so every element must be written: at axes of their own that run over all."""
    extents = {a.var: a.extent for a in node.axes}
    for write in (w for w in node.writes if w.buffer == buffer):
        plain = [i for i in write.indices if not is_value(i) and i in extents]
        for i, size in zip(write.indices, nest.buffer(buffer).shape, strict=True):
            if size == 1 and i == 0:
                continue
            if is_value(i) or i not in plain or plain.count(i) > 1 or extents[i] != size:  # type: ignore[index]
                raise ScheduleError(asked, f"it does not write all of {buffer} at its own axes", nest, node.name)
