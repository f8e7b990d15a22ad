"""compute_at and reverse_compute_at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from ...ir.expr import is_value, symbol
from ...ir.index import simplify
from ...ir.loops import AxisKind, Block, Bound, Loop, LoopNest, Node
from ...ir.symbols import interval
from ..error import ScheduleError
from .tree import blocks_under, find_block, find_loop, fresh, in_loops, loops_under, replace_node


@dataclass(frozen=True, slots=True)
class Span:
    """What one iteration of a loop touches of one dimension: ``start`` in outer loop variables, and how many
    elements."""

    start: sympy.Expr
    extent: sympy.Expr


def compute_at(nest: LoopNest, block: str, loop: str) -> LoopNest:
    """Compute a producer inside a loop of its readers, only as much of it as one iteration needs.

    Rewrites::

        for i in range(n):                    for i in range(n):
            for k in range(m):                    for k in range(m):
                B[i] += A[i, k]         ->            B[i] += A[i, k]
        for i in range(n):                        C[i] = B[i]
            C[i] = B[i]

    Requires: every reader of the block is inside the loop; what the block reads is made before the loop, or in it
    before its first reader; it writes each buffer at plain axes, and no output. Elements that iterations share are
    computed again.
    Raises: ScheduleError.    Source: TVM ``Schedule.compute_at``, Halide ``Func.compute_at``.
    """
    asked = f"compute_at({block}, {loop})"
    node, _ = find_block(nest, block, asked)
    target, outer = find_loop(nest, loop, asked)
    buffers = {w.buffer for w in node.writes}
    if buffers & set(nest.outputs):
        raise ScheduleError(asked, "it writes an output", nest, block)
    inside = blocks_under(target)
    if any(b is node for b in inside):
        raise ScheduleError(asked, "it is inside that loop already", nest, block)
    readers = [b for n in nest.body for b in blocks_under(n) if any(ld.buffer in buffers for ld in b.reads)]
    if not readers:
        raise ScheduleError(asked, "nothing reads it", nest, block)
    if any(all(r is not b for b in inside) for r in readers):
        raise ScheduleError(asked, "a reader of it is outside that loop", nest, block)
    _check_producers(nest, node, target, inside, readers, asked)
    inner = {lp.var: lp.extent for lp in loops_under(target)}
    spans: dict[sympy.Symbol, Span] = {}
    for access in node.writes:
        wanted = [in_loops(ld.indices, r) for r in readers for ld in r.reads if ld.buffer == access.buffer]
        shape = nest.buffer(access.buffer).shape
        for k, index in enumerate(access.indices):
            if is_value(index) or not index.is_Symbol:
                raise ScheduleError(asked, f"it does not write {access.buffer} at plain axes", nest, block)
            span = _union([_span(w[k], inner, shape[k], nest) for w in wanted], shape[k])
            known = spans.get(index)
            spans[index] = span if known is None or known == span else Span(sympy.S.Zero, shape[k])
    scope = {lp.var: lp.extent for lp in (*outer, target)}
    moved = _placed(nest, node, spans, scope)
    body = replace_node(nest.body, node, lambda _: ())
    first = next(k for k, n in enumerate(target.body) if any(b in readers for b in blocks_under(n)))
    new = replace(target, body=(*target.body[:first], moved, *target.body[first:]))
    return replace(nest, body=replace_node(body, target, lambda _: (new,)))


def reverse_compute_at(nest: LoopNest, block: str, loop: str) -> LoopNest:
    """Compute a reader inside a loop of its producer, on what one iteration has made.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        B[i] = A[i] + 1
        for j in range(n):                C[j := i] = B[i] * 2
            C[j] = B[j] * 2

    Requires: the block reads at plain axes what blocks in the loop write, and no iteration's part of it is the work of
    several iterations (no reduction over the loop); nothing in the loop reads what the block writes.
    Raises: ScheduleError.    Source: TVM ``Schedule.reverse_compute_at``, Halide ``Func.compute_with``.
    """
    asked = f"reverse_compute_at({block}, {loop})"
    node, _ = find_block(nest, block, asked)
    target, outer = find_loop(nest, loop, asked)
    inside = blocks_under(target)
    if any(b is node for b in inside):
        raise ScheduleError(asked, "it is inside that loop already", nest, block)
    made = {w.buffer: (b, w) for b in inside for w in b.writes}
    inputs = {ld.buffer for ld in node.reads}
    if not inputs & made.keys():
        raise ScheduleError(asked, "it reads nothing that is made in that loop", nest, block)
    order = [b for n in nest.body for b in blocks_under(n)]
    last = max(k for k, b in enumerate(order) if any(b is i for i in inside))
    mine = next(k for k, b in enumerate(order) if b is node)
    outputs = {w.buffer for w in node.writes}
    for b in order[min(last, mine) + 1 : mine]:
        if any(w.buffer in inputs for w in b.writes):
            raise ScheduleError(asked, f"{b.name}, which it reads from, comes after the loop", nest, b.name)
    if mine < last or any(ld.buffer in outputs for b in inside for ld in b.reads):
        raise ScheduleError(asked, "it comes before the loop", nest, block)
    inner = {lp.var: lp.extent for lp in loops_under(target)}
    through = {lp.var for lp in (*outer, target)}
    spans: dict[sympy.Symbol, Span] = {}
    for ld in node.reads:
        if ld.buffer not in made:
            continue
        writer, access = made[ld.buffer]
        carried = {
            s for a, e in zip(writer.axes, writer.bindings, strict=True) if a.kind is not AxisKind.SPATIAL
            for s in e.free_symbols
        }  # fmt: skip
        if carried & through:
            raise ScheduleError(asked, f"{writer.name} reduces over that loop", nest, writer.name)
        shape = nest.buffer(ld.buffer).shape
        for k, (index, at) in enumerate(zip(ld.indices, in_loops(access.indices, writer), strict=True)):
            if not is_value(index) and index.is_Integer and shape[k] == 1:
                continue
            if is_value(index) or not index.is_Symbol:
                raise ScheduleError(asked, f"it does not read {ld.buffer} at plain axes", nest, block)
            span = _span(at, inner, shape[k], nest)
            known = spans.get(index)
            if known is not None and known != span:
                raise ScheduleError(asked, f"it reads {ld.buffer} at several places of one axis", nest, block)
            spans[index] = span
    fixed = [a.var for a in node.axes if a.var in spans]
    needed = {v for s in spans.values() for v in s.start.free_symbols} & through
    if any(lp.extent != 1 and lp.var not in needed for lp in (*outer, target)) or not fixed:
        raise ScheduleError(
            asked, "it would be computed again in iterations that do not tell its elements apart", nest, block
        )
    scope = {lp.var: lp.extent for lp in (*outer, target)}
    moved = _placed(nest, node, spans, scope)
    body = replace_node(nest.body, node, lambda _: ())
    new = replace(target, body=(*target.body, moved))
    return replace(nest, body=replace_node(body, target, lambda _: (new,)))


def _check_producers(
    nest: LoopNest, node: Block, target: Loop, inside: list[Block], readers: list[Block], asked: str
) -> None:
    order = [b for n in nest.body for b in blocks_under(n)]
    place = {id(b): k for k, b in enumerate(order)}
    first_reader = min(place[id(r)] for r in readers)
    for b in order:
        if b is node or not any(w.buffer in {ld.buffer for ld in node.reads} for w in b.writes):
            continue
        if place[id(b)] > first_reader or (any(b is i for i in inside) and not any(b is c for c in target.body)):
            if not any(b is i for n in target.body for i in blocks_under(n) if place[id(i)] < first_reader):
                raise ScheduleError(asked, f"{b.name}, which it reads from, is made later", nest, b.name)


def _span(index: sympy.Expr | None, inner: dict[sympy.Symbol, sympy.Expr], size: sympy.Expr, nest: LoopNest) -> Span:
    """The part of a dimension that an index walks while the inner loops run."""
    whole = Span(sympy.S.Zero, size)
    if index is None:
        return whole
    start = index.xreplace(dict.fromkeys(inner, sympy.S.Zero))
    reach: sympy.Expr = sympy.S.One
    for term in sympy.Add.make_args(sympy.expand(index)):
        moving = [v for v in term.free_symbols if v in inner]
        if not moving:
            continue
        if len(moving) != 1 or not term.is_polynomial(moving[0]) or sympy.degree(term, moving[0]) != 1:
            return whole
        coefficient = sympy.expand(term / moving[0])
        if interval(coefficient, nest.symbols.intervals())[0] < 0:
            return whole
        reach = reach + coefficient * (inner[moving[0]] - 1)
    return Span(start, sympy.expand(reach))


def _union(spans: Sequence[Span], size: sympy.Expr) -> Span:
    first = spans[0]
    return first if all(s == first for s in spans) else Span(sympy.S.Zero, size)


def _placed(
    nest: LoopNest, node: Block, spans: dict[sympy.Symbol, Span], scope: dict[sympy.Symbol, sympy.Expr]
) -> Node:
    """The block under loops of its own for what the spans leave open, its axes bound from there."""
    loops: list[tuple[sympy.Symbol, sympy.Expr]] = []
    bindings: list[sympy.Expr] = []
    predicate: list[Bound] = []
    scope = dict(scope)
    taken = nest
    for axis in node.axes:
        span = spans.get(axis.var, Span(sympy.S.Zero, axis.extent))
        if span.extent == 1:
            binding = span.start
        else:
            name = fresh(taken, f"{node.name}_{axis.var.name}")
            var = symbol(name)
            loops.append((var, span.extent))
            scope[var] = span.extent
            binding = simplify(sympy.expand(span.start + var), scope, nest.symbols)
        bindings.append(binding)
        if span.start != 0 and not _fits(nest, span, axis.extent, scope):
            predicate.append(Bound(binding, axis.extent))
    body: Node = replace(node, bindings=tuple(bindings), predicate=tuple(predicate))
    for var, extent in reversed(loops):
        body = Loop(var, extent, (body,))
    return body


def _fits(nest: LoopNest, span: Span, extent: sympy.Expr, scope: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether the span is proved to end within the axis."""
    if span.start.is_Symbol and span.extent == 1 and scope.get(span.start) == extent:
        return True
    top = span.start.xreplace({v: e - 1 for v, e in scope.items()}) + span.extent
    slack = sympy.expand(extent - top)
    return bool(slack.is_Integer and slack >= 0)
