"""reorder_storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ....ir.expr.value import Expr, Load, is_value, rewrite
from ....ir.nest.loops import Access, LoopNest, Node, Statement, Store, contiguous_strides, map_nodes
from ....ir.nest.loops import Block as BlockNode
from ...error import ScheduleError

T = TypeVar("T")


def reorder_storage(nest: LoopNest, buffer: str, order: Sequence[int]) -> LoopNest:
    """Put the dimensions of a buffer of the nest's own into another order, outermost first.

    Rewrites::

        t0 = local(float32[n, m])             t0 = local(float32[m, n])
        for i in range(n):              ->    for i in range(n):
            for j in range(m):                    for j in range(m):
                t0[i, j] = A[i, j]                    t0[j, i] = A[i, j]

    Requires: the buffer is no parameter; ``order`` names each of its dimensions once.
    Raises: ScheduleError.    Source: Halide ``Func.reorder_storage``, TVM ``Schedule.transform_layout``.
    """
    asked = f"reorder_storage({buffer}, {list(order)})"
    mine = next((b for b in nest.locals if b.name == buffer), None)
    if mine is None:
        names = ", ".join(b.name for b in nest.locals) or "none"
        raise ScheduleError(asked, f"{buffer} is no buffer of the nest's own", nest, hint=f"its own are {names}")
    if sorted(order) != list(range(len(mine.shape))):
        raise ScheduleError(asked, f"{buffer} has {len(mine.shape)} dimensions; the order must name each once", nest)

    def permuted(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(items[k] for k in order)

    def leaf(e: Expr) -> Expr | None:
        return Load(buffer, permuted(e.indices), e.dtype) if isinstance(e, Load) and e.buffer == buffer else None

    def access(a: Access) -> Access:
        indices = tuple(rewrite(i, leaf) if is_value(i) else i for i in a.indices)
        return Access(a.buffer, permuted(indices) if a.buffer == buffer else indices)

    def statement(s: Statement) -> Statement:
        if isinstance(s, Store):
            place = access(Access(s.buffer, s.indices))
            return Store(place.buffer, place.indices, rewrite(s.value, leaf))
        return replace(s, targets=tuple(map(access, s.targets)), values=tuple(rewrite(v, leaf) for v in s.values))

    def visit(n: Node) -> Node | None:
        return replace(n, body=tuple(map(statement, n.body))) if isinstance(n, BlockNode) else None

    shape = permuted(mine.shape)
    changed = replace(mine, shape=shape, strides=contiguous_strides(shape))
    own = tuple(changed if b is mine else b for b in nest.locals)
    return replace(nest, body=map_nodes(nest.body, visit), locals=own)
