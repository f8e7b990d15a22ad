"""Scatters: writes at places that data decide. Those that are a choice at each place of the result are written as one.

Places that are out of range are an error where the kernel runs, as in eager; only ``index_put`` and ``put`` count from
the end. What is combined in a half type is combined in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ALL, ANY, MAX, MIN, PRODUCT, SUM, Monoid
from ....ir.expr.value import Expr, Index, IndexValue, Load, Select, call, cast, const, is_value, symbol
from ....ir.graph.graph import Scatter, TensorType
from ....ir.target import updates_in_order
from ..context import ImportContext, Scalar, Tensor
from ..math.elementwise import add, ensure_held
from ..registry import NoConversion, converter
from ..terms import axes, convert, index_value
from .gather import advanced_index, bounded, wrapped
from .sorted_rows import is_cheaper, listed, may_sort, sum_by_segments
from .views import strided_begin, strided_places

_MONOIDS = {
    "sum": SUM, "add": SUM, "mean": SUM, "prod": PRODUCT, "multiply": PRODUCT, "amax": MAX, "amin": MIN,
}  # fmt: skip
# Results of a narrow type are combined in a wider copy while they have at most so many times the source's elements, or
# so few that the copy takes less than a call of a library.
MOST_WIDE, FEW_WIDE = 4, 4096


@dataclass(frozen=True, slots=True)
class Source:
    """What is scattered: a value for each point of ``shape``, over the axes ``r0, r1, …``, and where it goes."""

    shape: tuple[sympy.Expr, ...]
    places: tuple[Index, ...]
    value: Expr


def source_axes(rank: int) -> tuple[sympy.Symbol, ...]:
    """The axis symbols of a source of so many dimensions."""
    return tuple(symbol(f"r{k}") for k in range(rank))


def scatter(ctx: ImportContext, monoid: Monoid | None, initial: Expr, source: Source) -> Tensor:
    """The current node's result: ``initial``, over ``i0, …``, with the source scattered over it."""
    out = ctx.type()
    if out.dtype is DType.BOOL and monoid is not None:
        monoid = _of_bools(monoid)
    if may_sort(ctx, monoid, out) and sympy.S.Zero not in (*out.shape, *source.shape):
        rows = listed(source.shape, source.places, out)
        fixed = torch.are_deterministic_algorithms_enabled()
        if rows is not None and (fixed or is_cheaper(ctx, initial, source.shape, rows, out)):
            return sum_by_segments(ctx, initial, source.shape, source.places, source.value, rows, out)
    kind = _checked(out, monoid)
    if kind is out.dtype:
        return _node(ctx, monoid, initial, source, out, ctx.name())
    if ctx.numerics == "eager" and out.dtype.is_half and monoid in (SUM, PRODUCT):
        raise NoConversion("scatter: eager rounds what is combined each time")
    copied = ctx.sizes.hint(out.numel)
    if (
        ctx.calls_libraries(out.device)
        and copied > FEW_WIDE
        and copied > MOST_WIDE * ctx.sizes.hint(sympy.Mul(*source.shape))
    ):
        raise NoConversion(f"scatter: a {kind.value} copy of the whole result would cost more than it saves")
    wide = _node(ctx, monoid, initial, source, ctx.contiguous(out.shape, kind, out.device), ctx.fresh("wide"))
    return ctx.compute(ctx.at(wide, axes(wide.rank)))


def _checked(out: TensorType, monoid: Monoid | None) -> DType:
    """The type in which a scatter combines. Raises NoConversion for what has no kernel."""
    if out.dtype.is_complex:
        raise NoConversion("complex numbers")
    kind = out.dtype if monoid is None else out.dtype.compute
    return kind if monoid is None or updates_in_order(out.device) else _atomic(kind, monoid)


def _of_bools(monoid: Monoid) -> Monoid:
    """What a sum or a maximum of bools is, and a product or a minimum."""
    return ANY if monoid in (SUM, MAX) else ALL if monoid in (PRODUCT, MIN) else monoid


