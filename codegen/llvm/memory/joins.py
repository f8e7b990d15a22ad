"""Joins of many equal parts: which part a position is in tells an address out of a table.

A concat is a chain of choices, one a part. Where some parts in a row are tensors of one size, a masked load of each
would be work and text for every part at every position. All lanes of a vector, and all copies of an unrolled loop, are
in one part where vectors end at the ends of parts. So the part's number is a quotient, and its tensor is read at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Load, Select, is_value
from ....ir.nest.loops import Block, Loop, LoopKind
from ..text.builder import Val
from ..text.context import Context
from ..text.types import memory_type
from .access import in_range, load
from .guards import difference
from .index import in_loops, scalar_index, split_linear

I64 = DType.INT64
# Fewer parts are chosen between as quickly.
LEAST = 4
# No tensor is so long: an index into a part needs no check, for it is within the part by construction.
_LONG = sympy.Integer(1 << 48)


@dataclass(frozen=True, slots=True)
class EqualParts:
    """Parts of equal tensors, from ``loads[0]`` on, each ``width`` long in dimension ``dim``.

    ``position`` is the place in the first part, in axes of the block; ``last`` chooses between the last part and what
    follows, and is None where nothing does. ``selects`` are all choices of the run.
    """

    loads: tuple[Load, ...]
    dim: int
    width: int
    position: sympy.Expr
    selects: tuple[Select, ...]
    last: Select | None


def run_of(ctx: Context, expr: Select) -> EqualParts | None:
    """The run of equal parts that a choice begins, where there are enough of them."""
    known = ctx.runs.get(id(expr))
    if known is None:
        known = ctx.runs[id(expr)] = (expr, _run_of(ctx, expr))
    return known[1]


def _run_of(ctx: Context, expr: Select) -> EqualParts | None:
    selects, parts = [], []
    at: Expr = expr
    while isinstance(at, Select) and isinstance(at.if_true, Load):
        selects.append(at)
        parts.append(at.if_true)
        at = at.if_false
    if len(parts) + 1 < LEAST or not isinstance(parts[0], Load) or not isinstance(parts[1], Load):
        return None
    step = _step(ctx, parts[0], parts[1])
    bound = difference(selects[0].condition)
    if step is None or bound is None:
        return None
    dim, width = step
    position = parts[0].indices[dim]
    assert isinstance(position, sympy.Expr)
    if sympy.expand(bound + position) != width:
        return None
    count = 1
    while count < len(parts) and _follows(ctx, parts[count - 1], parts[count], step):
        below = difference(selects[count].condition)
        if below is None or sympy.expand(below + position) != width * (count + 1):
            break
        count += 1
    whole = count == len(parts) and isinstance(at, Load) and _follows(ctx, parts[-1], at, step)
    loads = (*parts[:count], at) if whole and isinstance(at, Load) else tuple(parts[:count])
    if len(loads) < LEAST:
        return None
    return EqualParts(loads, dim, width, position, tuple(selects[:count]), None if whole else selects[count - 1])


def _step(ctx: Context, first: Load, second: Load) -> tuple[int, int] | None:
    """In which dimension the index of a part differs from that of the one before, and by how much."""
    differing = [k for k, (a, b) in enumerate(zip(first.indices, second.indices, strict=False)) if a != b]
    if len(differing) != 1:
        return None
    (dim,) = differing
    extent = ctx.places[first.buffer].shape[dim]
    if not extent.is_Integer or extent < 1:
        return None
    step = dim, int(extent)
    return step if _follows(ctx, first, second, step) else None


def _follows(ctx: Context, first: Load, second: Load, step: tuple[int, int]) -> bool:
    """Whether a part is read as the one before it is, ``width`` elements on in dimension ``dim``."""
    dim, width = step
    if len(first.indices) != len(second.indices) or any(map(is_value, (*first.indices, *second.indices))):
        return False
    a, b = ctx.places[first.buffer], ctx.places[second.buffer]
    if (
        not (a.fixed and b.fixed)
        or a.shift
        or b.shift
        or (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides)
    ):
        return False
    same = all(x == y for k, (x, y) in enumerate(zip(first.indices, second.indices, strict=True)) if k != dim)
    return same and sympy.expand(first.indices[dim] - second.indices[dim] - width) == 0  # type: ignore[operator]


# --- where all lanes are in one part ----------------------------------------------------------------------------------


def runs_within(ctx: Context, block: Block, inner: Iterable[Loop], select: Select) -> tuple[Select, ...]:
    """The choices, from one on, that a block inside some loops makes by a table; none where its lanes may be in two
    parts."""
    run = run_of(ctx, select)
    if run is None:
        return ()
    axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    spans = _spans(ctx)
    spans |= {
        lp.var: int(lp.extent)
        for lp in inner
        if lp.kind in (LoopKind.VECTORIZED, LoopKind.UNROLLED) and lp.extent.is_Integer
    }
    parted = _parted(sympy.expand(run.position.xreplace(axes)), spans, run.width)
    return () if parted is None else run.selects if run.last is None else run.selects[:-1]


def _spans(ctx: Context) -> dict[sympy.Symbol, int]:
    return ctx.unrolled | ({ctx.vector[0]: ctx.vector[1]} if ctx.vector else {})


def _parted(
    position: sympy.Expr, spans: Mapping[sympy.Symbol, int], width: int
) -> tuple[sympy.Expr, sympy.Expr, int] | None:
    """A position as what is the same in all lanes and copies, what they differ by, and of which number the first is a
    multiple; None where they may be in two parts."""
    base, apart, reach = position, sympy.S.Zero, 0
    for var, extent in spans.items():
        parts = split_linear(base, var)
        if parts is None or not parts[1].is_Integer or parts[1] < 0:
            return None
        base, step = parts
        apart += step * var
        reach += int(step) * (extent - 1)
    multiple = width
    for term in sympy.Add.make_args(base):
        factor, rest = term.as_coeff_Mul()
        if not factor.is_Integer or not all(isinstance(f, _WHOLE) for f in sympy.Mul.make_args(rest)):
            return None
        multiple = math.gcd(multiple, int(factor))
    return (base, apart, multiple) if reach < multiple else None


# What is a whole number whatever it is made of.
_WHOLE = (sympy.Symbol, sympy.Integer, FloorDiv, ModularIndexing)


def joined(ctx: Context, run: EqualParts) -> Val | None:
    """The element of whichever part the position is in; of the first or last part where it is before or behind all of
    them. None where lanes may be in two parts."""
    parted = _parted(in_loops(ctx, run.position), _spans(ctx), run.width)
    if parted is None:
        return None
    b, first = ctx.b, run.loads[0]
    place = ctx.places[first.buffer]
    base, apart, multiple = parted
    low = b.intrinsic("smax", scalar_index(ctx, base), b.const(0, I64))
    at = b.intrinsic("smin", low, b.const(run.width * len(run.loads) - multiple, I64))
    number = b.binary("udiv", at, b.const(run.width, I64))
    within = b.binary("sub nsw", at, b.binary("mul nsw", number, b.const(run.width, I64)))
    offset = b.binary("mul nsw", within, scalar_index(ctx, in_loops(ctx, place.strides[run.dim])))
    element = memory_type(place.dtype)
    pointer = b.op(f"getelementptr inbounds {element}, ptr {_part(ctx, run, number)}, i64 {offset.name}")
    name = f"{first.buffer}.parts"
    shape = tuple(_LONG if k == run.dim else extent for k, extent in enumerate(place.shape))
    ctx.places[name] = replace(place, pointer=pointer, shape=shape)
    indices = (*first.indices[: run.dim], apart, *first.indices[run.dim + 1 :])
    mask = ctx.mask
    # Whatever is chosen, what is read is inside of a part, as far as the other dimensions are.
    if in_range(ctx, place, (*first.indices[: run.dim], sympy.S.Zero, *first.indices[run.dim + 1 :])):
        ctx.mask = ctx.block_mask
    try:
        return load(ctx, name, indices, [None] * len(indices))
    finally:
        ctx.mask = mask
        del ctx.places[name]


def _part(ctx: Context, run: EqualParts, number: Val) -> str:
    """The address of a part, by its number."""
    b = ctx.b
    pointers = tuple(ctx.places[e.buffer].pointer for e in run.loads)
    kind = f"[{len(pointers)} x ptr]"
    if pointers not in ctx.tables:
        ctx.tables[pointers] = b.alloca(kind, align=8)
    table = ctx.tables[pointers]
    lines = []
    for k, pointer in enumerate(pointers):
        spot = b.fresh("part")
        lines.append(f"{spot} = getelementptr inbounds {kind}, ptr {table}, i64 0, i64 {k}")
        lines.append(f"store ptr {pointer}, ptr {spot}, align 8")
    b.note(f"parts in {table}", lines, pointers)
    spot = b.op(f"getelementptr inbounds {kind}, ptr {table}, i64 0, i64 {number.name}")
    return b.load(f"load ptr, ptr {spot}, align 8", table, None, movable=True)
