"""Nearest-neighbour resizing and its backward; the smooth kinds are taken apart by torch's decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Index, call, cast, const
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, index_value
from .pooling import finish, window


def _ratio(small: sympy.Expr, large: sympy.Expr) -> int | None:
    """``large / small`` if it is a whole number for all sizes."""
    quotient = sympy.cancel(large / small) if small != 0 else None
    return int(quotient) if quotient is not None and quotient.is_Integer and quotient > 0 else None


def _source(i: sympy.Symbol, extent: sympy.Expr, out: sympy.Expr, scale: float | None) -> Index:
    """The input position that output position ``i`` copies, rounded as torch does (in float32)."""
    ratio = _ratio(extent, out)
    if ratio is not None and scale in (None, float(ratio)):
        return FloorDiv(i, ratio) if ratio > 1 else i
    if scale is not None:
        factor: Any = const(float(np.float32(1.0 / scale)), DType.FLOAT32)
    elif extent.is_Integer and out.is_Integer:
        factor = const(float(np.float32(int(extent)) / np.float32(int(out))), DType.FLOAT32)
    else:
        factor = call("div", cast(index_value(extent), DType.FLOAT32), cast(index_value(out), DType.FLOAT32))
    place = cast(call("floor", call("mul", cast(index_value(i), DType.FLOAT32), factor)), DType.INT64)
    return call("minimum", place, index_value(extent - 1))


@converter("aten.upsample_nearest2d.default")
def upsample_nearest2d(
    ctx: ImportContext, x: Tensor, size: Any, scale_h: float | None = None, scale_w: float | None = None
) -> Tensor:
    out = ctx.type()
    at = axes(4)
    places = [_source(at[k], x.shape[k], out.shape[k], s) for k, s in ((2, scale_h), (3, scale_w))]
    return ctx.compute(ctx.at(x, [at[0], at[1], *places], x.dtype))


@converter("aten.upsample_nearest2d.vec")
def upsample_nearest2d_vec(ctx: ImportContext, x: Tensor, size: Any, scales: Sequence[float] | None) -> Tensor:
    height, width = scales if scales is not None else (None, None)
    return upsample_nearest2d(ctx, x, size, height, width)


@converter("aten.upsample_nearest2d_backward.default")
def upsample_nearest2d_backward(
    ctx: ImportContext, grad: Tensor, output_size: Any, input_size: Any, scale_h: float | None = None,
    scale_w: float | None = None,
) -> Tensor:  # fmt: skip
    out = ctx.type()
    # The size that the forward computed: the gradient's own may be another expression for the same number.
    ratios = [_ratio(out.shape[2 + k], sympy.sympify(output_size[k])) for k in range(2)]
    if any(r is None or (s is not None and s != r) for r, s in zip(ratios, (scale_h, scale_w))):
        raise NoConversion("backward of nearest-neighbour resizing by a fraction")
    domain, kept, offsets = window(out.shape, [r for r in ratios if r is not None], 2)
    places = [kept[2 + k] * r + offsets[k] for k, r in enumerate(ratios) if r is not None]
    value = ctx.at(grad, [kept[0], kept[1], *places])
    return finish(ctx, ctx.reduce(SUM, domain, (value,), grad.device)[0], None)
