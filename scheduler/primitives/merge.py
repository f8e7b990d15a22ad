"""merge (loop fusion of siblings)."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.loops import Access, AxisKind, Block, Loop, LoopNest, Node, walk_nodes
from ...ir.symbols import interval
from ..error import ScheduleError
from .tree import find_loop, in_loops, linear_part, reads_of, replace_node, substitute, writes_of


def merge(nest: LoopNest, first: str, second: str) -> LoopNest:
    """Run two neighbouring loops of equal extent as one; the variable of the first remains.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        B[i] = A[i] + 1
        for j in range(n):                C[i] = B[i] * 2
            C[j] = B[j] * 2

    Requires: the loops are neighbours in one body and alike in extent and kind; whatever the second reads of what
    the first writes is written in the same iteration, and is no reduction over this loop.
    Raises: ScheduleError.    Source: loop fusion; Exo ``fuse``.
    """
    asked = f"merge({first}, {second})"
    a, outer = find_loop(nest, first, asked)
    b, _ = find_loop(nest, second, asked)
    siblings = outer[-1].body if outer else nest.body
    at = next(k for k, n in enumerate(siblings) if n is a)
    if at + 1 >= len(siblings) or siblings[at + 1] is not b:
        raise ScheduleError(asked, f"{second} does not stand right behind {first}", nest, second)
    if sympy.expand(a.extent - b.extent) != 0:
        raise ScheduleError(asked, f"the extents {a.extent} and {b.extent} differ", nest, second)
    if a.kind is not b.kind:
        raise ScheduleError(asked, f"{first} is {a.kind.value}, {second} is {b.kind.value}", nest, second)
    _check(nest, a, b, asked)
    scope = {lp.var: lp.extent for lp in outer} | {a.var: a.extent}
    merged = replace(a, body=(*a.body, *substitute(b.body, {b.var: a.var}, scope, nest)))

    def without(body: tuple[Node, ...]) -> tuple[Node, ...]:
        return replace_node(replace_node(body, b, lambda _: ()), a, lambda _: (merged,))

    return replace(nest, body=without(nest.body))


def _check(nest: LoopNest, a: Loop, b: Loop, asked: str) -> None:
    written: dict[str, list[tuple[Block, Access]]] = {}
    for block, access in writes_of(a):
        written.setdefault(access.buffer, []).append((block, access))
    for block, access in writes_of(b):
        if access.buffer in written:
            raise ScheduleError(asked, f"both write {access.buffer}", nest, block.name)
    read_before = {ld.buffer for _, ld in reads_of(a)}
    for block, access in writes_of(b):
        if access.buffer in read_before:
            raise ScheduleError(
                asked, f"{block.name} overwrites {access.buffer}, which the first loop reads", nest, block.name
            )
    bounds = {n.var: n.extent for n, _ in walk_nodes(nest.body) if isinstance(n, Loop)}
    numeric = nest.symbols.intervals()
    for var, extent in bounds.items():
        high = interval(extent, nest.symbols.intervals())[1]
        numeric[var] = (0, None if high is None else max(high - 1, 0))
    for reader, load in reads_of(b):
        for writer, access in written.get(load.buffer, ()):
            carried = {
                s
                for axis, e in zip(writer.axes, writer.bindings, strict=True)
                if axis.kind is AxisKind.REDUCTION
                for s in e.free_symbols
            }
            if a.var in carried:
                raise ScheduleError(
                    asked,
                    f"{reader.name} reads {load.buffer}, which {writer.name} reduces over {a.var}",
                    nest,
                    reader.name,
                )
            at = in_loops(access.indices, writer)
            wanted = in_loops(load.indices, reader)
            if not any(
                w is not None and r is not None and _same_iteration(w, r.xreplace({b.var: a.var}), a.var, numeric)
                for w, r in zip(at, wanted, strict=True)
            ):
                raise ScheduleError(
                    asked, f"{reader.name} reads {load.buffer} from other iterations than those that write it",
                    nest, reader.name,
                )  # fmt: skip


def _same_iteration(
    write: sympy.Expr, read: sympy.Expr, var: sympy.Symbol, numeric: dict[sympy.Symbol, tuple[int, int | None]]
) -> bool:
    """Whether equal indices imply equal values of the loop variable: both are ``c*var + something in [0, c)``."""
    w, r = linear_part(write, var), linear_part(read, var)
    if w is None or r is None or w[0] == 0 or w[0] != r[0]:
        return False
    if w[1] == r[1]:
        return True
    c = interval(w[0], numeric)[0]
    for rest in (w[1], r[1]):
        low, high = interval(rest, numeric)
        if low < 0 or high is None or high >= c:
            return False
    return True
