"""fuse_reductions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from ....ir.expr.value import Index, is_value, substitute_index
from ....ir.nest.loops import Access, Block, LoopNest, Node, Update, map_nodes
from ...error import ScheduleError
from ..analysis.dependence import BlockPlace, accesses, places, refuse_scatter
from ..analysis.tree import find_block


def fuse_reductions(nest: LoopNest, first: str, second: str) -> LoopNest:
    """Make one block of two reductions over the same loops; it keeps the name of the first.

    Rewrites::

        for i in range(n):                      for i in range(n):
            for k in range(m):                      for k in range(m):
                S[i] += A[i, k]           ->            S[i] += A[i, k]
                M[i] max= A[i, k]                       M[i] max= A[i, k]

    where each statement was a block of its own, and is now one of two of a block: what both read is loaded once, and
    later primitives move them together.

    Requires: both stand in the body of the same loop (``merge`` brings them there) and bind axes of the same kinds and
    extents to the same loops, under the same bounds; neither needs the other, nor does what stands between them.
    Raises: ScheduleError.    Source: horizontal fusion of reductions.
    """
    asked = f"fuse_reductions({first}, {second})"
    a, outer = find_block(nest, first, asked)
    b, around = find_block(nest, second, asked)
    if a is b:
        raise ScheduleError(asked, "the two are one block", nest, first)
    for block in (a, b):
        if not block.is_reduction:
            raise ScheduleError(asked, f"{block.name} is no reduction", nest, block.name)
        if block.is_scan:
            raise ScheduleError(asked, f"{block.name} is a scan", nest, block.name)
        refuse_scatter(nest, block, asked)
    if tuple(lp.var for lp in outer) != tuple(lp.var for lp in around):
        raise ScheduleError(
            asked, f"{second} does not stand in the same loop as {first}", nest, second, "merge their loops first"
        )
    known = places(nest)
    if known[first].order > known[second].order:
        raise ScheduleError(
            asked, f"{second} stands before {first}", nest, second, f"fuse_reductions({second}, {first})"
        )
    env = _same_axes(nest, a, b, asked)
    if set(a.predicate) != set(b.predicate):
        raise ScheduleError(asked, f"the bounds of {first} and {second} differ", nest, second)
    _check(nest, known[first], known[second], known, asked)
    joined = replace(a, body=(*a.body, *(_renamed(s, env) for s in b.body if isinstance(s, Update))))

    def visit(n: Node) -> Node | tuple[Node, ...] | None:
        return joined if n is a else () if n is b else None

    return replace(nest, body=map_nodes(nest.body, visit))


def _same_axes(nest: LoopNest, a: Block, b: Block, asked: str) -> dict[sympy.Symbol, sympy.Expr]:
    """The first block's axis for each of the second's."""
    left = list(zip(a.axes, a.bindings, strict=True))
    env: dict[sympy.Symbol, sympy.Expr] = {}
    for axis, binding in zip(b.axes, b.bindings, strict=True):
        match = next((p for p in left if (p[1], p[0].kind, p[0].extent) == (binding, axis.kind, axis.extent)), None)
        if match is None:
            raise ScheduleError(
                asked, f"{a.name} has no {axis.kind.value} axis like {axis.var} of {b.name}", nest, b.name
            )
        left.remove(match)
        env[axis.var] = match[0].var
    if left:
        axis = left[0][0]
        raise ScheduleError(asked, f"{b.name} has no {axis.kind.value} axis like {axis.var} of {a.name}", nest, b.name)
    return env


def _check(nest: LoopNest, first: BlockPlace, second: BlockPlace, known: Mapping[str, BlockPlace], asked: str) -> None:
    """The second comes to where the first is: past everything between them, and beside the first."""
    moved = accesses(second.block)
    for p in known.values():
        if not first.order <= p.order < second.order:
            continue
        theirs = accesses(p.block)
        for verb, names in (
            ("reads", theirs.written & moved.read),
            ("writes", theirs.read & moved.written),
            ("also writes", theirs.written & moved.written),
        ):
            if names:
                says = f"{second.block.name} {verb} {min(names)}, which {p.block.name} uses"
                raise ScheduleError(asked, says, nest, p.block.name)


def _renamed(update: Update, env: Mapping[sympy.Symbol, sympy.Expr]) -> Update:
    def moved(i: Index) -> Index:
        return substitute_index(i, env) if is_value(i) else i.xreplace(env)  # type: ignore[arg-type, union-attr]

    targets = tuple(Access(t.buffer, tuple(map(moved, t.indices))) for t in update.targets)
    return replace(update, targets=targets, values=tuple(substitute_index(v, env) for v in update.values))
