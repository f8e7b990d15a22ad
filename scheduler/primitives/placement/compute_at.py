"""compute_at."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.errors import IRError
from ....ir.expr.value import is_value
from ....ir.nest.loops import Block, LoopNest
from ...error import ScheduleError
from ..analysis.dependence import Accesses, accesses, check_moved, guarded, places, refuse_continued
from ..analysis.place import move_block
from ..analysis.region import Region, at_least, axis_regions, index_region
from ..analysis.tree import blocks_under, find_block, find_loop
from ..loops.kind import check_kinds


def compute_at(nest: LoopNest, block: str, loop: str, preserve_unit_loops: bool = False) -> LoopNest:
    """Compute a producer inside a loop of its readers, only as much of it as one iteration needs.

    Rewrites::

        for i in range(n):                    for i in range(n):
            for k in range(m):                    for k in range(m):
                B[i] += A[i, k]         ->            B[i] += A[i, k]
        for i in range(n):                        C[i] = B[i]
            C[i] = B[i]

    The block goes before its first reader. Loops that the readers fix disappear, or remain with one iteration where
    ``preserve_unit_loops``; loops of a reduction, and of axes that are needed whole, stay as they are, kinds included.

    Requires: every reader of the block is inside the loop, and so is nothing that must come before it; the block
    writes at plain axes. Elements that several iterations need are computed again. A block that also writes an output
    must be needed whole.
    Raises: ScheduleError.    Source: TVM ``Schedule.compute_at``, Halide ``Func.compute_at``.
    """
    asked = f"compute_at({block}, {loop})"
    node, _ = find_block(nest, block, asked)
    target, outer = find_loop(nest, loop, asked)
    refuse_continued(nest, node, asked)
    if node.is_scan:
        raise ScheduleError(asked, "each of its elements needs all before it", nest, block)
    inside = blocks_under(target)
    if any(b is node for b in inside):
        raise ScheduleError(asked, "it is inside that loop already", nest, block)
    mine = accesses(node)
    readers = [p for p in places(nest).values() if p.block is not node and accesses(p.block).read & mine.written]
    if not readers:
        raise ScheduleError(asked, "nothing reads it", nest, block, "reverse_compute_at moves a reader to its producer")
    outside = [r.block.name for r in readers if all(r.block is not b for b in inside)]
    if outside:
        raise ScheduleError(
            asked, f"{outside[0]} reads it and is not in that loop", nest, outside[0], "bring its readers there first"
        )
    fixed = {lp.var for lp in (*outer, target)}
    parts = []
    for r in readers:
        inner = {lp.var: lp.extent for lp in r.loops if lp.var not in fixed}
        parts.append((r.block, axis_regions(r.block, fixed, inner)))
    wanted = _needed(nest, node, mine, parts, asked)
    first = next(k for k, n in enumerate(target.body) if any(b is r.block for b in blocks_under(n) for r in readers))
    result = move_block(nest, node, loop, first, wanted, [r.block for r in readers], asked, preserve_unit_loops)
    check_moved(nest, result, block, asked)
    check_kinds(result, asked, nest)
    return result


def _needed(
    nest: LoopNest,
    node: Block,
    mine: Accesses,
    parts: list[tuple[Block, dict[sympy.Symbol, Region]]],
    asked: str,
) -> dict[sympy.Symbol, Region]:
    """What one iteration needs of each axis that the block writes at; refuses where an output would lose elements."""
    buffers = nest.buffers
    is_output = bool(mine.written & set(nest.outputs))
    wanted: dict[sympy.Symbol, Region] = {}
    complete: set[sympy.Symbol] = set()
    for write in mine.writes:
        loads = [
            (ld, reader, axes) for reader, axes in parts for ld in accesses(reader).reads if ld.buffer == write.buffer
        ]
        if not loads:
            continue
        for k, (index, size) in enumerate(zip(write.indices, buffers[write.buffer].shape, strict=True)):
            if is_value(index):
                raise ScheduleError(asked, f"it writes {write.buffer} at computed places", nest, node.name)
            if not index.is_Symbol:  # type: ignore[union-attr]
                continue  # a constant place; axes in other forms are needed whole
            regions = [index_region(ld.indices[k], size, axes) for ld, _, axes in loads]
            for place, (ld, reader, _) in enumerate(loads):
                # A tail or a condition leaves out what lies before the first element.
                if (reader.predicate or ld in guarded(reader)) and not _is_there(nest, regions[place], reader):
                    regions[place] = Region(sympy.S.Zero, size, is_whole=True)
                elif not is_output:  # all of a reader's axis may be a part of the dimension
                    regions[place] = replace(regions[place], is_whole=False)
            region = _union(nest, regions, size)
            known = wanted.get(index)  # type: ignore[arg-type]
            wanted[index] = region if known is None else _union(nest, [known, region], size)  # type: ignore[index]
            if any(
                any(a.var == ld.indices[k] and a.extent == size for a in reader.axes)
                and ld.indices.count(ld.indices[k]) == 1
                for ld, reader, _ in loads
            ):
                complete.add(index)  # type: ignore[arg-type]
    odd = {
        s for w in mine.writes for i in w.indices if not is_value(i) and not i.is_Symbol  # type: ignore[union-attr]
        for s in i.free_symbols  # type: ignore[union-attr]
    }  # fmt: skip
    for axis in node.axes:
        if axis.var in odd:
            wanted.pop(axis.var, None)
    if is_output:
        partial = [a for a, r in wanted.items() if not r.is_whole and a not in complete]
        if partial:
            raise ScheduleError(
                asked, f"it writes an output, of whose axis {partial[0]} its readers need a part only", nest, node.name
            )
    return wanted


def _is_there(nest: LoopNest, region: Region, reader: Block) -> bool:
    """Whether a region surely begins at no place before the first."""
    if region.is_whole:
        return True
    around = find_block(nest, reader.name, "compute_at")[1]
    try:
        return nest.symbols.bounds(region.start, {lp.var: lp.extent for lp in around})[0] >= 0
    except IRError:
        return False


def _union(nest: LoopNest, regions: list[Region], size: sympy.Expr) -> Region:
    """The least region that is easily seen to hold all of them."""
    whole = Region(sympy.S.Zero, size, is_whole=True)
    first = regions[0]
    if any(r.is_whole for r in regions):
        return whole
    for r in regions[1:]:
        ahead = sympy.expand(r.start - first.start)
        if not ahead.is_Integer:
            return whole
        start = first.start if ahead >= 0 else r.start
        ends = [first.extent - min(ahead, 0), r.extent + max(ahead, 0)]
        if at_least(ends[0], ends[1], nest.symbols):
            first = Region(start, sympy.expand(ends[0]))
        elif at_least(ends[1], ends[0], nest.symbols):
            first = Region(start, sympy.expand(ends[1]))
        else:
            return whole
    if not first.start.free_symbols and at_least(first.extent, size, nest.symbols):
        return whole
    return first
