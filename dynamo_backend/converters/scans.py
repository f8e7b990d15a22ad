"""Running sums, products and log-sum-exps along a dimension.

States have the type in which ATen keeps them: on a CPU float64 for float32, anywhere float32 for the half types.
"""

from __future__ import annotations

from typing import Any

import sympy

from ...ir.dtypes import DType
from ...ir.expr import Expr, Load
from ...ir.graph import Scan, TensorType
from ...ir.monoid import LOGSUMEXP, PRODUCT, SUM, Monoid
from .context import ImportContext, Tensor, axes, convert
from .registry import NoConversion, converter

# On a GPU a row is the work of one program.
LONG_ROW, FEW_ROWS = 16384, 32


def _state_type(out: DType, device: str) -> DType:
    if out.is_half:
        return DType.FLOAT32
    return DType.FLOAT64 if out is DType.FLOAT32 and device.startswith("cpu") else out


def _is_long_work(ctx: ImportContext, out: TensorType, along: sympy.Expr) -> bool:
    """Whether rows are too few to occupy a GPU, one program each, and so long that it shows."""
    length = 0 if out.device.startswith("cpu") else ctx.sizes.hint(along)
    return length > LONG_ROW and ctx.sizes.hint(out.numel) < FEW_ROWS * length


def scan(ctx: ImportContext, monoid: Monoid, x: Tensor, dim: int) -> Tensor:
    """The current node's result: ``x``, converted to its type, combined up to each position of ``dim``."""
    out = ctx.type()
    at = axes(len(out.shape))
    # What is asked for is converted to the result's type first, then summed in a wider one.
    value = convert(ctx.load(x, at, out.dtype), _state_type(out.dtype, out.device))
    along = out.shape[dim] if out.shape else sympy.S.One
    if along is sympy.S.One:
        return ctx.compute(monoid.project(monoid.lift(value))[0])
    lifted = monoid.lift(value)
    types = tuple(ctx.contiguous(out.shape, v.dtype, out.device) for v in lifted)
    if _is_long_work(ctx, out, along):
        raise NoConversion("few long rows: the library's scans are the work of many programs each")
    names = tuple(ctx.fresh(c.name) for c in monoid.components)
    ctx.nodes.append(Scan(names, types, at, at[dim % len(at)], monoid, lifted, ctx.origins))
    state: tuple[Expr, ...] = tuple(Load(n, at, t.dtype) for n, t in zip(names, types, strict=True))
    return ctx.compute(monoid.project(state)[0])


def _register(name: str, monoid: Monoid) -> None:
    @converter(f"aten.{name}.default")
    def running(ctx: ImportContext, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
        return scan(ctx, monoid, x, dim)


_register("cumsum", SUM)
_register("cumprod", PRODUCT)
_register("logcumsumexp", LOGSUMEXP)
