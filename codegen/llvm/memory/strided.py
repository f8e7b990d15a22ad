"""Lanes that are a few elements apart: registers are loaded whole, and shuffles pick each lane from them.

The numbers of points, boxes, pixels and complex numbers lie so, side by side in memory. A gather loads each lane by
itself. Where all of a group lies in the array, its other numbers are picked from the same registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy

from ....ir.expr.index import expanded
from ....ir.expr.value import Index
from ..text.context import BufferPlace, Context
from ..text.types import memory_type
from .index import split_linear
from .transpose import concat, element_pointer, shuffle

# Elements between lanes, at most: beyond them a gather loads hardly more than whole registers do.
_MOST = 4


def strided(
    ctx: Context, place: BufferPlace, base: str, offset: sympy.Expr, indices: Sequence[Index],
    load: Callable[[str], str],
) -> str | None:  # fmt: skip
    """The elements at ``offset`` from ``base``, one a lane; None where lanes are not a few elements apart.

    Nothing is read in front of the first element that is accessed or behind the last, unless it is the array's.
    """
    assert ctx.vector is not None
    parts, size = split_linear(offset, ctx.vector[0]), place.dtype.itemsize
    width = min(ctx.lanes, ctx.target.lanes(size))
    chunks, rest = divmod(ctx.lanes, width)
    if parts is None or not parts[1].is_Integer or size < 4 or rest or chunks & (chunks - 1):
        return None
    step = int(parts[1])
    if not 1 < step <= min(_MOST, width):
        return None
    place_in_group = _place_in_group(place, indices, step)
    first, element = place_in_group or 0, memory_type(place.dtype)
    start = parts[0] - first

    def register(at: int) -> str:
        pointer = element_pointer(ctx, base, expanded(start + at), element)
        return load(f"load <{width} x {element}>, ptr {pointer}, align {size}")

    found = []
    for at in range(0, ctx.lanes * step, width * step):
        begins = [at + k * width for k in range(step)]
        if place_in_group is None and at + width * step == ctx.lanes * step:
            begins[-1] = at + step * (width - 1) + 1 - width
        registers = [register(begin) for begin in begins]
        found.append(picked(ctx, registers, [b - at for b in begins], step, first, element, width))
    return concat(ctx, found, element, width)


def _place_in_group(place: BufferPlace, indices: Sequence[Index], step: int) -> int | None:
    """Which of ``step`` neighbours an access takes, where the array has all of them for each lane."""
    for index, extent, stride in zip(indices, place.shape, place.strides, strict=True):
        if stride == 1 and extent == step and isinstance(index, sympy.Integer) and not any(place.shift or ()):
            return int(index)
    return None


def picked(
    ctx: Context, registers: list[str], begins: Sequence[int], step: int, first: int, element: str, width: int
) -> str:
    """Element ``first`` of every ``step``, from registers that begin at the elements ``begins``."""
    if step & (step - 1) == 0 and begins[-1] == (step - 1) * width:
        while len(registers) > 1:
            every = range(first & 1, 2 * width, 2)
            pairs = zip(registers[::2], registers[1::2], strict=True)
            registers = [shuffle(ctx, x, y, every, element, width) for x, y in pairs]
            first >>= 1
        return registers[0]
    wanted = [first + step * lane for lane in range(width)]
    source = [max(k for k, begin in enumerate(begins) if begin <= at) for at in wanted]
    spot = [at - begins[k] for at, k in zip(wanted, source, strict=True)]
    result = registers[0]
    if len(set(spot)) == width:
        # Lanes stay where they are while registers are laid over one another, and are brought into order once.
        for k, other in enumerate(registers[1:], 1):
            taken = {s for s, of in zip(spot, source, strict=True) if of == k}
            picks = [width + lane if lane in taken else lane for lane in range(width)]
            result = shuffle(ctx, result, other, picks, element, width)
        return shuffle(ctx, result, result, spot, element, width)
    placed = [s if of == 0 else 0 for s, of in zip(spot, source, strict=True)]
    for k, other in enumerate(registers[1:], 1):
        picks = [width + s if of == k else p for s, of, p in zip(spot, source, placed, strict=True)]
        result, placed = shuffle(ctx, result, other, picks, element, width), list(range(width))
    return result
