"""Pooling over windows: reductions over the few positions of a window; the backward gathers instead of scattering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import ARGMAX, MAX, SUM, lowest
from ....ir.expr.value import Expr, IndexValue, Select, call, const, symbol
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import converter
from ..terms import all_of, axes, convert, index_value, linear_offset, select, within
from .gather import bounded
from .scatter import Source, scatter, source_axes


def pair(value: Any, n: int, default: Sequence[Any] | None = None) -> list[Any]:
    """A per-dim argument of torch: one number for all, or nothing for the default."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        assert default is not None
        return list(default)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def spatial_dims(ctx: ImportContext) -> int:
    """How many dims are pooled: the op's name says it."""
    return 3 if "3d" in ctx.node.target._opname else 2  # type: ignore[union-attr]


def window(
    out: Sequence[sympy.Expr], kernel: Sequence[int], n: int
) -> tuple[ReductionSpace, tuple[sympy.Expr, ...], list[sympy.Expr]]:
    """The space (output positions | window), the output position, and the offsets within the window."""
    kept = axes(len(out))
    offsets: list[sympy.Expr] = []
    names: list[sympy.Symbol] = []
    extents: list[sympy.Expr] = []
    for size in kernel:
        if size == 1:
            offsets.append(sympy.S.Zero)
            continue
        offsets.append(symbol(f"r{len(names)}"))
        names.append(symbol(f"r{len(names)}"))
        extents.append(sympy.sympify(size))
    return ReductionSpace((*kept, *offsets), tuple(out), tuple(names), tuple(extents)), kept, offsets


def _inside(
    places: Sequence[sympy.Expr], extents: Sequence[sympy.Expr], padded: Sequence[bool], overhang: Sequence[bool]
) -> list[Expr]:
    conditions: list[Expr] = []
    for place, extent, before, after in zip(places, extents, padded, overhang):
        conditions += within(place, 0 if before else None, extent if after else None)
    return conditions


