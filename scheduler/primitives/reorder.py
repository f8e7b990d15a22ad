"""reorder."""

from __future__ import annotations

from dataclasses import replace

from ...ir.loops import Block, Loop, LoopNest, Node
from ..error import ScheduleError
from .tree import blocks_under, find_loop, with_node


def reorder(nest: LoopNest, loops: list[str]) -> LoopNest:
    """Put nested loops into the given order, outermost first; loops between them that are not named keep their places.

    Rewrites::

        for i in range(n):            for j in range(m):
            for j in range(m):  ->        for i in range(n):
                C[i, j] = A[i, j]             C[i, j] = A[i, j]

    Requires: each loop of the chain stands alone in the body of the one around it, and no block in it reads what
    another reduces over one of the loops.
    Raises: ScheduleError.    Source: TVM ``Schedule.reorder``, Halide ``Func.reorder``.
    """
    asked = f"reorder({', '.join(loops)})"
    if len(set(loops)) != len(loops):
        raise ScheduleError(asked, "a loop is named twice")
    depth = {name: len(find_loop(nest, name, asked)[1]) for name in loops}
    by_depth = sorted(loops, key=lambda n: depth[n])
    top, _ = find_loop(nest, by_depth[0], asked)
    chain: list[Loop] = [top]
    while chain[-1].var.name != by_depth[-1]:
        body = chain[-1].body
        if len(body) != 1 or not isinstance(body[0], Loop):
            raise ScheduleError(asked, f"the body of {chain[-1].var} is more than one loop", nest, chain[-1].var.name)
        chain.append(body[0])
    names = [lp.var.name for lp in chain]
    missing = [n for n in loops if n not in names]
    if missing:
        raise ScheduleError(asked, f"{missing[0]} is not nested with {by_depth[0]}", nest, missing[0])
    _check_reductions(nest, chain, loops, asked)
    order = iter(loops)
    placed = [find_loop(nest, next(order), asked)[0] if n in loops else lp for n, lp in zip(names, chain, strict=True)]
    node: tuple[Node, ...] = chain[-1].body
    for lp in reversed(placed):
        node = (replace(lp, body=node),)
    return with_node(nest, top, *node)


def _check_reductions(nest: LoopNest, chain: list[Loop], loops: list[str], asked: str) -> None:
    inside: list[Block] = [b for n in chain[-1].body for b in blocks_under(n)]
    if len(inside) < 2:
        return
    moved = set(loops)
    for b in inside:
        if not b.is_reduction:
            continue
        carried = {
            s.name
            for a, e in zip(b.axes, b.bindings, strict=True)
            if a.kind.value == "reduction"
            for s in e.free_symbols
        }
        if carried & moved:
            written = {w.buffer for w in b.writes}
            for other in inside:
                if other is not b and any(ld.buffer in written for ld in other.reads):
                    raise ScheduleError(asked, f"{other.name} reads what {b.name} reduces", nest, other.name)
