"""Sampling of images at places that are data: a few guarded gathers for each element, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import sympy

from ...ir.dtypes import DType
from ...ir.expr import Expr, Select, call, cast, const
from .context import ImportContext, Tensor, all_of, axes, convert, index_value
from .registry import NoConversion, converter

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
# The parameter of the cubic convolution that torch uses.
_CUBIC = -0.75


def _times(v: Expr, factor: float) -> Expr:
    return call("mul", v, const(factor, v.dtype))


def _plus(v: Expr, summand: float) -> Expr:
    return call("add", v, const(summand, v.dtype))


def _in_pixels(v: Expr, extent: Expr, align_corners: bool) -> Expr:
    """A coordinate in [-1, 1] in units of pixels."""
    if align_corners:
        return call("mul", _times(_plus(v, 1), 0.5), _plus(extent, -1))
    return _times(_plus(call("mul", _plus(v, 1), extent), -1), 0.5)


def _reflected(v: Expr, extent: Expr, align_corners: bool) -> Expr:
    """A coordinate mirrored at the borders until it lies between them."""
    low = const(0 if align_corners else -0.5, v.dtype)
    span = _plus(extent, -1) if align_corners else extent
    distance = call("abs", call("sub", v, low))
    rest, turns = call("fmod", distance, span), call("floor", call("div", distance, span))
    even = call("eq", call("fmod", turns, const(2, v.dtype)), const(0, v.dtype))
    inside = call("add", Select(even, rest, call("sub", span, rest)), low)
    return Select(call("eq", span, const(0, v.dtype)), const(0, v.dtype), inside)


def _bounded(v: Expr, extent: Expr, padding: int, align_corners: bool) -> Expr:
    """A coordinate as the padding mode moves it; NaN becomes zero."""
    if padding == _ZEROS:
        return v
    if padding == _REFLECTION:
        v = _reflected(v, extent, align_corners)
    zero = const(0, v.dtype)
    return call("minimum", Select(call("gt", v, zero), v, zero), _plus(extent, -1))


class _Sampler:
    """The samples of ``x`` at whole coordinates; outside of it they are zero."""

    def __init__(self, ctx: ImportContext, x: Tensor, kind: DType) -> None:
        self.ctx, self.x = ctx, x
        self.at = axes(x.rank)
        self.extents = [convert(index_value(e), kind) for e in x.shape[2:]]

    def inside(self, place: Expr, dim: int) -> Expr:
        low = call("ge", place, const(0, place.dtype))
        return call("logical_and", low, call("lt", place, self.extents[dim]))

    def value(self, places: Sequence[Expr]) -> Expr:
        """At one coordinate for each spatial dim."""
        index = [cast(p, DType.INT64) for p in places]
        loaded = self.ctx.at(self.x, [*self.at[:2], *index])
        inside = all_of([self.inside(p, d) for d, p in enumerate(places)])
        return Select(inside, loaded, const(0, loaded.dtype))


def _sum(values: Sequence[Expr]) -> Expr:
    total = values[0]
    for v in values[1:]:
        total = call("add", total, v)
    return total


def _product(values: Sequence[Expr]) -> Expr:
    total = values[0]
    for v in values[1:]:
        total = call("mul", total, v)
    return total


def _linear(sampler: _Sampler, places: Sequence[Expr]) -> Expr:
    lows = [call("floor", p) for p in places]
    highs = [_plus(low, 1) for low in lows]
    corners = []
    for chosen in product((False, True), repeat=len(places)):
        weights = [
            call("sub", p, low) if up else call("sub", high, p)
            for up, p, low, high in zip(chosen, places, lows, highs, strict=True)
        ]
        corner = [high if up else low for up, low, high in zip(chosen, lows, highs, strict=True)]
        corners.append(call("mul", sampler.value(corner), _product(weights[::-1])))
    return _sum(corners)


def _cubic_weights(ctx: ImportContext, t: Expr) -> list[Expr]:
    """Of the four pixels round a place that is ``t`` beyond the second."""

    def near(v: Expr) -> Expr:
        inner = _plus(_times(v, _CUBIC + 2), -(_CUBIC + 3))
        return _plus(call("mul", call("mul", inner, v), v), 1)

    def far(v: Expr) -> Expr:
        inner = _plus(call("mul", _plus(_times(v, _CUBIC), -5 * _CUBIC), v), 8 * _CUBIC)
        return _plus(call("mul", inner, v), -4 * _CUBIC)

    rest = call("sub", const(1, t.dtype), t)
    return [far(_plus(t, 1)), near(t), near(rest), far(_plus(rest, 1))]


def _cubic(ctx: ImportContext, sampler: _Sampler, places: Sequence[Expr], padding: int, align: bool) -> Expr:
    lows = [call("floor", p) for p in places]
    weights = [_cubic_weights(ctx, call("sub", p, low)) for p, low in zip(places, lows, strict=True)]
    moved = [
        [_bounded(_plus(low, k - 1), sampler.extents[d], padding, align) for k in range(4)]
        for d, low in enumerate(lows)
    ]
    rows = []
    for j in range(4):
        row = _sum([call("mul", sampler.value((moved[0][j], moved[1][k])), weights[1][k]) for k in range(4)])
        rows.append(call("mul", row, weights[0][j]))
    return _sum(rows)


@converter("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(ctx: ImportContext, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    out = ctx.type()
    kind = out.dtype.compute
    n = x.rank - 2
    at = axes(x.rank)
    sampler = _Sampler(ctx, x, kind)
    places: list[Expr] = []
    spots = ctx.contiguous((out.shape[0], *out.shape[2:]), kind, out.device)
    own = axes(n + 1)
    for d in range(n):
        # The last spatial dim comes first in the grid.
        given = ctx.at(grid, (*own, sympy.Integer(n - 1 - d)), kind)
        place = _in_pixels(given, sampler.extents[d], align_corners)
        if mode != _BICUBIC:
            place = _bounded(place, sampler.extents[d], padding, align_corners)
        if mode == _NEAREST:
            place = call("round", place)
        made = ctx.compute(place, spots, ctx.fresh("place"))
        places.append(ctx.at(made, (at[0], *at[2:])))
    if mode == _NEAREST:
        return ctx.compute(sampler.value(places))
    if mode == _BILINEAR:
        return ctx.compute(_linear(sampler, places))
    if mode == _BICUBIC and n == 2:
        return ctx.compute(_cubic(ctx, sampler, places, padding, align_corners))
    raise NoConversion(f"interpolation mode {mode}")