def _atomic(kind: DType, monoid: Monoid) -> DType:
    """The type in which a GPU combines in memory, by atomic operations. Raises NoConversion where there are none."""
    if monoid not in (SUM, MAX, MIN) or kind is DType.BOOL:
        raise NoConversion(f"scatter: no atomic {monoid.name} of {kind.value}")
    if kind.is_float and monoid is SUM and torch.are_deterministic_algorithms_enabled():
        raise NoConversion("scatter: atomic sums are rounded in an order that differs from run to run")
    return kind if kind.bits >= 32 else DType.INT32


def _node(
    ctx: ImportContext, monoid: Monoid | None, initial: Expr, source: Source, kind: TensorType, name: str
) -> Tensor:
    if not kind.shape:
        row = ctx.contiguous((sympy.S.One,), kind.dtype, kind.device)
        made = _node(ctx, monoid, initial, source, row, ctx.fresh("row"))
        return ctx.compute(ctx.at(made, (sympy.S.Zero,)), kind, name)
    places = [p if is_value(p) else IndexValue(sympy.sympify(p), DType.INT64) for p in source.places]
    values = (convert(initial, kind.dtype), convert(source.value, kind.dtype), *places)
    rank = len(source.shape)
    ctx.nodes.append(
        Scatter(name, kind, axes(len(kind.shape)), source_axes(rank), source.shape, monoid, values, ctx.origins)
    )
    return Tensor(name, kind)


def scattered(
    ctx: ImportContext, monoid: Monoid | None, initial: Expr, source: Source, like: TensorType, suffix: str
) -> Load:
    """The element ``i0, …`` of a scatter that no user of the node sees. Raises NoConversion for what has no kernel."""
    kind = ctx.contiguous(like.shape, initial.dtype, like.device)
    _checked(kind, monoid)
    made = _node(ctx, monoid, initial, source, kind, ctx.fresh(suffix))
    return Load(made.name, axes(made.rank), kind.dtype)


def reduced(ctx: ImportContext, x: Tensor, source: Source, how: str, include_self: bool) -> Tensor:
    """``source`` combined into ``x`` by the name that ATen gives a reduction."""
    monoid, out = _MONOIDS[how], ctx.type()
    if out.dtype is DType.BOOL:
        if how == "mean":
            raise NoConversion("the mean of bools")
        monoid = _of_bools(monoid)
    kind = _checked(out, monoid)
    at = axes(x.rank)
    initial: Expr = ctx.at(x, at, kind)
    if not include_self:
        (neutral,) = monoid.identity((kind,))
        emptied = Source(source.shape, source.places, neutral)
        initial = scattered(ctx, None, initial, emptied, out, "empty")
    if how != "mean":
        return scatter(ctx, monoid, initial, source)
    total = scattered(ctx, SUM, initial, source, out, "sum")
    ones = Source(source.shape, source.places, const(1, kind))
    found = scattered(ctx, SUM, const(int(include_self), kind), ones, out, "count")
    count = call("maximum", found, const(1, kind))
    return ctx.compute(call("floordiv" if kind.is_int else "div", total, count))


# --- one index for each element ---------------------------------------------------------------------------------------


def _into_number(ctx: ImportContext, index: Tensor, value: Expr | Tensor) -> Source:
    """What is scattered into a number: as into the only element of a row."""
    at = source_axes(1)
    place = cast(ctx.at(index, at[: index.rank]), DType.INT64)
    if isinstance(value, Tensor):
        value = ctx.at(value, at[: value.rank], value.dtype)
    return Source((index.shape[0] if index.rank else sympy.S.One,), (place,), value)


def _along(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Expr | Tensor) -> Source:
    """What ``scatter`` scatters: the points of the index, each at the place that it names along ``dim``."""
    if x.rank == 0:
        return _into_number(ctx, index, value)
    if index.rank != x.rank:
        raise NoConversion("scatter by an index of another rank")
    at = source_axes(index.rank)
    # Along a dimension of stride zero all points have one place: whole rows are scattered.
    named = [sympy.S.Zero if stride == 0 else i for i, stride in zip(at, index.type.strides, strict=True)]
    place = cast(ctx.at(index, named), DType.INT64)
    if isinstance(value, Tensor):
        value = ctx.at(value, at, value.dtype)
    return Source(index.shape, (*at[:dim], place, *at[dim + 1 :]), value)


