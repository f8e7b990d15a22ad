"""reverse_compute_at."""

from __future__ import annotations

import sympy

from ....ir.expr.value import Load, is_value
from ....ir.nest.loops import BLOCK_KINDS, AxisKind, Block, Loop, LoopKind, LoopNest
from ...error import ScheduleError
from ..analysis.dependence import BlockPlace, accesses, check_moved, places, refuse_continued
from ..analysis.place import move_block
from ..analysis.region import Region, axis_regions, index_region, is_disjoint, terms
from ..analysis.tree import blocks_under, find_block, find_loop
from ..loops.kind import check_kinds


def reverse_compute_at(nest: LoopNest, block: str, loop: str, preserve_unit_loops: bool = False) -> LoopNest:
    """Compute a reader inside a loop of its producers, on what one iteration has made.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        B[i] = A[i] + 1
        for j in range(n):                C[i] = B[i] * 2
            C[j] = B[j] * 2

    The block goes after its last producer. Axes at which it reads what the loop makes are bound to it; the others keep
    their loops, kinds included. Unit loops remain where ``preserve_unit_loops``.

    Requires: the block reads at plain axes what blocks in the loop write, and all of that is written in the same
    iteration; every loop around the new place tells elements of the block apart; it comes after no reader of its own.
    Raises: ScheduleError.    Source: TVM ``Schedule.reverse_compute_at``, Halide ``Func.compute_with``.
    """
    asked = f"reverse_compute_at({block}, {loop})"
    node, _ = find_block(nest, block, asked)
    target, outer = find_loop(nest, loop, asked)
    refuse_continued(nest, node, asked)
    inside = blocks_under(target)
    if any(b is node for b in inside):
        raise ScheduleError(asked, "it is inside that loop already", nest, block)
    mine = accesses(node)
    makers = [
        p for p in places(nest).values()
        if any(p.block is b for b in inside) and accesses(p.block).written & mine.read
    ]  # fmt: skip
    if not makers:
        raise ScheduleError(asked, "it reads nothing that is made in that loop", nest, block)
    around = (*outer, target)
    fixed = {lp.var for lp in around}
    wanted = _given(nest, node, mine.reads, makers, fixed, asked)
    told = {s for r in wanted.values() for s in r.start.free_symbols}
    for lp in around:
        if lp.extent != 1 and lp.var not in told:
            raise ScheduleError(asked, f"it would be computed again in each iteration of {lp.var}", nest, lp.var.name)
    _check_accumulation(nest, node, wanted, around, asked)
    last = max(k for k, n in enumerate(target.body) if any(b is m.block for b in blocks_under(n) for m in makers))
    result = move_block(nest, node, loop, last + 1, wanted, [m.block for m in makers], asked, preserve_unit_loops)
    check_moved(nest, result, block, asked)
    check_kinds(result, asked, nest)
    return result


def _given(
    nest: LoopNest,
    node: Block,
    reads: tuple[Load, ...],
    makers: list[BlockPlace],
    fixed: set[sympy.Symbol],
    asked: str,
) -> dict[sympy.Symbol, Region]:
    """The part of each of the block's axes that one iteration makes."""
    extents = {a.var: a.extent for a in node.axes}
    wanted: dict[sympy.Symbol, Region] = {}
    for maker in makers:
        inner = {lp.var: lp.extent for lp in maker.loops if lp.var not in fixed}
        axes = axis_regions(maker.block, fixed, inner)
        for write in accesses(maker.block).writes:
            shape = nest.buffer(write.buffer).shape
            for ld in reads:
                if ld.buffer != write.buffer:
                    continue
                for index, theirs, size in zip(write.indices, ld.indices, shape, strict=True):
                    region = index_region(index, size, axes)
                    if region.is_whole or is_value(theirs) or not theirs.is_Symbol:  # type: ignore[union-attr]
                        continue  # the check of dependences says whether what it reads there is made
                    known = wanted.get(theirs)  # type: ignore[arg-type]
                    if extents[theirs] != size or (known is not None and known != region):  # type: ignore[index]
                        raise ScheduleError(
                            asked, f"it reads {ld.buffer} at another part of axis {theirs} than is made there", nest,
                            node.name,
                        )  # fmt: skip
                    wanted[theirs] = region  # type: ignore[index]
    return wanted


def _check_accumulation(
    nest: LoopNest, node: Block, wanted: dict[sympy.Symbol, Region], around: tuple[Loop, ...], asked: str
) -> None:
    """A reduction over the loops around it must meet each element once, the first one first."""
    fixed = {lp.var: lp.extent for lp in around}
    reduced = {a.var for a in node.axes if a.kind is not AxisKind.SPATIAL}
    over = {s for v in reduced & wanted.keys() for s in wanted[v].start.free_symbols} & fixed.keys()
    if not over:
        return
    for lp in around:
        if lp.var in over and (lp.kind is LoopKind.PARALLEL or lp.kind in BLOCK_KINDS):
            raise ScheduleError(asked, f"it would reduce over {lp.var}, which is {lp.kind.value}", nest, lp.var.name)
    seen: set[sympy.Symbol] = set()
    for region in wanted.values():
        steps: list[tuple[sympy.Expr, sympy.Expr]] = []
        for term in terms(region.start):
            used = term.free_symbols & fixed.keys()
            plain = all(f.is_Symbol or not f.free_symbols & fixed.keys() for f in sympy.Mul.make_args(term))
            if used and (len(used) > 1 or not plain or used & seen):
                raise ScheduleError(asked, "it would reduce over a loop that carries other axes too", nest, node.name)
            seen |= used
            steps += [(sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f != v)), fixed[v]) for v in used]
        if not is_disjoint(nest, region.extent, steps):
            raise ScheduleError(asked, "it would meet elements that iterations share more than once", nest, node.name)
