"""Ops that eager answers without a copy: index maps over the same memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
from torch import fx
from torch._ops import OpOverload
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.index import simplify
from ....ir.expr.value import Select
from ....ir.nest.loops import contiguous_strides
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..sizes import integer
from ..terms import all_of, axes, unwritten, within

Shape = tuple[sympy.Expr, ...]


def _view(ctx: ImportContext, x: Tensor, indices: Sequence[sympy.Expr], k: int | None = None) -> Tensor:
    """The current node's (``k``-th) result as a view of ``x``; where it lies in memory is read from the fake
    tensors.
    """
    out = ctx.val if k is None else ctx.val[k]
    source = ctx.node.args[0].meta["val"]  # type: ignore[union-attr]
    offset = ctx.sizes.size(out.storage_offset()) - ctx.sizes.size(source.storage_offset())
    return ctx.view(x, indices, ctx.type(k), ctx.name(k), offset)


# --- reshape
# ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def reshape_indices(source: Shape, result: Shape) -> Shape:
    """Where element ``i0, …`` of a reshape to ``result`` lies in ``source``: one index per source dim.

    Dims are matched in groups of equal size, so that only what is really split or merged pays with divisions.
    """
    at = axes(len(result))
    indices: list[sympy.Expr] = []
    s = r = 0
    while s < len(source) or r < len(result):
        if s < len(source) and source[s] is sympy.S.One:
            indices.append(sympy.S.Zero)
            s += 1
            continue
        if r < len(result) and result[r] is sympy.S.One:
            r += 1
            continue
        s_end, r_end = _group(source, result, s, r)
        indices.extend(_regroup(source[s:s_end], result[r:r_end], at[r:r_end]))
        s, r = s_end, r_end
    return tuple(indices)


def _group(source: Shape, result: Shape, s: int, r: int) -> tuple[int, int]:
    """Ends of the shortest runs of dims, from ``s`` and ``r``, that hold equally many elements; else all that is
    left.
    """
    s_end, r_end = min(s + 1, len(source)), min(r + 1, len(result))
    while s_end < len(source) or r_end < len(result):
        a, b = _product(source[s:s_end]), _product(result[r:r_end])
        if a == b and not a.is_zero:
            return s_end, r_end
        if r_end == len(result):
            s_end += 1
        elif s_end == len(source):
            r_end += 1
        elif a.is_Integer and b.is_Integer:
            s_end, r_end = (s_end + 1, r_end) if a < b else (s_end, r_end + 1)
        else:
            # With symbols neither side is known to be the smaller one: try the pairs of ends in order.
            return _symbolic_group(source, result, s, r)
    return len(source), len(result)


def _symbolic_group(source: Shape, result: Shape, s: int, r: int) -> tuple[int, int]:
    for s_end in range(s + 1, len(source) + 1):
        a = _product(source[s:s_end])
        for r_end in range(r + 1, len(result) + 1):
            if a == _product(result[r:r_end]):
                return s_end, r_end
    return len(source), len(result)


def _product(extents: Shape) -> sympy.Expr:
    if len(extents) == 1:
        return extents[0]
    product = sympy.Mul(*extents)
    return product if product.is_Integer or not product.has(sympy.Add) else sympy.expand(product)


def _regroup(source: Shape, result: Shape, at: Shape) -> list[sympy.Expr]:
    if len(source) == 1 and len(result) == 1:
        return [at[0]]
    linear: sympy.Expr = sympy.S.Zero
    step: sympy.Expr = sympy.S.One
    for i, extent in zip(reversed(at), reversed(result)):
        linear = linear + i * step if extent is not sympy.S.One else linear
        step = step * _divisor(extent)
    indices: list[sympy.Expr] = []
    step = sympy.S.One
    for k, extent in enumerate(reversed(source)):
        last = k == len(source) - 1
        index = (
            (FloorDiv(linear, step) if last else ModularIndexing(linear, step, _divisor(extent))) if source else linear
        )
        if len(result) > 1 and len(source) > 1:
            index = simplify(index, dict(zip(at, result)))
        indices.append(sympy.S.Zero if extent is sympy.S.One else index)
        step = step * _divisor(extent)
    return indices[::-1]


def _divisor(extent: sympy.Expr) -> sympy.Expr:
    """An extent to divide by: a dimension of no elements is never read."""
    return extent if extent != 0 else sympy.S.One


@converter("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")
def view(ctx: ImportContext, x: Tensor, *_: Any) -> Tensor:
    return _view(ctx, x, reshape_indices(x.shape, ctx.type().shape))


@converter("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(ctx: ImportContext, x: Tensor, *_: Any) -> Tensor:
    return _view(ctx, x, reshape_indices(x.shape, ctx.type().shape))


@converter("aten.unsqueeze.default")
def unsqueeze(ctx: ImportContext, x: Tensor, dim: int) -> Tensor:
    at = axes(x.rank + 1)
    dim %= x.rank + 1
    return _view(ctx, x, at[:dim] + at[dim + 1 :])


@converter("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default", "prims.view_of.default")
def alias(ctx: ImportContext, x: Tensor) -> Tensor:
    return _view(ctx, x, axes(x.rank))


# --- permutations
# -------------------------------------------------------------------------------------------------------


def _permute(ctx: ImportContext, x: Tensor, order: Sequence[int]) -> Tensor:
    at = axes(x.rank)
    indices: list[sympy.Expr] = [sympy.S.Zero] * x.rank
    for k, d in enumerate(order):
        indices[d] = at[k]
    return _view(ctx, x, indices)


@converter("aten.permute.default")
def permute(ctx: ImportContext, x: Tensor, dims: Sequence[int]) -> Tensor:
    return _permute(ctx, x, [d % x.rank for d in dims])


@converter("aten.t.default")
def t(ctx: ImportContext, x: Tensor) -> Tensor:
    return _permute(ctx, x, list(range(x.rank))[::-1])


@converter("aten.transpose.int")
def transpose(ctx: ImportContext, x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(x.rank))
    if x.rank:
        order[a % x.rank], order[b % x.rank] = order[b % x.rank], order[a % x.rank]
    return _permute(ctx, x, order)


@converter("aten.expand.default")
def expand(ctx: ImportContext, x: Tensor, sizes: Sequence[Any], implicit: bool = False) -> Tensor:
    at = axes(len(sizes))[len(sizes) - x.rank :]
    return _view(ctx, x, [sympy.S.Zero if e is sympy.S.One else i for i, e in zip(at, x.shape)])


# --- parts
# --------------------------------------------------------------------------------------------------------------


def clamp_index(ctx: ImportContext, index: Any, extent: sympy.Expr, default: sympy.Expr) -> sympy.Expr:
    """An end of a slice as torch reads it: None, negative and too large ones included, but for symbolic ones beyond the
    extent. Raises NoConversion."""
    if index is None:
        return default
    index = sympy.sympify(index)
    if index.is_Integer and int(index) >= (1 << 62):
        return extent
    if index.is_Integer and extent.is_Integer:
        i, n = int(index), int(extent)
        return integer(min(max(i + n if i < 0 else i, 0), n))
    counted = ctx.sizes.is_negative(index)
    if counted is None:
        raise NoConversion("a place of unknown sign")
    if not counted:
        return index
    cut = ctx.sizes.is_negative(extent + index)
    if cut is None:
        raise NoConversion("a place that may lie before the first element")
    return sympy.S.Zero if cut else extent + index


def slice_start(ctx: ImportContext, index: Any, extent: sympy.Expr, taken: sympy.Expr, step: int) -> sympy.Expr:
    """Where a slice of ``taken`` elements begins."""
    if taken == extent and step == 1:
        return sympy.S.Zero
    start = clamp_index(ctx, index, extent, sympy.S.Zero)
    # A symbolic start may lie beyond the extent; then nothing is taken and any start is right.
    return start


@converter("aten.slice.Tensor")
def slice_(ctx: ImportContext, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    dim %= x.rank
    indices: list[sympy.Expr] = list(axes(x.rank))
    begin = slice_start(ctx, start, x.shape[dim], ctx.type().shape[dim], step)
    indices[dim] = begin + indices[dim] * step
    return _view(ctx, x, indices)


def wrap(ctx: ImportContext, index: Any, extent: sympy.Expr) -> sympy.Expr:
    """A position that may count from the end. Raises NoConversion."""
    index = sympy.sympify(index)
    counted = ctx.sizes.is_negative(index)
    if counted is None:
        raise NoConversion("an index of unknown sign")
    return index + extent if counted else index


@converter("aten.select.int")
def select_int(ctx: ImportContext, x: Tensor, dim: int, index: Any) -> Tensor:
    dim %= x.rank
    at = axes(x.rank - 1)
    return _view(ctx, x, [*at[:dim], wrap(ctx, index, x.shape[dim]), *at[dim:]])


def _parts(ctx: ImportContext, x: Tensor, dim: int, sizes: Sequence[Any]) -> tuple[Tensor, ...]:
    dim = dim % x.rank
    used = ctx.used()
    results: list[Any] = []
    start: sympy.Expr = sympy.S.Zero
    for k, size in enumerate(sizes):
        indices: list[sympy.Expr] = list(axes(x.rank))
        indices[dim] = indices[dim] + start
        results.append(_view(ctx, x, indices, k) if k in used else None)
        start = start + size
    return tuple(results)


@converter("aten.split_with_sizes.default")
def split_with_sizes(ctx: ImportContext, x: Tensor, sizes: Sequence[Any], dim: int = 0) -> tuple[Tensor, ...]:
    return _parts(ctx, x, dim, sizes)


@converter("aten.split.Tensor", "aten.chunk.default")
def split(ctx: ImportContext, x: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    return _parts(ctx, x, dim, [ctx.type(k).shape[dim] for k in range(len(ctx.val))])


@converter("aten.unbind.int")
def unbind(ctx: ImportContext, x: Tensor, dim: int = 0) -> tuple[Any, ...]:
    dim %= x.rank
    at = axes(x.rank - 1)
    used = ctx.used()
    return tuple(
        _view(ctx, x, [*at[:dim], integer(k), *at[dim:]], k) if k in used else None for k in range(len(ctx.val))
    )


@converter("aten.diagonal.default")
def diagonal(ctx: ImportContext, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    a, b = dim1 % x.rank, dim2 % x.rank
    at = axes(x.rank - 1)
    along = at[-1]
    rest = iter(at[:-1])
    indices = [
        along + max(-offset, 0) if d == a else along + max(offset, 0) if d == b else next(rest) for d in range(x.rank)
    ]
    return _view(ctx, x, indices)


@converter("aten.unfold.default")
def unfold(ctx: ImportContext, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    if not x.rank:
        if size != 1:
            raise NoConversion("unfold of a scalar tensor into nothing")
        return _view(ctx, x, ())
    at = axes(x.rank + 1)
    dim %= x.rank
    return _view(ctx, x, [*at[:dim], at[dim] * step + at[-1], *at[dim + 1 : -1]])


def _dense_order(x: Tensor) -> list[int] | None:
    """The dims of a tensor that fills its memory, from the slowest to the fastest, or None where it has gaps."""
    if any(not e.is_Integer or not s.is_Integer for e, s in zip(x.type.shape, x.type.strides)):
        return None
    order = sorted((d for d in range(x.rank) if x.shape[d] != 1), key=lambda d: -int(x.type.strides[d]))
    step = 1
    for d in reversed(order):
        if x.type.strides[d] != step:
            return None
        step *= int(x.shape[d])
    return order


@converter("aten.as_strided.default")
def as_strided(ctx: ImportContext, x: Tensor, size: Any, stride: Any, offset: Any = None) -> Tensor:
    kind = ctx.type()
    begin = strided_begin(ctx, offset)
    if kind == x.type and begin == 0:
        return _view(ctx, x, axes(x.rank))
    return _view(ctx, x, strided_places(x, kind.shape, kind.strides, begin, axes(len(kind.shape))))


def strided_begin(ctx: ImportContext, offset: Any) -> sympy.Expr:
    """How many elements behind the first of the node's operand a place in its storage is. Raises NoConversion."""
    if offset is None:
        return sympy.S.Zero
    source = ctx.node.args[0]
    assert isinstance(source, fx.Node)
    if view_chain(source)[1].op == "placeholder":
        raise NoConversion("as_strided at a place in the storage of an argument, whose own place no guard tells")
    return ctx.sizes.size(offset) - ctx.sizes.size(source.meta["val"].storage_offset())


