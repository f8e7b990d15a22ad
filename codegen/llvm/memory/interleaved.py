"""Groups of a few neighbours in memory, one of them for each copy of an unrolled loop, a group for each lane.

Coordinates of points, channels of pixels and parts of complex numbers lie so. The registers that hold the groups of
all lanes are loaded whole, and each copy's lanes are picked from them. What copies store is kept until the last of
them, woven together, and stored in whole registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import sympy

from ....ir.expr.index import expanded
from ....ir.nest.loops import Block, Loop, LoopKind, Store, walk_nodes
from ..text.context import Context
from .index import split_linear
from .strided import picked
from .transpose import element_pointer, shuffle

# Neighbours of a group, at most: with more of them, tiles of rows of a whole cache line are turned round.
MOST = 15


def is_group(extent: sympy.Expr) -> bool:
    """Whether so many neighbours are a group."""
    return bool(extent.is_Integer and 1 < extent <= MOST)


def group(ctx: Context, offset: sympy.Expr, size: int) -> tuple[sympy.Expr, int, int] | None:
    """Where the groups of all lanes begin, how many neighbours are in one, and which of them this copy accesses; None
    where lanes and copies do not lie so. ``offset`` in loop variables, ``size`` bytes of an element."""
    assert ctx.vector is not None
    lane, lanes = ctx.vector
    if size < 4 or lanes & (lanes - 1) or lanes > ctx.target.lanes(size):
        return None
    for var, extent in ctx.unrolled.items():
        copies = {v: sympy.Integer(ctx.indices[v].name) for v in ctx.unrolled if v != var}
        along, across = (split_linear(expanded(offset.xreplace(copies)), v) for v in (var, lane))
        if along is None or across is None or along[1] != 1 or across[1] != extent or not is_group(across[1]):
            continue
        start = expanded(offset.xreplace(copies | {var: sympy.S.Zero, lane: sympy.S.Zero}))
        return start, extent, int(ctx.indices[var].name)
    return None


def unwoven(
    ctx: Context, base: str, offset: sympy.Expr, version: int, element: str, size: int, load: Callable[[str], str]
) -> str | None:
    """The lanes of this copy, or None where the access is not of this form."""
    found = group(ctx, offset, size)
    if found is None:
        return None
    start, count, copy = found
    assert ctx.vector is not None
    lane, lanes = ctx.vector
    key = (base, start + count * lane, version)
    if key not in ctx.tiles:
        pointers = [element_pointer(ctx, base, expanded(start + k * lanes), element) for k in range(count)]
        registers = [load(f"load <{lanes} x {element}>, ptr {p}, align {size}") for p in pointers]
        begins = range(0, count * lanes, lanes)
        ctx.tiles[key] = [picked(ctx, registers, begins, count, k, element, lanes) for k in range(count)]
    return ctx.tiles[key][copy]


def weaves(ctx: Context, loop: Loop) -> frozenset[str]:
    """The buffers whose stores may wait for the last copy of an unrolled loop: all copies are one run of code that
    writes them by one statement and does not read them."""
    inside = [n for n, _ in walk_nodes(loop.body)]
    straight = (LoopKind.UNROLLED, LoopKind.VECTORIZED)
    if not is_group(loop.extent) or any(isinstance(n, Loop) and n.kind not in straight for n in inside):
        return frozenset()
    blocks = [n for n in inside if isinstance(n, Block)]
    if any(not ctx.assumed.issuperset(b.predicate) for b in blocks):
        return frozenset()
    read = {r.buffer for b in blocks for r in b.reads}
    writes = [w.buffer for b in blocks for w in b.writes]
    stores = {s.buffer for b in blocks for s in b.body if isinstance(s, Store)}
    return frozenset(name for name in stores - read if writes.count(name) == 1)


def weave(
    ctx: Context, name: str, base: str, offset: sympy.Expr, value: str, element: str, size: int
) -> list[tuple[str, str]] | None:
    """Keep a vector that a copy stores until the last copy: the pointers and registers to store then, nothing before.
    None where the access is not of this form, or stores of the buffer may not wait."""
    found = group(ctx, offset, size) if name in ctx.weaving else None
    if found is None:
        return None
    start, count, copy = found
    waiting = ctx.woven.setdefault((name, start), [])
    assert len(waiting) == copy
    waiting.append(value)
    if copy < count - 1:
        return []
    del ctx.woven[name, start]
    assert ctx.vector is not None
    lanes = ctx.vector[1]
    registers = _woven(ctx, waiting, element, lanes)
    return [
        (element_pointer(ctx, base, expanded(start + k * lanes), element), register)
        for k, register in enumerate(registers)
    ]


def _woven(ctx: Context, vectors: Sequence[str], element: str, lanes: int) -> list[str]:
    """The first elements of all vectors, then the second ones, and so on, in as many vectors."""
    count = len(vectors)
    if count == 1:
        return list(vectors)
    if count & (count - 1) == 0:
        even, odd = (_woven(ctx, vectors[k::2], element, lanes) for k in (0, 1))
        half = lanes // 2
        halves = [[e for k in range(at, at + half) for e in (k, lanes + k)] for at in (0, half)]
        return [shuffle(ctx, x, y, h, element, lanes) for x, y in zip(even, odd, strict=True) for h in halves]
    if gcd(count, lanes) == 1:
        # Each vector once in the order in which its elements are wanted, whichever register wants them.
        places: list[list[int]] = [[0] * lanes for _ in vectors]
        for k, order in enumerate(places):
            for at in range(lanes):
                order[(k + count * at) % lanes] = at
        vectors = [shuffle(ctx, v, v, order, element, lanes) for v, order in zip(vectors, places, strict=True)]
    else:
        places = []
    return [_gathered(ctx, vectors, k * lanes, places, element, lanes) for k in range(count)]


def _gathered(
    ctx: Context, vectors: Sequence[str], first: int, places: Sequence[Sequence[int]], element: str, lanes: int
) -> str:
    """One register of woven vectors, from element ``first`` on. With ``places`` all elements are in their lanes."""
    wanted = [divmod(first + lane, len(vectors)) for lane in range(lanes)]
    result: str | None = None
    placed: list[int] = []
    for k in sorted({of for _, of in wanted}):
        mine = [lane if places else at for lane, (at, _) in enumerate(wanted)]
        if result is None:
            result, placed = vectors[k], [m if of == k else lane for lane, (m, (_, of)) in enumerate(zip(mine, wanted))]
            continue
        picks = [lanes + m if of == k else p for m, p, (_, of) in zip(mine, placed, wanted, strict=True)]
        result, placed = shuffle(ctx, result, vectors[k], picks, element, lanes), list(range(lanes))
    assert result is not None
    return result