def _overhangs(extent: sympy.Expr, out: sympy.Expr, kernel: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Whether the last window may reach beyond the input."""
    reach = (out - 1) * stride - padding + (kernel - 1) * dilation - (extent - 1)
    if reach.is_Integer:
        return bool(reach > 0)
    return True


@converter("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    ctx: ImportContext, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    n = spatial_dims(ctx)
    kernel = pair(kernel_size, n)
    steps, pads, spread = pair(stride, n, kernel), pair(padding, n), pair(dilation, n)
    out = ctx.type(0)
    lead = x.rank - n
    domain, kept, offsets = window(out.shape, kernel, n)
    extents = x.shape[lead:]
    places = [kept[lead + k] * steps[k] + offsets[k] * spread[k] - pads[k] for k in range(n)]
    beyond = [_overhangs(extents[k], out.shape[lead + k], kernel[k], steps[k], pads[k], spread[k]) for k in range(n)]
    conditions = _inside(places, extents, [p > 0 for p in pads], beyond)
    loaded = ctx.at(x, [*kept[:lead], *places])
    value = select(all_of(conditions), loaded, lowest(loaded.dtype)) if conditions else loaded
    if 1 not in ctx.used():
        (best,) = ctx.reduce(MAX, domain, (value,), x.device)
        return finish(ctx, best, 0), None
    position = index_value(linear_offset(extents, places))
    if conditions:
        position = Select(all_of(conditions), position, const((1 << 63) - 1, DType.INT64))
    best, where = ctx.reduce(ARGMAX, domain, (value, position), x.device)
    return finish(ctx, best, 0), finish(ctx, where, 1)


def finish(ctx: ImportContext, result: Tensor, k: int | None) -> Tensor:
    return ctx.compute(ctx.at(result, axes(result.rank)), ctx.type(k), ctx.name(k))


def _covering(
    place: sympy.Expr, back: sympy.Expr, out: sympy.Expr, stride: int, padding: int
) -> tuple[sympy.Expr, list[Expr]]:
    """The ``back``-th last window that begins at or before an input position, and when there is one."""
    start = FloorDiv(place + padding, stride) - back
    return start, within(start, 0 if back is not sympy.S.Zero else None, out)


@converter("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def max_pool_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    n = spatial_dims(ctx)
    kernel = pair(kernel_size, n)
    steps, pads, spread = pair(stride, n, kernel), pair(padding, n), pair(dilation, n)
    lead = x.rank - n
    counts = [-(-((kernel[k] - 1) * spread[k] + 1) // steps[k]) for k in range(n)]
    domain, kept, backs = window(x.shape, counts, n)
    conditions: list[Expr] = []
    windows: list[sympy.Expr] = list(kept[:lead])
    for k in range(n):
        begin, inside = _covering(kept[lead + k], backs[k], grad.shape[lead + k], steps[k], pads[k])
        windows.append(begin)
        conditions += inside
    g = ctx.at(grad, windows)
    here = index_value(linear_offset(x.shape[lead:], kept[lead:]))
    taken = Select(call("eq", ctx.at(indices, windows), here), g, const(0, g.dtype))
    value = select(all_of(conditions), taken, const(0, g.dtype))
    return finish(ctx, ctx.reduce(SUM, domain, (value,), x.device)[0], None)


def _divisor(
    ctx: ImportContext, out_place: Sequence[sympy.Expr], extents: Sequence[sympy.Expr], kernel: Sequence[int],
    steps: Sequence[int], pads: Sequence[int], include_pad: bool, override: int | None, overhang: bool, dtype: DType,
) -> Expr:  # fmt: skip
    """How many elements the window at an output position is divided by."""
    if override is not None:
        return const(override, dtype)
    if not any(pads) and not overhang:
        return const(sympy.prod(kernel), dtype)
    if include_pad and not overhang:
        return const(sympy.prod(kernel), dtype)
    result: Expr = const(1, DType.INT64)
    for place, extent, size, step, pad in zip(out_place, extents, kernel, steps, pads):
        start = place * step - pad
        margin = pad if include_pad else 0
        end = call("minimum", IndexValue(start + size, DType.INT64), index_value(extent + margin))
        begin = call("maximum", IndexValue(start, DType.INT64), const(-margin, DType.INT64))
        result = call("mul", result, call("sub", end, begin))
    return convert(result, dtype)


@converter("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    ctx: ImportContext, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    n = spatial_dims(ctx)
    kernel = pair(kernel_size, n)
    steps, pads = pair(stride, n, kernel), pair(padding, n)
    out = ctx.type()
    lead = x.rank - n
    domain, kept, offsets = window(out.shape, kernel, n)
    extents = x.shape[lead:]
    places = [kept[lead + k] * steps[k] + offsets[k] - pads[k] for k in range(n)]
    beyond = [_overhangs(extents[k], out.shape[lead + k], kernel[k], steps[k], pads[k]) for k in range(n)]
    conditions = _inside(places, extents, [p > 0 for p in pads], beyond)
    value = ctx.at(x, [*kept[:lead], *places])
    if conditions:
        value = select(all_of(conditions), value, const(0, value.dtype))
    (total,) = ctx.reduce(SUM, domain, (value,), x.device)
    divisor = _divisor(
        ctx, kept[lead:], extents, kernel, steps, pads, count_include_pad, divisor_override, ceil_mode, value.dtype
    )
    return ctx.compute(call("div" if value.dtype.is_float else "truncdiv", ctx.at(total, kept), divisor))


@converter("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def avg_pool_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    n = spatial_dims(ctx)
    kernel = pair(kernel_size, n)
    steps, pads = pair(stride, n, kernel), pair(padding, n)
    lead = x.rank - n
    domain, kept, backs = window(x.shape, [-(-kernel[k] // steps[k]) for k in range(n)], n)
    conditions: list[Expr] = []
    windows: list[sympy.Expr] = list(kept[:lead])
    for k in range(n):
        begin, inside = _covering(kept[lead + k], backs[k], grad.shape[lead + k], steps[k], pads[k])
        windows.append(begin)
        conditions += inside
        if kernel[k] % steps[k]:  # the earliest window may end before this position
            conditions += within(kept[lead + k] + pads[k] - begin * steps[k], None, kernel[k])
    g = ctx.at(grad, windows)
    divisor = _divisor(
        ctx,
        windows[lead:],
        x.shape[lead:],
        kernel,
        steps,
        pads,
        count_include_pad,
        divisor_override,
        ceil_mode,
        g.dtype,
    )
    value = select(all_of(conditions), call("div", g, divisor), const(0, g.dtype))
    return finish(ctx, ctx.reduce(SUM, domain, (value,), x.device)[0], None)


@converter("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(ctx: ImportContext, x: Tensor, indices: Tensor, size: Sequence[Any], *windows: Any) -> Tensor:
    """Elements back at the places in their planes that max pooling found them at; the last one where several meet."""
    rank = len(size)
    out, at = ctx.type(), source_axes(x.rank)
    extents = out.shape[-rank:]
    flat = bounded(ctx.at(indices, at), x.rank - rank, sympy.Mul(*extents))
    places: list[Any] = list(at[:-rank])
    for k, extent in enumerate(extents):
        step = sympy.Mul(*extents[k + 1 :])
        place = flat if step == 1 else call("floordiv", flat, index_value(step))
        places.append(place if k == 0 else call("remainder", place, index_value(extent)))
    return scatter(ctx, None, const(0, x.dtype), Source(x.shape, tuple(places), ctx.at(x, at, x.dtype)))
