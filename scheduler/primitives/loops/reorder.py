"""reorder."""

from __future__ import annotations

from dataclasses import replace

from ....ir.nest.loops import Loop, LoopNest, Node
from ...error import ScheduleError
from ..analysis.dependence import check_pairs, mixed, pairs_under, scanned
from ..analysis.tree import blocks_under, find_loop, with_node
from .kind import check_kinds


def reorder(nest: LoopNest, loops: list[str]) -> LoopNest:
    """Put nested loops into the given order, outermost first; loops between them that are not named keep their places.

    Rewrites::

        for i in range(n):            for j in range(m):
            for j in range(m):  ->        for i in range(n):
                C[i, j] = A[i, j]             C[i, j] = A[i, j]

    Requires: each loop of the chain stands alone in the body of the one around it; blocks in it do not need each
    other's other iterations; no loop carries a reduction and another axis at once; the loops of a scan keep their
    order among each other; lanes stay innermost and a team outermost.
    Raises: ScheduleError.    Source: TVM ``Schedule.reorder``, Halide ``Func.reorder``.
    """
    asked = f"reorder({', '.join(loops)})"
    if not loops:
        raise ScheduleError(asked, "no loops were given")
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
    if loops == by_depth:
        return nest
    order = iter(loops)
    placed = [find_loop(nest, next(order), asked)[0] if n in loops else lp for n, lp in zip(names, chain, strict=True)]
    _check(nest, chain, asked)
    _check_scans(nest, chain, placed, asked)
    node: tuple[Node, ...] = chain[-1].body
    for lp in reversed(placed):
        node = (replace(lp, body=node),)
    result = with_node(nest, top, *node)
    check_kinds(result, asked, nest)
    return result


def _check_scans(nest: LoopNest, chain: list[Loop], placed: list[Loop], asked: str) -> None:
    for b in blocks_under(chain[0]):
        along = scanned(b)
        before, after = ([lp.var.name for lp in loops if lp.var in along] for loops in (chain, placed))
        if before != after:
            raise ScheduleError(asked, f"{b.name} scans along {', '.join(before)} in that order", nest, before[0])


def _check(nest: LoopNest, chain: list[Loop], asked: str) -> None:
    for b in blocks_under(chain[0]):
        both = mixed(b) & {lp.var for lp in chain}
        if both:
            name = min(v.name for v in both)
            raise ScheduleError(asked, f"{name} carries a reduction of {b.name} and another axis at once", nest, name)
    outer = find_loop(nest, chain[-1].var.name, asked)[1]
    check_pairs(nest, pairs_under(chain[-1], outer), asked, nest, len(outer) + 1)
