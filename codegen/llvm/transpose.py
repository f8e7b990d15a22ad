"""Tiles of a transposition in registers: contiguous loads along an unrolled loop, turned into vectors across it.

Where lanes are far apart in memory and the iterations of an unrolled loop around them are neighbours, 8 x 8 tiles are
loaded by rows and transposed by shuffles, instead of element by element. Where the copies of the unrolled loop lie
between the lanes, whole vectors are loaded and every other element is picked of each pair.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from .context import Context
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
        offset = sympy.expand(whole.xreplace(copies)) if whole.free_symbols & copies.keys() else whole
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
        if parts is None or parts[1] != 1 or extent % _SIDE or lanes % _SIDE or split_linear(offset, lane) is None:
            continue
        position = int(ctx.indices[var].name)
        first = sympy.Integer(position - position % _SIDE)
        key = (base, offset.xreplace({var: first}), version)
        if key not in ctx.tiles:
            ctx.tiles[key] = _tile(ctx, key, var, lane, lanes, element, size, load)
        return ctx.tiles[key][position % _SIDE]
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
    start = sympy.expand(offset.xreplace({lane: sympy.S.Zero}))
    parts = []
    for k in range(count):
        pointer = element_pointer(ctx, base, sympy.expand(start + k * lanes), element)
        parts.append(load(f"load <{lanes} x {element}>, ptr {pointer}, align {size}"))
    return _picked(ctx, parts, lanes, element)


def _picked(ctx: Context, parts: list[str], lanes: int, element: str) -> list[str]:
    """Even elements of each pair of vectors, then odd ones, until each vector holds one remainder; in their order."""
    if len(parts) == 1:
        return parts
    kind, found = f"<{lanes} x {element}>", []
    for odd in (0, 1):
        picks = ", ".join(f"i32 {k}" for k in range(odd, 2 * lanes, 2))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        half = [ctx.b.op(f"shufflevector {kind} {x}, {kind} {y}, <{lanes} x i32> <{picks}>") for x, y in pairs]
        found.append(_picked(ctx, half, lanes, element))
    return [v for pair in zip(*found, strict=True) for v in pair]


def _tile(
    ctx: Context,
    key: tuple[str, sympy.Expr, int],
    var: sympy.Symbol,
    lane: sympy.Symbol,
    lanes: int,
    element: str,
    size: int,
    load: Callable[[str], str],
) -> list[str]:
    """The vectors of eight neighbouring iterations of the unrolled loop."""
    base, offset, _ = key
    blocks = []
    for start in range(0, lanes, _SIDE):
        rows = []
        for k in range(start, start + _SIDE):
            pointer = element_pointer(ctx, base, sympy.expand(offset.xreplace({lane: sympy.Integer(k)})), element)
            rows.append(load(f"load <{_SIDE} x {element}>, ptr {pointer}, align {size}"))
        blocks.append(_transpose(ctx, rows, element))
    return [_concat(ctx, [block[k] for block in blocks], element) for k in range(_SIDE)]


# Pairs of rows and picks of two shuffles a pair: neighbours, pairs of neighbours, halves; within 128 bits as far as
# possible.
_STAGES = (
    (1, (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
    (2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    (4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)


def _transpose(ctx: Context, rows: list[str], element: str) -> list[str]:
    """Eight rows of eight elements as eight columns."""
    t = rows
    (_, low, high), (_, low2, high2), (_, low4, high4) = _STAGES
    t = [_shuffle(ctx, t[k & ~1], t[k | 1], high if k & 1 else low, element) for k in range(8)]
    # Now t[2k] and t[2k + 1] hold columns 0 1 4 5 and 2 3 6 7 of rows 2k and 2k + 1.
    s = []
    for block in (0, 4):
        for odd in (0, 1):
            pair = (t[block + odd], t[block + 2 + odd])
            s += [_shuffle(ctx, *pair, low2, element), _shuffle(ctx, *pair, high2, element)]
    return [_shuffle(ctx, s[k % 4], s[4 + k % 4], high4 if k >= 4 else low4, element) for k in range(8)]


def _shuffle(ctx: Context, x: str, y: str, picks: tuple[int, ...], element: str) -> str:
    kind = f"<{_SIDE} x {element}>"
    return ctx.b.op(
        f"shufflevector {kind} {x}, {kind} {y}, <{len(picks)} x i32> <{', '.join(f'i32 {p}' for p in picks)}>"
    )


def _concat(ctx: Context, parts: list[str], element: str) -> str:
    width = _SIDE
    while len(parts) > 1:
        kind = f"<{width} x {element}>"
        picks = ", ".join(f"i32 {p}" for p in range(2 * width))
        parts = [
            ctx.b.op(f"shufflevector {kind} {x}, {kind} {y}, <{2 * width} x i32> <{picks}>")
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
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
