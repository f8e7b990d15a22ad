"""Several tensors into one, and one into a larger one: cat, pad, repeat, flip, roll, and the scatters of slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.index import simplify
from ....ir.expr.value import Expr, call, const, is_value
from ....ir.graph.graph import View
from ..context import ImportContext, Scalar, Tensor
from ..math.elementwise import ensure_held
from ..registry import NoConversion, converter
from ..terms import all_of, axes, index_value, linear_offset, select, within
from .views import reshape_indices, slice_start, wrap

# Pieces of a kernel at most. It asks for every element which piece it is of, one piece after the other, where the
# library copies piece by piece.
MOST_PIECES = 64


@converter("aten.cat.default")
def cat(ctx: ImportContext, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    out = ctx.type()
    kind = out.dtype.compute
    dim %= len(out.shape)
    at = axes(len(out.shape))
    # An empty tensor of one dim is skipped by torch, whatever the shape of the others.
    parts = [x for x in tensors if not (x.rank == 1 and x.shape[0] == 0) and x.shape[min(dim, x.rank - 1)] != 0]
    if not parts:
        return ctx.compute(const(0, kind))
    if len(parts) > MOST_PIECES:
        raise NoConversion(f"cat of {len(parts)} pieces, which are found one after the other")
    if (joined := _evenly_read(ctx, parts, dim)) is not None:
        source, indices = joined
        return ctx.compute(ctx.at(source, indices, kind))
    ends: list[sympy.Expr] = []
    end: sympy.Expr = sympy.S.Zero
    for x in parts:
        end = end + x.shape[dim]
        ends.append(end)
    value: Expr | None = None
    for k in reversed(range(len(parts))):
        start = ends[k - 1] if k else sympy.S.Zero
        indices = [*at[:dim], at[dim] - start, *at[dim + 1 :]]
        piece = ctx.load(ctx.local(parts[k], out.device), indices, kind)
        value = piece if value is None else select(all_of(within(at[dim], None, ends[k])), piece, value)
    assert value is not None
    return ctx.compute(value)


def _evenly_read(ctx: ImportContext, parts: Sequence[Tensor], dim: int) -> tuple[Tensor, list[sympy.Expr]] | None:
    """Where pieces are parts of one tensor in even steps (of ``unbind``, ``chunk`` or ``split``), that tensor and its
    indices over the axes of the result: which piece an element is of is computed, not asked for. None where they are
    not."""
    size = parts[0].shape[dim]
    if len(parts) == 1 or not size.is_Integer:
        return None
    if any(x.shape != parts[0].shape or x.device != ctx.type().device for x in parts):
        return None
    made = {n.name: n for n in ctx.nodes if isinstance(n, View)}
    views = [v for x in parts if (v := made.get(x.name)) is not None]
    if len(views) != len(parts) or len({v.source for v in views}) > 1:
        return None
    if any(is_value(i) for v in views for i in v.indices):
        return None
    first = views[0]
    steps = [
        {d: step for d, (a, b) in enumerate(zip(v.indices, w.indices, strict=True)) if (step := sympy.expand(b - a))}
        for v, w in pairwise(views)
    ]
    if len(steps[0]) != 1 or any(s != steps[0] for s in steps):
        return None
    ((moved, step),) = steps[0].items()
    if not step.is_Integer or step < 0:
        return None
    at = first.axes[dim]
    within_piece = {at: ModularIndexing(at, 1, size) if size != 1 else sympy.S.Zero}
    indices = [i.xreplace(within_piece) for i in first.indices]
    indices[moved] = indices[moved] + step * FloorDiv(at, size)
    source = Tensor(first.source, replace(first.type, shape=(), strides=()))
    return source, [simplify(i, dict(zip(first.axes, ctx.type().shape, strict=True))) for i in indices]


@converter("aten.constant_pad_nd.default")
def constant_pad_nd(ctx: ImportContext, x: Tensor, pad: Sequence[Any], value: Scalar = 0) -> Tensor:
    out = ctx.type()
    ensure_held(value, out.dtype)
    indices: list[sympy.Expr] = list(axes(x.rank))
    conditions: list[Expr] = []
    for k in range(len(pad) // 2):
        d = x.rank - 1 - k
        before, after = sympy.sympify(pad[2 * k]), sympy.sympify(pad[2 * k + 1])
        indices[d] = indices[d] - before
        low = None if before.is_nonpositive else 0
        high = None if after.is_nonpositive else x.shape[d]
        conditions += within(indices[d], low, high)
    kind = out.dtype.compute
    inside = ctx.at(x, indices)
    return ctx.compute(select(all_of(conditions), inside, ctx.scalar(value, kind)) if conditions else inside)


def _reflect(index: sympy.Expr, extent: sympy.Expr) -> Expr:
    """The index mirrored at both ends without repeating the border."""
    last = index_value(extent - 1)
    from_end = call("abs", call("sub", call("abs", index_value(index)), last))
    return call("sub", last, from_end)


def _replicate(index: sympy.Expr, extent: sympy.Expr) -> Expr:
    return call("minimum", call("maximum", index_value(index), index_value(0)), index_value(extent - 1))


def _register_border(name: str, border: Any) -> None:
    @converter(*(f"aten.{name}{n}d.default" for n in (1, 2, 3)))
    def pad_border(ctx: ImportContext, x: Tensor, pad: Sequence[Any]) -> Tensor:
        indices: list[Any] = list(axes(x.rank))
        for k in range(len(pad) // 2):
            d = x.rank - 1 - k
            indices[d] = border(indices[d] - pad[2 * k], x.shape[d])
        return ctx.compute(ctx.at(x, indices))


_register_border("reflection_pad", _reflect)
_register_border("replication_pad", _replicate)


@converter("aten.repeat.default")
def repeat(ctx: ImportContext, x: Tensor, repeats: Sequence[Any]) -> Tensor:
    at = axes(len(repeats))[len(repeats) - x.rank :]
    times = repeats[len(repeats) - x.rank :]
    indices = [i if n == 1 else ModularIndexing(i, 1, e) for i, n, e in zip(at, times, x.shape)]
    return ctx.compute(ctx.load(x, indices, x.dtype))


@converter("aten.flip.default")
def flip(ctx: ImportContext, x: Tensor, dims: Sequence[int]) -> Tensor:
    indices: list[sympy.Expr] = list(axes(x.rank))
    for d in {d % x.rank for d in dims if x.rank}:
        indices[d] = x.shape[d] - 1 - indices[d]
    return ctx.compute(ctx.at(x, indices, x.dtype))


@converter("aten.roll.default")
def roll(ctx: ImportContext, x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Tensor:
    if any(not isinstance(s, int) for s in shifts):
        raise NoConversion("roll by a symbolic number")
    if 0 in x.shape:
        return ctx.compute(ctx.at(x, axes(x.rank), x.dtype))
    indices: list[sympy.Expr] = list(axes(x.rank))
    if not dims:
        count = x.type.numel
        if not count.is_Integer or count == 0:
            raise NoConversion("roll of a flattened tensor of symbolic size")
        place = ModularIndexing(linear_offset(x.shape, indices) + -shifts[0] % int(count), 1, count)
        flat = axes(1)[0]
        indices = [i.xreplace({flat: place}) for i in reshape_indices(x.shape, (count,))]
        return ctx.compute(ctx.at(x, indices, x.dtype))
    for shift, dim in zip(shifts, dims):
        d = dim % x.rank
        if not x.shape[d].is_Integer or x.shape[d] == 0:
            raise NoConversion("roll along a symbolic dim")
        start = -shift % int(x.shape[d])
        indices[d] = ModularIndexing(indices[d] + start, 1, x.shape[d]) if start else indices[d]
    return ctx.compute(ctx.at(x, indices, x.dtype))


# --- part of a tensor replaced
# ------------------------------------------------------------------------------------------


def _slice_condition(
    ctx: ImportContext, shape: Sequence[sympy.Expr], dim: int, start: Any, taken: sympy.Expr, step: int
) -> tuple[list[Expr], sympy.Expr]:
    """When position ``i_dim`` lies in a slice of ``taken`` elements, and which of its elements it is."""
    i = axes(len(shape))[dim]
    begin = slice_start(ctx, start, shape[dim], taken, step)
    if step == 1:
        high = None if sympy.expand(begin + taken - shape[dim]) == 0 else begin + taken
        return within(i, None if begin == 0 else begin, high), i - begin
    inside = within(i, None if begin == 0 else begin, begin + taken * step)
    # Left of the slice the difference is negative, but there the first condition has already decided. What is added
    # instead of taking away the beginning is not negative either, whatever the step.
    shift = (-begin) % step if isinstance(step, int) else begin * (step - 1)
    phase = simplify(ModularIndexing(i + shift, 1, step), {}) if begin.is_Integer else None
    if phase is None:
        raise NoConversion("a strided slice that begins at a symbolic position")
    inside.append(call("eq", index_value(phase), index_value(0)))
    return inside, FloorDiv(i - begin, step)


@converter("aten.slice_scatter.default")
def slice_scatter(
    ctx: ImportContext, x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    ctx.own_places()
    dim %= x.rank
    at = axes(x.rank)
    conditions, index = _slice_condition(ctx, x.shape, dim, start, source.shape[dim], step)
    kind = x.dtype.compute
    inside = ctx.load(source, [*at[:dim], index, *at[dim + 1 :]], kind)
    return ctx.compute(select(all_of(conditions), inside, ctx.load(x, at, kind)))


@converter("aten.slice_backward.default")
def slice_backward(
    ctx: ImportContext, grad: Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: int
) -> Tensor:
    out = ctx.type()
    dim %= len(out.shape)
    at = axes(len(out.shape))
    conditions, index = _slice_condition(ctx, out.shape, dim, start, grad.shape[dim], step)
    inside = ctx.load(grad, [*at[:dim], index, *at[dim + 1 :]])
    return ctx.compute(select(all_of(conditions), inside, const(0, inside.dtype)))


def _at_position(ctx: ImportContext, shape: Sequence[sympy.Expr], dim: int, index: Any) -> Expr:
    return call("eq", index_value(axes(len(shape))[dim]), index_value(wrap(ctx, index, shape[dim])))


@converter("aten.select_scatter.default")
def select_scatter(ctx: ImportContext, x: Tensor, source: Tensor, dim: int, index: Any) -> Tensor:
    ctx.own_places()
    dim %= x.rank
    at = axes(x.rank)
    kind = x.dtype.compute
    inside = ctx.load(source, at[:dim] + at[dim + 1 :], kind)
    return ctx.compute(select(_at_position(ctx, x.shape, dim, index), inside, ctx.load(x, at, kind)))


@converter("aten.select_backward.default")
def select_backward(ctx: ImportContext, grad: Tensor, sizes: Sequence[Any], dim: int, index: Any) -> Tensor:
    out = ctx.type()
    dim %= len(out.shape)
    at = axes(len(out.shape))
    inside = ctx.load(grad, at[:dim] + at[dim + 1 :])
    return ctx.compute(select(_at_position(ctx, out.shape, dim, index), inside, const(0, inside.dtype)))


def _on_diagonal(
    shape: Sequence[sympy.Expr], part: Sequence[sympy.Expr], offset: int, dim1: int, dim2: int
) -> tuple[Expr, list[sympy.Expr]]:
    """Whether a place is on a diagonal of ``shape``, and its place in the diagonals, which have the shape ``part``."""
    rank = len(shape)
    a, b, at = dim1 % rank, dim2 % rank, axes(rank)
    along = at[a] - max(-offset, 0)
    on_diagonal = call("eq", index_value(at[b]), index_value(at[a] + offset))
    where = [*(i for d, i in enumerate(at) if d not in (a, b)), along]
    return all_of([on_diagonal, *within(along, 0, part[-1])]), where


@converter("aten.diagonal_backward.default")
def diagonal_backward(
    ctx: ImportContext, grad: Tensor, sizes: Sequence[Any], offset: int, dim1: int, dim2: int
) -> Tensor:
    condition, where = _on_diagonal(ctx.type().shape, grad.shape, offset, dim1, dim2)
    inside = ctx.load(grad, where)
    return ctx.compute(select(condition, inside, const(0, inside.dtype)))


@converter("aten.diagonal_scatter.default")
def diagonal_scatter(
    ctx: ImportContext, x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    ctx.own_places()
    condition, where = _on_diagonal(x.shape, source.shape, offset, dim1, dim2)
    kind = x.dtype.compute
    return ctx.compute(select(condition, ctx.load(source, where, kind), ctx.load(x, axes(x.rank), kind)))