def view_chain(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The views that a node is, the first of them first, and what they are views of: one tensor, which may be one of
    several that an op gives."""
    views = []
    while _is_view(node.args[0] if node.target is operator.getitem else node):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return views[::-1], node


def _is_view(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.target.is_view


def strided_places(x: Tensor, shape: Shape, strides: Shape, begin: sympy.Expr, at: Shape) -> list[sympy.Expr]:
    """Where the elements ``at`` of other strides over the memory of ``x``, from its ``begin``-th element on, are in
    ``x``. Raises NoConversion."""
    order = _dense_order(x)
    if order is None or not begin.is_Integer or any(not n.is_Integer for n in (*shape, *strides)):
        raise NoConversion("as_strided of memory with gaps, or of symbolic sizes")
    last = begin + sum((n - 1) * s for n, s in zip(shape, strides))
    if 0 in shape or begin < 0 or last >= x.type.numel:
        raise NoConversion("as_strided beyond the memory of its operand")
    place = sympy.Add(begin, *(i * s for i, n, s in zip(at, shape, strides) if n != 1))
    ranges = dict(zip(at, shape))
    indices: list[sympy.Expr] = [sympy.S.Zero] * x.rank
    for k, d in enumerate(order):
        step = x.type.strides[d]
        index = FloorDiv(place, step) if k == 0 else ModularIndexing(place, step, x.shape[d])
        indices[d] = simplify(index, ranges)
    return indices


@converter("aten.resize.default")
def resize(ctx: ImportContext, x: Tensor, size: Shape, *, memory_format: Any = None) -> Tensor:
    """As many elements as there are, in the order of memory, and behind them what nothing is written to."""
    out = ctx.type()
    lengths = (*x.shape, *x.type.strides, *out.shape, *out.strides)
    if any(not n.is_Integer for n in lengths) or x.type.strides != contiguous_strides(x.shape):
        raise NoConversion("a resize of what is not contiguous, or of symbolic sizes")
    at = axes(len(out.shape))
    place = sympy.Add(*(i * s for i, s in zip(at, out.strides, strict=True)))
    ranges = dict(zip(at, out.shape, strict=True))
    indices = []
    for d, n in enumerate(x.shape):
        step = sympy.Mul(*x.shape[d + 1 :])
        digit = ModularIndexing(place, step, n) if d else FloorDiv(place, step)
        indices.append(sympy.S.Zero if n == 1 else simplify(digit, ranges))
    value = ctx.at(x, indices, x.dtype) if x.type.numel != 0 else unwritten(x.dtype)
    if out.numel > x.type.numel:
        value = Select(all_of(within(place, None, x.type.numel)), value, unwritten(x.dtype))
    return ctx.compute(value)
