"""How much of what a tile asks for lies together in memory: caches fetch lines, and pay for what is left of them.

Triton lays the lanes of a warp along what is contiguous, so the tile of a scheduled nest tells it, and no machine code
is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import sympy

from ...ir.expr.value import Index, Load, free_symbols, is_value
from ...ir.nest.loops import Access, Block, Buffer, Loop, LoopKind, LoopNest, Scope, blocks
from ...scheduler.primitives.analysis.tree import linear_part
from .places import place_of
from .traffic import Traffic

# The widest access of a lane, and the share of a kernel's traffic below which an array does not matter.
_WIDEST, _SHARE = 16, 1 / 16


def contiguous_bytes(nest: LoopNest, traffic: Traffic, warp: int) -> int | None:
    """The least contiguous bytes of a warp's accesses of the arrays that matter; None where there are none.

    Each access is looked at in the first tile of the nest as it is scheduled; one whose place is computed, as where a
    border is mirrored, in the middle tile. Along axes by which data decide places, those lie apart.
    """
    matter = {n for n, v in traffic.arrays.items() if v.read + v.written >= _SHARE * traffic.moved}
    return min((least for _, least in _runs(nest, matter, warp)), default=None)


def contiguous_by_array(nest: LoopNest, warp: int) -> dict[str, int]:
    """The same for each array by its name; those of which all lanes of a warp ask for one place are left out."""
    found: dict[str, int] = {}
    for name, least in _runs(nest, {b.name for b in nest.params}, warp):
        found[name] = min(least, found.get(name, least))
    return found


def _runs(nest: LoopNest, arrays: Collection[str], warp: int) -> Iterator[tuple[str, int]]:
    """Arrays and the contiguous bytes of each access of them."""
    buffers = nest.buffers
    for block, outer in blocks(nest):
        lanes = [lp for lp in outer if lp.kind is LoopKind.THREAD_X]
        # What is written out for each part of a word, or for each of several neighbours, is loaded at once.
        parts = [lp for lp in outer if lp.kind is LoopKind.UNROLLED]
        sites: list[Load | Access] = [*block.reads, *block.writes]
        for site in sites:
            buffer = buffers[site.buffer]
            if buffer.scope is not Scope.GLOBAL or buffer.name not in arrays:
                continue
            moving = [*_steps(nest, block, buffer, site.indices, lanes, outer)]
            together = _together([*moving, *_steps(nest, block, buffer, site.indices, parts, outer)])
            if together is not None and any(step != 0 and many > 1 for step, many in moving):
                yield buffer.name, min(together * buffer.dtype.itemsize, warp * _WIDEST)


def _together(steps: Sequence[tuple[int | None, int]]) -> int | None:
    """Elements that lie together, of axes with a distance of neighbours and a number of them; None where all axes
    stand still."""
    moving = [(step, many) for step, many in steps if step != 0 and many > 1]
    run = 1
    for step, many in sorted((abs(s), n) for s, n in moving if s is not None):
        if step > run:
            break
        run = max(run, step * many)
    return run if moving else None


def _steps(
    nest: LoopNest,
    block: Block,
    buffer: Buffer,
    indices: tuple[Index, ...],
    lanes: list[Loop],
    outer: Sequence[Loop],
) -> Iterator[tuple[int | None, int]]:
    """By axis of the tile: the elements between neighbours, and how many follow one another so; None where the data
    place them."""
    bindings = {a.var: b for a, b in zip(block.axes, block.bindings, strict=True)}
    place, decided = sympy.S.Zero, set[sympy.Symbol]()
    for index, stride in zip(indices, buffer.strides, strict=True):
        known = place_of(index)
        if known is None:
            named = free_symbols(Load("", (index,), index.dtype))
            decided |= {s for v in named for s in bindings.get(v, v).free_symbols}
        else:
            place += known.xreplace(bindings) * stride
    sizes = {s: sympy.Integer(nest.symbols.hint(s)) for s in nest.symbols.symbols}
    others = {s: sympy.S.Zero for s in place.free_symbols if s not in sizes}
    if any(map(is_value, indices)):
        # What is mirrored or clamped at the borders is so in few tiles; one in the middle tells of most.
        others |= {lp.var: sympy.Integer(nest.symbols.hint(lp.extent) // 2) for lp in outer if lp not in lanes}
    begin = int(place.xreplace({**others, **sizes, **{lp.var: sympy.S.Zero for lp in lanes}}))
    for lane in lanes:
        extent = _lanes(nest, block, lane)
        if lane.var in decided:
            yield None, extent
            continue

        def at(k: int, var: sympy.Symbol = lane.var) -> int:
            return int(place.xreplace({**others, **sizes, var: sympy.Integer(k)})) - begin

        step, many = at(1), extent if at(extent - 1) == (extent - 1) * at(1) else 2
        # Quotients and remainders of a lane leave the line somewhere, at a multiple of a power of two as a rule.
        while 2 * many <= extent and at(2 * many - 1) == (2 * many - 1) * step:
            many *= 2
        yield step, min(many, extent)


def _lanes(nest: LoopNest, block: Block, lane: Loop) -> int:
    """The lanes along an axis of the tile that are switched on in the first one."""
    hint = nest.symbols.hint
    lanes = hint(lane.extent)
    for axis, binding in zip(block.axes, block.bindings, strict=True):
        each = linear_part(binding, lane.var)
        if each is not None and each[0].is_Integer and each[0] > 0:
            lanes = min(lanes, -(-hint(axis.extent) // int(each[0])))
    return max(lanes, 1)
