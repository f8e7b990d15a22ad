"""merge (loop fusion of siblings)."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.nest.loops import Loop, LoopNest, Node
from ...error import ScheduleError
from ..analysis.dependence import accesses, check_pairs, places
from ..analysis.tree import blocks_under, find_loop, substitute


def merge(nest: LoopNest, first: str, second: str) -> LoopNest:
    """Run two loops of one body and of equal extent as one; the variable of the first remains.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        B[i] = A[i] + 1
        for j in range(n):                C[i] = B[i] * 2
            C[j] = B[j] * 2

    What stands between the two stays behind the merged loop, or before it where the first loop does not depend on it
    and the second does.

    Requires: both loops stand in one body, the first one first, and are alike in extent and kind; whatever the second
    reads of what the first writes is written in the same iteration, and is no reduction over this loop.
    Raises: ScheduleError.    Source: loop fusion; Exo ``fuse``.
    """
    asked = f"merge({first}, {second})"
    a, outer = find_loop(nest, first, asked)
    b, around = find_loop(nest, second, asked)
    siblings = outer[-1].body if outer else nest.body
    if a is b or len(outer) != len(around) or (outer and outer[-1] is not around[-1]):
        raise ScheduleError(asked, f"{second} does not stand in the same body as {first}", nest, second)
    at = next(k for k, n in enumerate(siblings) if n is a)
    to = next(k for k, n in enumerate(siblings) if n is b)
    if to < at:
        raise ScheduleError(asked, f"{second} stands before {first}", nest, second, f"merge({second}, {first})")
    if a.extent != b.extent and sympy.expand(a.extent - b.extent) != 0:
        raise ScheduleError(asked, f"the extents {a.extent} and {b.extent} differ", nest, second)
    if a.kind is not b.kind:
        raise ScheduleError(asked, f"{first} is {a.kind.value}, {second} is {b.kind.value}", nest, second)
    before, after = _sorted(nest, a, siblings[at + 1 : to], b, asked)
    scope = {lp.var: lp.extent for lp in outer} | {a.var: a.extent}
    merged = replace(a, body=(*a.body, *substitute(b.body, {b.var: a.var}, scope, nest)))
    body = (*siblings[:at], *before, merged, *after, *siblings[to + 1 :])
    result = replace(nest, body=_with_body(nest.body, outer, body))
    found = places(result)
    firsts, seconds = blocks_under(a), blocks_under(b)
    check_pairs(result, ((found[x.name], found[y.name]) for x in firsts for y in seconds), asked, nest, len(outer) + 1)
    return result


def _with_body(nodes: tuple[Node, ...], path: tuple[Loop, ...], body: tuple[Node, ...]) -> tuple[Node, ...]:
    if not path:
        return body
    return tuple(replace(n, body=_with_body(n.body, path[1:], body)) if n is path[0] else n for n in nodes)  # type: ignore[union-attr]


def _sorted(nest: LoopNest, a: Loop, between: tuple[Node, ...], b: Loop, asked: str) -> tuple[list[Node], list[Node]]:
    """What stands between two loops, as what can go before the first and what can go behind the second."""
    before: list[Node] = []
    after: list[Node] = []
    for node in between:
        # What stays behind the merged loop is passed by the second loop; what goes before it passes the first.
        if not _depend(node, b):
            after.append(node)
        elif not any(_depend(x, node) for x in (a, *after)):
            before.append(node)
        else:
            raise ScheduleError(
                asked, f"{blocks_under(node)[0].name} stands between them, after the first and before the second",
                nest, blocks_under(node)[0].name,
            )  # fmt: skip
    return before, after


def _depend(first: Node, second: Node) -> bool:
    """Whether two statements have to keep their order."""
    for x in map(accesses, blocks_under(first)):
        for y in map(accesses, blocks_under(second)):
            if x.written & (y.read | y.written) or x.read & y.written:
                return True
    return False
