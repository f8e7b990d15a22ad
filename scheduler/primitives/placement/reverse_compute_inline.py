"""reverse_compute_inline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from ....ir.expr.value import Expr, Index, Load, cast, is_value, loads, rewrite
from ....ir.nest.loops import Block, LoopNest, Node, Statement, Store, map_nodes
from ...error import ScheduleError
from ...facts.views import map_value
from ..analysis.dependence import accesses, conflict, places, refuse_scatter
from ..analysis.tree import find_block


def reverse_compute_inline(nest: LoopNest, block: str) -> LoopNest:
    """Let the producer of what a point-wise block reads compute the block's values too, and drop the buffer between.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        C[i] = (A[i] + 1) * 2
        for j in range(n):
            C[j] = B[j] * 2

    The block goes, and with it its loops; the producer keeps those that it has. A buffer that leaves the nest, or that
    others read, remains.

    Requires: a point-wise block that reads, each at all of its axes, what one other point-wise block writes at all of
    its own; whatever else it reads is made where the producer stands, and what it writes nobody needs before that.
    Raises: ScheduleError.    Source: TVM ``Schedule.reverse_compute_inline``.
    """
    asked = f"reverse_compute_inline({block})"
    node, _ = find_block(nest, block, asked)
    refuse_scatter(nest, node, asked)
    if node.is_reduction:
        raise ScheduleError(asked, "it is a reduction", nest, block, "compute_inline takes its producers into it")
    producer = _producer(nest, node, asked)
    made: dict[str, Store] = {}
    for s in producer.body:
        assert isinstance(s, Store)
        made[s.buffer] = replace(s, value=_read_through(s.value, made))
    env = _axes(nest, node, producer, made, asked)
    added: list[Statement] = []
    for s in node.body:
        assert isinstance(s, Store)
        value = _inlined(map_value(s.value, env), made)
        indices = tuple(i if is_value(i) else i.xreplace(env) for i in s.indices)  # type: ignore[union-attr]
        added.append(Store(s.buffer, indices, value))
    read = {ld.buffer for n in places(nest).values() if n.block is not node and n.block is not producer
            for ld in accesses(n.block).reads}  # fmt: skip
    gone = {b for b in made if b in accesses(node).read and b not in nest.outputs and b not in read}
    # Statements of the producer see what the ones before them stored; those of a buffer that goes read its value.
    kept = tuple(replace(s, value=made[s.buffer].value) for s in made.values() if s.buffer not in gone)
    new = replace(producer, body=(*kept, *added))

    def visit(n: Node) -> Node | tuple[Node, ...] | None:
        return () if n is node else new if n is producer else None

    own = tuple(b for b in nest.locals if b.name not in gone)
    result = replace(nest, body=map_nodes(nest.body, visit), locals=own)
    _check(nest, result, node, producer, asked)
    return result


def _producer(nest: LoopNest, node: Block, asked: str) -> Block:
    """The one block that writes what the block reads and the nest makes, or of several the last."""
    mine = accesses(node)
    makers = [p.block for p in places(nest).values() if p.block is not node and accesses(p.block).written & mine.read]
    if not makers:
        raise ScheduleError(asked, "it reads nothing that the nest makes", nest, node.name)
    found = makers[-1]
    if found.is_reduction:
        raise ScheduleError(
            asked, f"{found.name} is a reduction, whose value is not finished where it is computed", nest, found.name,
            "reverse_compute_at puts a reader behind the loops of the reduction",
        )  # fmt: skip
    names = [s.buffer for s in found.body if isinstance(s, Store)]
    for other in places(nest).values():
        shared = accesses(other.block).written & accesses(found).written & mine.read
        if other.block is not found and shared:
            raise ScheduleError(asked, f"{other.block.name} writes {min(shared)} too", nest, other.block.name)
    theirs = accesses(found)
    both = mine.written & (theirs.read | theirs.written)
    if both:
        raise ScheduleError(asked, f"{found.name} uses {min(both)}, which it writes", nest, found.name)
    if len(set(names)) != len(names):
        raise ScheduleError(asked, f"{found.name} writes a buffer more than once", nest, found.name)
    return found


def _axes(
    nest: LoopNest, node: Block, producer: Block, made: Mapping[str, Store], asked: str
) -> dict[sympy.Symbol, Index]:
    """The producer's axis for each axis of the block."""
    extents = {a.var: a.extent for a in (*producer.axes,)}
    mine = {a.var: a.extent for a in node.axes}
    env: dict[sympy.Symbol, Index] = {}
    for ld in accesses(node).reads:
        if ld.buffer not in made:
            continue
        store = made[ld.buffer]
        for there, here, size in zip(store.indices, ld.indices, nest.buffer(ld.buffer).shape, strict=True):
            if size == 1 and there == 0 and here == 0:
                continue
            if is_value(there) or there not in extents or is_value(here) or here not in mine:
                raise ScheduleError(
                    asked, f"it reads {ld.buffer} at other places than {producer.name} writes", nest, node.name
                )
            if not extents[there] == mine[here] == size or env.get(here, there) != there:  # type: ignore[index]
                raise ScheduleError(
                    asked,
                    f"its axis {here} is not the one at which {producer.name} writes {ld.buffer}",
                    nest,
                    node.name,
                )
            env[here] = there  # type: ignore[index]
    for axis in node.axes:
        if axis.extent == 1 and axis.var not in env:
            env[axis.var] = sympy.S.Zero
    lost = [a.var for a in node.axes if a.var not in env]
    if lost:
        raise ScheduleError(asked, f"it reads nothing of {producer.name} at its axis {lost[0]}", nest, node.name)
    idle = [v for v, e in extents.items() if e != 1 and v not in env.values()]
    if idle or len(set(map(str, env.values()))) < sum(mine[v] != 1 for v in env):
        name = idle[0] if idle else "an axis"
        raise ScheduleError(asked, f"{producer.name} would compute it again for each {name}", nest, producer.name)
    return env


def _read_through(value: Expr, made: Mapping[str, Store]) -> Expr:
    """A value in terms of what its block has not stored just before."""
    return _inlined(value, made) if any(ld.buffer in made for ld in loads(value)) else value


def _inlined(value: Expr, made: Mapping[str, Store]) -> Expr:
    """The stored values in place of the loads of them; a buffer holds its own type, whatever it was computed in."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in made and e.indices == made[e.buffer].indices:
            return cast(made[e.buffer].value, e.dtype)
        return None

    return rewrite(value, leaf)


def _check(before: LoopNest, after: LoopNest, node: Block, producer: Block, asked: str) -> None:
    """What the block had to come after comes before the producer, and all that it now shares loops with agrees."""
    old, new = places(before), places(after)
    mine, here = accesses(node), new[producer.name]
    passed = old[node.name].order
    for other in new.values():
        if other.block.name == producer.name:
            continue
        theirs = accesses(other.block)
        if not (mine.written & (theirs.read | theirs.written) or mine.read & theirs.written):
            continue
        earlier = old[other.block.name].order < passed
        if earlier != (other.order < here.order):
            raise ScheduleError(
                asked, f"it would come before {other.block.name} and has to stay after it", before, other.block.name
            )
        first, second = (other, here) if earlier else (here, other)
        reason = conflict(after, first, second)
        if reason:
            raise ScheduleError(asked, reason, before, other.block.name)
