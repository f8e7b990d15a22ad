"""Running sums, products, log-sum-exps, maxima and minima along a dimension.

States have the type in which ATen keeps them: on a CPU float64 for float32, anywhere float32 for the half types.
"""

from __future__ import annotations

from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import LAST_ARGMAX, LAST_ARGMIN, LOGSUMEXP, PRODUCT, SUM, Monoid, State
from ....ir.expr.value import Load
from ....ir.graph.graph import Scan, TensorType
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, convert, index_value

# On a GPU a row is the work of one program.
LONG_ROW, FEW_ROWS = 16384, 32


def state_type(out: DType, device: str) -> DType:
    if out.is_half:
        return DType.FLOAT32
    return DType.FLOAT64 if out is DType.FLOAT32 and device.startswith("cpu") else out


def _is_long_work(ctx: ImportContext, out: TensorType, along: sympy.Expr) -> bool:
    """Whether rows are too few to occupy a GPU, one program each, and so long that it shows."""
    length = 0 if out.device.startswith("cpu") else ctx.sizes.hint(along)
    return length > LONG_ROW and ctx.sizes.hint(out.numel) < FEW_ROWS * length


def scan(ctx: ImportContext, monoid: Monoid, lifted: State, kind: TensorType, dim: int) -> State:
    """The states of a scan of ``lifted``, a state over the axes of ``kind``, up to each position of ``dim``."""
    at = axes(len(kind.shape))
    along = kind.shape[dim] if at else sympy.S.One
    if along is sympy.S.One:
        return lifted
    if not monoid.definition and _is_long_work(ctx, kind, along):
        raise NoConversion("few long rows: the library's scans are the work of many programs each")
    types = tuple(ctx.contiguous(kind.shape, v.dtype, kind.device) for v in lifted)
    names = tuple(ctx.fresh(c.name) for c in monoid.components)
    ctx.nodes.append(Scan(names, types, at, at[dim % len(at)], monoid, lifted, ctx.origins))
    return tuple(Load(n, at, t.dtype) for n, t in zip(names, types, strict=True))


def _register(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default")
    def running(ctx: ImportContext, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
        out = ctx.type()
        if out.dtype is DType.BOOL:
            raise NoConversion("no eager kernel scans truth values")
        # What is asked for is converted to the result's type first, then summed in a wider one.
        value = ctx.load(x, axes(len(out.shape)), out.dtype)
        lifted = monoid.lift(convert(value, state_type(out.dtype, out.device)))
        return ctx.compute(monoid.project(scan(ctx, monoid, lifted, out, dim))[0])


def _register_best(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default")
    def best(ctx: ImportContext, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        at = axes(x.rank)
        extent = x.shape[dim] if at else sympy.S.One
        # As wide as a float32, where a position always fits: half the registers.
        position = DType.INT32 if extent.is_Integer and int(extent) < 1 << 31 else DType.INT64
        place = index_value(at[dim] if extent is not sympy.S.One else sympy.S.Zero, position)
        kind = DType.INT32 if x.dtype is DType.BOOL else x.dtype.compute
        value, index = scan(ctx, monoid, (ctx.load(x, at, kind), place), ctx.type(0), dim)
        return ctx.compute(value, ctx.type(0), ctx.name(0)), ctx.compute(index, ctx.type(1), ctx.name(1))


_register("cumsum", SUM)
_register("cumprod", PRODUCT)
_register("logcumsumexp", LOGSUMEXP)
_register_best("cummax", LAST_ARGMAX)
_register_best("cummin", LAST_ARGMIN)
