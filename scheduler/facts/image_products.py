"""Convolutions over many channels as products: images with a border and with channels innermost, filters with their
results innermost, and a sum over taps and channels that reads both in rows.

No window is laid out in memory. An element of an image is read for all filters at once, and each row of filters for a
row of places; no sum meets a border.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import SUM
from ...ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from ...ir.graph.graph import Compute, Node, Origin, Reduction, TensorType
from ...ir.nest.loops import contiguous_strides
from .convolution import Convolution, Names, axes_of


def is_image_product(c: Convolution) -> bool:
    """Whether a convolution's output is such a sum: of plain windows, by filters that read all channels.
    One by single elements reads plain images in rows as they lie."""
    if c.transposed or c.is_backward or c.groups != 1:
        return False
    return c.taps > 1 or max(c.stride) > 1


def decompose_as_product(c: Convolution, name: Names, note: str, fresh: tuple[str, str]) -> list[Node]:
    """The output as a sum of products of ``fresh`` copies of the image and of the filters, where these do not lie in
    that order, and the element that adds its bias."""
    origins = tuple(replace(o, note=note) for o in c.node.origins)
    images = _images(c, fresh[0], origins)
    filters = None if _is_in_order(c) else _filters(c, fresh[1], origins)
    batch, out, *at = axes_of(len(c.output.shape))
    taps = [symbol(f"r{k}") for k in range(c.rank)]
    channel, dtype, wide = symbol(f"r{c.rank}"), c.input.dtype, c.input.dtype.compute
    places = [i * s + t * d for i, s, t, d in zip(at, c.stride, taps, c.dilation, strict=True)]
    extents = (*(sympy.Integer(k) for k in c.kernel), c.read)
    over = {v: e for v, e in zip((*taps, channel), extents, strict=True) if e != 1}
    none = {v: sympy.S.Zero for v, e in zip((*taps, channel), extents, strict=True) if e == 1}

    def read(name: str, indices: tuple[sympy.Expr, ...]) -> Expr:
        return cast(Load(name, tuple(sympy.sympify(i).xreplace(none) for i in indices), dtype), wide)

    if filters is None:
        factor = read(c.names["weight"], (out, channel, *taps))
    else:
        factor = read(filters.name, (*taps, channel, out))
    term = call("mul", read(images.name, (batch, *places, channel)), factor)
    axes = axes_of(len(c.output.shape))
    inner = contiguous_strides((c.output.shape[0], *c.output.shape[2:], c.output.shape[1]))
    kind = replace(c.output, strides=(inner[0], inner[-1], *inner[1:-1]), dtype=wide)
    total: Node
    if over:
        total = Reduction(
            (name.total,), (kind,), axes, tuple(over), tuple(over.values()), SUM, (term,), origins
        )  # fmt: skip
    else:
        total = Compute(name.total, kind, axes, term, origins)
    value: Expr = Load(name.total, axes, wide)
    if "bias" in c.names:
        value = call("add", value, cast(Load(c.names["bias"], (out,), c.output.dtype), wide))
    value = cast(value, c.output.dtype, when_stored=not c.node.rounded)
    copies = [images] if filters is None else [images, filters]
    return [*copies, total, Compute(name.result, c.output, axes, value, origins)]


def _images(c: Convolution, name: str, origins: tuple[Origin, ...]) -> Compute:
    """The images ``[N, *size, C]`` with their border, as far as windows reach."""
    (batch, channels), size = c.input.shape[:2], c.input.shape[2:]
    wide = [
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip(c.output.shape[2:], c.stride, c.kernel, c.dilation, strict=True)
    ]
    shape = (batch, *(sympy.expand(n) for n in wide), channels)
    first, *at, last = axes_of(len(shape))
    places = [i - p for i, p in zip(at, c.padding, strict=True)]
    value: Expr = Load(c.names["input"], (first, last, *places), c.input.dtype)
    for place, extent, pad in zip(places, size, c.padding, strict=True):
        if pad:
            here = IndexValue(place, DType.INT64)
            inside = call("logical_and", call("ge", here, const(0, DType.INT64)), call("lt", here, _bound(extent)))
            value = Select(inside, value, const(0, c.input.dtype))
    kind = TensorType(shape, contiguous_strides(shape), c.input.dtype, c.input.device)
    return Compute(name, kind, axes_of(len(shape)), value, origins)


def _is_in_order(c: Convolution) -> bool:
    """Whether the memory of the filters is ``[*kernel, C, O]`` as it is."""
    out, channels, *kernel = c.weight.shape
    outermost = contiguous_strides((*kernel, channels, out))
    return c.weight.strides == (outermost[-1], outermost[-2], *outermost[:-2])


def _bound(extent: sympy.Expr) -> Expr:
    return const(int(extent), DType.INT64) if extent.is_Integer else IndexValue(extent, DType.INT64)


def _filters(c: Convolution, name: str, origins: tuple[Origin, ...]) -> Compute:
    """The filters ``[*kernel, C, O]``."""
    out, channels, *kernel = c.weight.shape
    shape = (*kernel, channels, out)
    *taps, channel, last = axes_of(len(shape))
    kind = TensorType(shape, contiguous_strides(shape), c.weight.dtype, c.weight.device)
    value = Load(c.names["weight"], (last, channel, *taps), c.weight.dtype)
    return Compute(name, kind, axes_of(len(shape)), value, origins)


__all__ = ["decompose_as_product", "is_image_product"]