def _hits(ctx: ImportContext, x: Tensor, dim: int, index: Tensor) -> tuple[Expr, list[sympy.Expr]] | None:
    """Where the one index of each row points, and the place of that index; None for several a row."""
    if x.rank == 0 or index.rank != x.rank or index.shape[dim] != 1:
        return None
    if any(index.shape[d] != x.shape[d] for d in range(x.rank) if d != dim):
        return None
    at = axes(x.rank)
    place = [sympy.S.Zero if d == dim else i for d, i in enumerate(at)]
    label = bounded(ctx.at(index, place), dim, x.shape[dim])
    return call("eq", label, index_value(at[dim])), place


@converter("aten.scatter.value")
def scatter_value(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Scalar) -> Tensor:
    ensure_held(value, x.dtype)
    dim = dim % x.rank if x.rank else 0
    hits = _hits(ctx, x, dim, index)
    if hits is not None:
        kind = x.dtype.compute
        return ctx.compute(Select(hits[0], ctx.scalar(value, kind), ctx.at(x, axes(x.rank))))
    source = _along(ctx, x, dim, index, ctx.scalar(value, x.dtype))
    return scatter(ctx, None, ctx.at(x, axes(x.rank), x.dtype), source)


@converter("aten.scatter.src", "aten.scatter_add.default")
def scatter_source(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    dim = dim % x.rank if x.rank else 0
    adds = "add" in ctx.node.target._opname  # type: ignore[union-attr]
    hits = _hits(ctx, x, dim, index)
    if hits is not None:
        old, new = ctx.at(x, axes(x.rank)), ctx.at(source, hits[1])
        return ctx.compute(Select(hits[0], add(old, new) if adds else new, old))
    at = axes(x.rank)
    return scatter(ctx, SUM if adds else None, ctx.at(x, at, x.dtype), _along(ctx, x, dim, index, source))


@converter("aten.scatter.reduce")
def scatter_by_name(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor, *, reduce: str) -> Tensor:
    return reduced(ctx, x, _along(ctx, x, dim % max(x.rank, 1), index, source), reduce, include_self=True)


@converter("aten.scatter.value_reduce")
def scatter_value_by_name(
    ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Scalar, *, reduce: str
) -> Tensor:
    source = _along(ctx, x, dim % max(x.rank, 1), index, ctx.scalar(value, x.dtype.compute))
    return reduced(ctx, x, source, reduce, include_self=True)


@converter("aten.scatter_reduce.two")
def scatter_reduce(
    ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return reduced(ctx, x, _along(ctx, x, dim % max(x.rank, 1), index, source), reduce, include_self)


# --- an index for each slice ------------------------------------------------------------------------------------------


def _slices(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Expr | Tensor) -> Source:
    """What ``index_add`` scatters: whole slices, each at the place that its index names along ``dim``."""
    if x.rank == 0:
        return _into_number(ctx, index, value)
    dim %= x.rank
    count = index.shape[0] if index.rank else sympy.S.One
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    at = source_axes(x.rank)
    place = cast(ctx.at(index, (at[dim],) if index.rank else ()), DType.INT64)
    if isinstance(value, Tensor):
        if value.rank != x.rank:
            raise NoConversion("slices without their dimension")
        if not all(map(_is_same, value.shape, shape)):
            raise NoConversion("slices that may be of other sizes than where they go, which is an error")
        value = ctx.at(value, at, value.dtype)
    return Source(shape, (*at[:dim], place, *at[dim + 1 :]), value)


@converter("aten.index_add.default")
def index_add(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Scalar = 1) -> Tensor:
    slices = _slices(ctx, x, dim, index, source)
    if alpha != 1:
        kind = x.dtype.compute
        value = call("mul", convert(slices.value, kind), ctx.scalar(alpha, kind))
        slices = Source(slices.shape, slices.places, value)
    return scatter(ctx, SUM, ctx.at(x, axes(x.rank), x.dtype), slices)


@converter("aten.index_reduce.default")
def index_reduce(
    ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    return reduced(ctx, x, _slices(ctx, x, dim, index, source), reduce, include_self)


@converter("aten.index_copy.default")
def index_copy(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return scatter(ctx, None, ctx.at(x, axes(x.rank), x.dtype), _slices(ctx, x, dim, index, source))


@converter("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(ctx: ImportContext, x: Tensor, dim: int, index: Tensor, value: Scalar | Tensor) -> Tensor:
    ensure_held(value, x.dtype)
    fill = ctx.at(ctx.local(value, x.device), (), x.dtype) if isinstance(value, Tensor) else ctx.scalar(value, x.dtype)
    slices = _slices(ctx, x, dim, index, fill)
    (at,) = (p for p in slices.places if is_value(p))
    extent = x.shape[dim % x.rank] if x.rank else sympy.S.One
    counted = tuple(wrapped(p, extent) if p is at else p for p in slices.places)
    return scatter(ctx, None, ctx.at(x, axes(x.rank), x.dtype), Source(slices.shape, counted, fill))


@converter("aten.embedding_dense_backward.default")
def embedding_backward(
    ctx: ImportContext, grad: Tensor, indices: Tensor, count: sympy.Expr, padding: int, by_frequency: bool
) -> Tensor:
    if by_frequency:
        raise NoConversion("embedding gradients scaled by frequency")
    at = source_axes(grad.rank)
    row = cast(ctx.at(indices, at[:-1]), DType.INT64)
    value = ctx.at(grad, at)
    padded = sympy.sympify(padding)
    if not padded.is_negative:
        value = Select(call("eq", row, index_value(padded)), const(0, value.dtype), value)
    kind = ctx.type().dtype.compute
    return scatter(ctx, SUM, const(0, kind), Source(grad.shape, (row, at[-1]), value))


# --- indices of several dimensions ------------------------------------------------------------------------------------


@converter("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    ctx: ImportContext, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    mask = indices[0] if len(indices) == 1 else None
    at = axes(x.rank)
    if isinstance(mask, Tensor) and mask.dtype is DType.BOOL and _is_alike_for_all(x, mask, values):
        # The mask's dimensions become one, of as many places as it names.
        named = (sympy.S.Zero, *at[mask.rank :])[-values.rank :] if values.rank else ()
        old, new = ctx.at(x, at), ctx.load(ctx.local(values, x.device), named, x.dtype.compute)
        if accumulate:
            new = add(old, new)
        return ctx.compute(Select(ctx.at(mask, at[: mask.rank]), new, old))
    if values.dtype is not x.dtype:
        raise NoConversion("values of another type, which eager refuses")
    given = [t for t in indices if t is not None]
    if not given:
        raise NoConversion("an assignment without indices")
    block = _broadcast([t.shape for t in given])
    if not all(_fits(t.shape, block) for t in given):
        raise NoConversion("indices that may not be broadcast to one another, which is an error")
    rest = [n for d, n in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    placed = [d for d, t in enumerate(indices) if t is not None]
    first = placed[0] if placed == list(range(placed[0], placed[-1] + 1)) else 0
    shape = (*rest[:first], *block, *rest[first:])
    if values.rank > len(shape):
        raise NoConversion("values of more dimensions than they are assigned to")
    if not _fits(values.shape, shape):
        raise NoConversion("values that may not be broadcast to what they are assigned to, which is an error")
    over = source_axes(len(shape))
    places = advanced_index(ctx, x.shape, indices, len(shape), over, safe=True)
    value = ctx.load(ctx.local(values, x.device), over, values.dtype)
    return scatter(ctx, SUM if accumulate else None, ctx.at(x, at, x.dtype), Source(shape, tuple(places), value))


def _is_alike_for_all(x: Tensor, mask: Tensor, values: Tensor) -> bool:
    """Whether every place that a mask names is assigned the same."""
    inner = x.shape[mask.rank :]
    if values.rank > len(inner) + 1 or (values.rank == len(inner) + 1 and values.shape[0] is not sympy.S.One):
        return False
    fits = _fits(values.shape[-len(inner) :] if inner else (), inner)
    return x.shape[: mask.rank] == mask.shape and fits


def _fits(shape: Sequence[sympy.Expr], to: Sequence[sympy.Expr]) -> bool:
    """Whether a shape is known to be broadcast to another: torch traces these ops without asking, and a kernel would
    read what is beside a tensor of fewer elements."""
    return all(n == 1 or _is_same(n, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _is_same(n: sympy.Expr, m: sympy.Expr) -> bool:
    return n == m or bool(sympy.expand(n - m) == 0)


def _broadcast(shapes: Sequence[Sequence[sympy.Expr]]) -> list[sympy.Expr]:
    rank = max(len(s) for s in shapes)
    padded = [(*(sympy.S.One,) * (rank - len(s)), *s) for s in shapes]
    return [next((n for n in dims if n is not sympy.S.One), sympy.S.One) for dims in zip(*padded, strict=True)]


@converter("aten.put.default")
def put(ctx: ImportContext, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if sympy.Mul(*index.shape) != sympy.Mul(*source.shape):
        raise NoConversion("indices and values that may be of different numbers")
    # In one order where the shapes are two.
    shape = index.shape if index.shape == source.shape else (sympy.Mul(*index.shape),)
    over = source_axes(len(shape))
    named, given = ((over if t.shape == shape else _digits(over[0], t.shape)) for t in (index, source))
    flat = wrapped(ctx.at(index, named), sympy.Mul(*x.shape))
    # A number is the only element of a row.
    places: list[Index] = [] if x.rank else [flat]
    for k, extent in enumerate(x.shape):
        step = sympy.Mul(*x.shape[k + 1 :])
        place = flat if step == 1 else call("floordiv", flat, index_value(step))
        # The first one is out of range where the whole is.
        places.append(place if k == 0 else call("remainder", place, index_value(extent)))
    value = ctx.at(source, given, source.dtype)
    at = axes(x.rank)
    return scatter(ctx, SUM if accumulate else None, ctx.at(x, at, x.dtype), Source(shape, tuple(places), value))


def _digits(flat: sympy.Expr, shape: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """The indices of the element that is at a position of a tensor, row by row."""
    steps = [sympy.Mul(*shape[k + 1 :]) for k in range(len(shape))]
    return tuple(
        sympy.S.Zero if n == 1 else ModularIndexing(flat, step, n) if k else FloorDiv(flat, step)
        for k, (n, step) in enumerate(zip(shape, steps, strict=True))
    )


# --- places that are computed -----------------------------------------------------------------------------------------


@converter("aten.unfold_backward.default")
def unfold_backward(
    ctx: ImportContext, grad: Tensor, sizes: Sequence[sympy.Expr], dim: int, size: int, step: int
) -> Tensor:
    if not sizes:
        raise NoConversion("windows of a number")
    dim %= len(sizes)
    *at, within = source_axes(grad.rank)
    places = [i if k != dim else i * step + within for k, i in enumerate(at)]
    # As in eager, dimensions of extent one are broadcast: istft's window is the same for every signal.
    shape = (
        *(n if k == dim else m for k, (n, m) in enumerate(zip(grad.shape, map(sympy.sympify, sizes)))),
        grad.shape[-1],
    )
    source = Source(shape, tuple(places), ctx.load(grad, (*at, within)))
    return scatter(ctx, SUM, const(0, ctx.type().dtype.compute), source)


@converter("aten.as_strided_scatter.default")
def as_strided_scatter(
    ctx: ImportContext, x: Tensor, source: Tensor, size: Any, stride: Sequence[Any], offset: Any = None
) -> Tensor:
    over = source_axes(source.rank)
    strides = tuple(sympy.sympify(s) for s in stride)
    places = strided_places(x, source.shape, strides, strided_begin(ctx, offset), over)
    value = ctx.at(source, over, source.dtype)
    return scatter(ctx, None, ctx.at(x, axes(x.rank), x.dtype), Source(source.shape, tuple(places), value))
