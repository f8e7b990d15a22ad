"""Tiles of a transposition in registers: contiguous loads along an unrolled loop, turned into vectors across it.

Where lanes are far apart in memory and the iterations of an unrolled loop around them are neighbours, tiles of 8 x 8
or 16 x 16 are loaded by rows and transposed by shuffles, instead of element by element. Where the copies of the
unrolled loop lie between the lanes, whole vectors are loaded and every other element is picked of each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy

from ....ir.expr.index import expanded
from ..text.context import Context
from .index import scalar_index, split_linear

_SIDE = 8


def transposed(
    ctx: Context, base: str, offset: sympy.Expr, version: int, element: str, size: int, load: Callable[[str], str],
    slack: bool = False,
) -> str | None:  # fmt: skip
    """The value at this point of the unrolled loop, or None where the access is not of this form.

    With ``slack`` a few elements past the last one that is accessed may be read.
    """
    assert ctx.vector is not None
    lane, lanes = ctx.vector
    whole = offset
    for var, extent in ctx.unrolled.items():
        # Copies of other unrolled loops are at other places.
        copies = {v: sympy.Integer(ctx.indices[v].name) for v in ctx.unrolled if v != var}
        offset = expanded(whole.xreplace(copies)) if whole.free_symbols & copies.keys() else whole
        parts = split_linear(offset, var)
        step = split_linear(offset, lane)
        apart = int(step[1]) if step is not None and step[1] in (2, 4) else 0
        if parts is not None and parts[1] == 1 and apart and lanes % _SIDE == 0 and (extent % apart == 0 or slack):
            position = int(ctx.indices[var].name)
            first = offset.xreplace({var: sympy.Integer(position - position % apart)})
            key = (base, first, version)
            if key not in ctx.tiles:
                ctx.tiles[key] = _apart(ctx, key, lane, lanes, apart, (element, size), load)
            return ctx.tiles[key][position % apart]
        side = _side(ctx, extent, lanes, size)
        if parts is None or parts[1] != 1 or not side or split_linear(offset, lane) is None:
            continue
        position = int(ctx.indices[var].name)
        first = sympy.Integer(position - position % side)
        key = (base, offset.xreplace({var: first}), version)
        if key not in ctx.tiles:
            ctx.tiles[key] = _tile(ctx, key, side, lane, lanes, element, size, load)
        return ctx.tiles[key][position % side]
    return None


def _apart(
    ctx: Context,
    key: tuple[str, sympy.Expr, int],
    lane: sympy.Symbol,
    lanes: int,
    count: int,
    kind: tuple[str, int],
    load: Callable[[str], str],
) -> list[str]:
    """``count`` vectors of every ``count``-th element, from as many neighbouring vectors."""
    base, offset, _ = key
    element, size = kind
    start = expanded(offset.xreplace({lane: sympy.S.Zero}))
    parts = []
    for k in range(count):
        pointer = element_pointer(ctx, base, expanded(start + k * lanes), element)
        parts.append(load(f"load <{lanes} x {element}>, ptr {pointer}, align {size}"))
    return _picked(ctx, parts, lanes, element)


def _picked(ctx: Context, parts: list[str], lanes: int, element: str, run: int = 1) -> list[str]:
    """Even elements (or runs of some) of each pair of vectors, then odd ones, until each vector holds one remainder.

    In their order.
    """
    if len(parts) == 1:
        return parts
    found = []
    for odd in (0, 1):
        picks = [k for k in range(2 * lanes) if k // run % 2 == odd]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        found.append(_picked(ctx, [shuffle(ctx, x, y, picks, element, lanes) for x, y in pairs], lanes, element, run))
    return [v for pair in zip(*found, strict=True) for v in pair]


def _tile(
    ctx: Context,
    key: tuple[str, sympy.Expr, int],
    side: int,
    lane: sympy.Symbol,
    lanes: int,
    element: str,
    size: int,
    load: Callable[[str], str],
) -> list[str]:
    """The vectors of ``side`` neighbouring iterations of the unrolled loop."""
    base, offset, _ = key
    blocks = []
    for start in range(0, lanes, side):
        rows = []
        for k in range(start, start + side):
            pointer = element_pointer(ctx, base, expanded(offset.xreplace({lane: sympy.Integer(k)})), element)
            rows.append(load(f"load <{side} x {element}>, ptr {pointer}, align {size}"))
        blocks.append(_transpose(ctx, rows, element))
    return [concat(ctx, [block[k] for block in blocks], element, side) for k in range(side)]


def _side(ctx: Context, extent: int, lanes: int, size: int) -> int:
    """Rows and columns of the tiles: as wide as a register where it has 16 elements, else 8; 0 where none fits.

    A row of 16 is a cache line, and loaded once: rows that lie a power of two apart share so few places of a cache that
    its second half would not be there any more when its turn comes.
    """
    for side in (16, 8):
        blocks, rest = divmod(lanes, side)
        joined = rest == 0 and blocks.bit_count() == 1  # halves of a vector, halves of those, and so on
        if extent % side == 0 and joined and (side == 8 or ctx.target.lanes(max(size, 4)) >= side):
            return side
    return 0


def _transpose(ctx: Context, rows: list[str], element: str) -> list[str]:
    """As many columns as there are rows of as many elements, by shuffles that are one instruction each.

    Single elements and pairs change places within 128 bits (of four bytes an element), then whole 128 bits.
    """
    side = len(rows)
    ones = [_zip(ctx, rows[k & ~1], rows[k | 1], 1, k & 1, element, side) for k in range(side)]
    # Now two each hold columns 0 1 and 2 3 of every four, of rows 2k and 2k + 1.
    twos = []
    for k in range(0, side, 4):
        for odd in (0, 1):
            twos += [_zip(ctx, ones[k + odd], ones[k + 2 + odd], 2, high, element, side) for high in (0, 1)]
    columns: list[str] = [""] * side
    for k in range(4):
        columns[k::4] = _picked(ctx, twos[k::4], side, element, 4)
    return columns


def _zip(ctx: Context, x: str, y: str, run: int, high: int, element: str, side: int) -> str:
    """Of every four elements of two vectors, the lower or the higher two of each, ``run`` of them in turn."""
    picks = []
    for four in range(0, side, 4):
        low = four + 2 * high
        picks += [low, side + low, low + 1, side + low + 1] if run == 1 else [low, low + 1, side + low, side + low + 1]
    return shuffle(ctx, x, y, picks, element, side)


def shuffle(ctx: Context, x: str, y: str, picks: Sequence[int], element: str, lanes: int) -> str:
    """The elements ``picks`` of two vectors of ``lanes`` elements, those of the second behind those of the first."""
    kind = f"<{lanes} x {element}>"
    listing = ", ".join(f"i32 {p}" for p in picks)
    return ctx.b.op(f"shufflevector {kind} {x}, {kind} {y}, <{len(picks)} x i32> <{listing}>")


def concat(ctx: Context, parts: list[str], element: str, width: int) -> str:
    """Vectors of ``width`` elements, a power of two of them, as one."""
    while len(parts) > 1:
        picks = range(2 * width)
        parts = [shuffle(ctx, x, y, picks, element, width) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        width *= 2
    return parts[0]


def element_pointer(ctx: Context, base: str, offset: sympy.Expr, element: str) -> str:
    constant, rest = offset.as_coeff_Add() if offset.is_Add else (sympy.S.Zero, offset)
    if rest.is_Integer:
        constant, rest = constant + rest, sympy.S.Zero
    if rest != 0:
        base = ctx.b.op(f"getelementptr inbounds {element}, ptr {base}, i64 {scalar_index(ctx, rest).name}")
    if constant != 0:
        base = ctx.b.op(f"getelementptr inbounds {element}, ptr {base}, i64 {int(constant)}")
    return base
