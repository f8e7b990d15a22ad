"""Sampling of images at places that are data: a few guarded gathers for each element, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, Select, call, cast, const, symbol
from ....ir.target import updates_in_order
from ..context import ImportContext, ReductionSpace, Tensor
from ..registry import NoConversion, converter
from ..terms import all_of, axes, convert, index_value
from .scatter import Source, scatter, source_axes

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
        # Which image and which channel of it.
        self.at: tuple[sympy.Expr, ...] = axes(2)
        self.extents = [convert(index_value(e), kind) for e in x.shape[2:]]

    def inside(self, place: Expr, dim: int) -> Expr:
        low = call("ge", place, const(0, place.dtype))
        return call("logical_and", low, call("lt", place, self.extents[dim]))

    def value(self, places: Sequence[Expr]) -> Expr:
        """At one coordinate for each spatial dim."""
        index = [cast(p, DType.INT64) for p in places]
        loaded = self.ctx.at(self.x, [*self.at, *index])
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
        weights = [_share(p, low, up) for up, p, low in zip(chosen, places, lows, strict=True)]
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


def _grid_places(
    ctx: ImportContext, grid: Tensor, extents: Sequence[Expr], mode: int, padding: int, align_corners: bool
) -> list[Tensor]:
    """The coordinates that a grid names, in pixels: a tensor for each spatial dim, made once for all channels."""
    kind = extents[0].dtype
    spots = ctx.contiguous(grid.shape[:-1], kind, grid.device)
    places = []
    for d, extent in enumerate(extents):
        # The last spatial dim comes first in the grid.
        given = ctx.at(grid, (*axes(grid.rank - 1), sympy.Integer(len(extents) - 1 - d)), kind)
        place = _in_pixels(given, extent, align_corners)
        if mode != _BICUBIC:
            place = _bounded(place, extent, padding, align_corners)
        if mode == _NEAREST:
            place = call("round", place)
        places.append(ctx.compute(place, spots, ctx.fresh("place")))
    return places


@converter("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(ctx: ImportContext, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    n = x.rank - 2
    at = axes(x.rank)
    sampler = _Sampler(ctx, x, ctx.type().dtype.compute)
    made = _grid_places(ctx, grid, sampler.extents, mode, padding, align_corners)
    places = [ctx.at(p, (at[0], *at[2:])) for p in made]
    if mode == _NEAREST:
        return ctx.compute(sampler.value(places))
    if mode == _BILINEAR:
        return ctx.compute(_linear(sampler, places))
    if mode == _BICUBIC and n == 2:
        return ctx.compute(_cubic(ctx, sampler, places, padding, align_corners))
    raise NoConversion(f"interpolation mode {mode}")


# --- backward
# ------------------------------------------------------------------------------------------------------------


def _slope(given: Expr, extent: Expr, padding: int, align_corners: bool) -> Expr:
    """The derivative of a place in pixels by its coordinate in [-1, 1]: the border stops it, a mirror turns it."""
    scale = _times(_plus(extent, -1) if align_corners else extent, 0.5)
    if padding == _ZEROS:
        return scale
    place = _in_pixels(given, extent, align_corners)
    zero = const(0, place.dtype)
    if padding == _REFLECTION:
        low = const(0 if align_corners else -0.5, place.dtype)
        span = _plus(extent, -1) if align_corners else extent
        distance = call("sub", place, low)
        turns = call("floor", call("div", call("abs", distance), span))
        even = call("eq", call("fmod", turns, const(2, place.dtype)), zero)
        forward = call("logical_xor", call("lt", distance, zero), even)
        scale = Select(forward, scale, call("neg", scale))
        place = _reflected(place, extent, align_corners)
    free = call("logical_and", call("gt", place, zero), call("lt", place, _plus(extent, -1)))
    return Select(free, scale, zero)


def _gradient_of_grid(
    ctx: ImportContext, grad: Tensor, x: Tensor, grid: Tensor, made: Sequence[Tensor], mode: int, padding: int,
    align_corners: bool,
) -> Tensor:  # fmt: skip
    """By each coordinate, a sum over the channels."""
    out = ctx.type()
    kind = out.dtype.compute
    if mode == _NEAREST:
        return ctx.compute(const(0, kind))
    n = x.rank - 2
    spots = axes(n + 1)
    channel = symbol("r0") if x.shape[1] != 1 else sympy.S.Zero
    sampler = _Sampler(ctx, x, kind)
    sampler.at = (spots[0], channel)
    g = ctx.at(grad, (spots[0], channel, *spots[1:]), kind)
    kept = out.shape[:-1]
    domain = ReductionSpace((*spots, channel), kept, (symbol("r0"),), (x.shape[1],))
    if x.shape[1] == 1:
        domain = ReductionSpace((*spots, channel), kept, (), ())
    places = [ctx.at(p, spots) for p in made]
    lows = [call("floor", p) for p in places]
    value: Expr = const(0, kind)
    for d in range(n):
        terms = []
        for chosen in product((False, True), repeat=n):
            corner = [_plus(low, 1) if up else low for up, low in zip(chosen, lows, strict=True)]
            weights = [_share(p, low, up) for e, (up, p, low) in enumerate(zip(chosen, places, lows)) if e != d]
            term = call("mul", sampler.value(corner), _product(weights))
            terms.append(term if chosen[d] else call("neg", term))
        (total,) = ctx.reduce(SUM, domain, (call("mul", _sum(terms), g),), x.device)
        given = ctx.at(grid, (*spots, sympy.Integer(n - 1 - d)), kind)
        slope = call("mul", ctx.at(total, spots), _slope(given, sampler.extents[d], padding, align_corners))
        here = call("eq", index_value(axes(n + 2)[-1]), index_value(n - 1 - d))
        value = Select(here, slope, value)
    return ctx.compute(value)


def _share(place: Expr, low: Expr, up: bool) -> Expr:
    """The weight of a neighbour of a place along one dim."""
    return call("sub", place, low) if up else call("sub", _plus(low, 1), place)


def _corners_along(place: Expr, extent: Expr, up: Expr) -> tuple[Expr, Expr]:
    """Of a dim, the neighbour of a place that ``up`` chooses, and its weight. Of a neighbour beside the image it is
    ``-1 - i``, ``i`` the nearest one in it, and -1 of what is no number: additions to one pixel would wait for one
    another."""
    low = call("floor", place)
    chosen = Select(up, _plus(low, 1), low)
    inside = call("logical_and", call("ge", chosen, const(0, place.dtype)), call("lt", chosen, extent))
    weight = Select(up, _share(place, low, True), _share(place, low, False))
    zero = const(0, place.dtype)
    near = Select(call("gt", chosen, zero), Select(call("lt", chosen, extent), chosen, _plus(extent, -1)), zero)
    here, beside = cast(near, DType.INT32), call("sub", const(-1, DType.INT32), cast(near, DType.INT32))
    return Select(inside, here, beside), weight


def _gradient_of_image(ctx: ImportContext, grad: Tensor, x: Tensor, made: Sequence[Tensor], mode: int) -> Tensor:
    """Each element of the gradient goes to the pixels that its sample was made of, by their weights.

    Where updates are made one by one, neighbours and their weights are made before, for all channels and by lanes."""
    out = ctx.type()
    n = x.rank - 2
    linear = mode == _BILINEAR
    shape = (*grad.shape, *([sympy.Integer(2)] * n if linear else []))
    at = source_axes(len(shape))
    value = ctx.at(grad, at[: n + 2], out.dtype.compute)
    corners: list[Expr] = []
    for d in range(n):
        extent = convert(index_value(x.shape[2 + d]), value.dtype)
        spot = (at[0], *at[2 : n + 2])
        if not linear:
            corners.append(_corners_along(ctx.at(made[d], spot), extent, const(False, DType.BOOL))[0])
            continue
        if updates_in_order(x.device):
            own = axes(n + 2)
            up = call("eq", index_value(own[-1]), index_value(1))
            parts = _corners_along(ctx.at(made[d], own[:-1]), extent, up)
            tables = [
                ctx.compute(e, ctx.contiguous((*made[d].shape, sympy.Integer(2)), e.dtype, x.device), ctx.fresh(name))
                for e, name in zip(parts, ("corner", "share"), strict=True)
            ]
            corner, weight = (ctx.at(t, (*spot, at[n + 2 + d])) for t in tables)
        else:
            up = call("eq", index_value(at[n + 2 + d]), index_value(1))
            corner, weight = _corners_along(ctx.at(made[d], spot), extent, up)
        corners.append(corner)
        value = call("mul", value, weight)
    inside = all_of([call("ge", c, const(0, c.dtype)) for c in corners])
    # What lies beside the image goes nowhere: zero is added to the nearest pixel.
    target = [cast(call("maximum", c, call("sub", const(-1, c.dtype), c)), DType.INT64) for c in corners]
    value = Select(inside, value, const(0, value.dtype))
    return scatter(ctx, SUM, const(0, out.dtype.compute), Source(shape, (*at[:2], *target), value))


@converter("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(
    ctx: ImportContext, grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    if mode == _BICUBIC or 0 in (*x.shape, *grid.shape):
        raise NoConversion("backward of sampling by cubic convolution, or of nothing")
    kind = ctx.type(1).dtype.compute
    extents = [convert(index_value(e), kind) for e in x.shape[2:]]
    made = _grid_places(ctx, grid, extents, mode, padding, align_corners)
    image: Tensor | None = None
    if output_mask[0] and 0 in ctx.used():
        with ctx.result_of(0):
            image = _gradient_of_image(ctx, grad, x, made, mode)
    if 1 not in ctx.used():
        return image, None
    with ctx.result_of(1):
        return image, _gradient_of_grid(ctx, grad, x, grid, made, mode, padding, align_corners)
