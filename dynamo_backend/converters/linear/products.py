"""Products and convolutions of half types on CPUs that do not multiply them: in float32, converted on the way.

torch falls back to plain loops there, 10 to 30 times slower than float32. As sums of float32 they are at least as
exact, the conversions fuse with what makes the operands and with what reads the result, and loops of ours may read the
narrow operand itself where that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import call
from ....ir.graph.graph import Library, Ref, TensorType
from ....ir.target import multiplies_halves
from ..context import ImportContext, Tensor
from ..registry import LIBRARY_REASONS, NoConversion, converter
from ..terms import axes

WIDENED = "in float32: this CPU does not multiply half types"


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for a half type on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    found = ops._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported
    return bool(found())


@converter(
    "aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default", "aten.mv.default",
    "aten.addmv.default", "aten.convolution.default", "aten.convolution_backward.default",
)  # fmt: skip
def widened(ctx: ImportContext, *args: Any, **kwargs: Any) -> Any:
    """The call with its half operands as float32; declined, for the library as it is, where they are none."""
    op = str(ctx.node.target)
    halves = [a for a in args if isinstance(a, Tensor) and a.dtype.is_half and not multiplies_halves(a.device)]
    if halves and not ctx.calls_libraries(halves[0].device):
        raise NoConversion(LIBRARY_REASONS[op])  # loops read the narrow operands
    if not halves or ctx.numerics == "eager" or any(multiplies(a.dtype.torch) for a in halves):
        raise NoConversion(LIBRARY_REASONS[op])
    kinds = _wide_types(ctx)
    given = tuple(Ref(_wide(ctx, a).name) if isinstance(a, Tensor) else _argument(a) for a in args)
    target: Any = ctx.node.target
    many = isinstance(ctx.val, (list, tuple))
    names = tuple(ctx.fresh(f"wide_{k}") for k in range(len(kinds)))
    full_name = f"{target.namespace}::{target._opname}.{target._overloadname}"
    reason = "; ".join([LIBRARY_REASONS[op], WIDENED, *filter(None, [ctx.node.meta.get("mlc_note")])])
    ctx.nodes.append(
        Library(
            names, kinds, full_name, given, tuple((k, _argument(v)) for k, v in kwargs.items()), reason, ctx.origins
        )
    )
    results: list[Tensor | None] = []
    for k, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind is None:
            results.append(None)
            continue
        at = axes(len(kind.shape))
        position = k if many else None
        value = ctx.at(Tensor(name, kind), at)
        results.append(ctx.compute(value, ctx.type(position), ctx.name(position)))
    return tuple(results) if many else results[0]


@converter("aten._trilinear.default")
def trilinear(
    ctx: ImportContext, a: Tensor, b: Tensor, c: Tensor, expand_a: Sequence[int], expand_b: Sequence[int],
    expand_c: Sequence[int], sums: Sequence[int], unrolled: int = 1,
) -> Tensor:  # fmt: skip
    """``(a * b * c).sum(sums)``, after each has got the dimensions that it is expanded in."""
    operands = tuple(zip((a, b, c), (expand_a, expand_b, expand_c), strict=True))
    rank = a.rank + len(expand_a)
    shape: list[sympy.Expr] = [sympy.S.One] * rank
    for x, expanded in operands:
        for d, n in zip((d for d in range(rank) if d not in expanded), x.shape, strict=True):
            shape[d] = n if shape[d] is sympy.S.One else shape[d]
    domain = ctx.domain(shape, [d % rank for d in sums])
    kind = ctx.type().dtype.compute
    factors = []
    for x, expanded in operands:
        own = [i for d, i in enumerate(domain.indices) if d not in expanded]
        factors.append(ctx.load(x, own, kind))
    value = call("mul", call("mul", factors[0], factors[1]), factors[2])
    (total,) = ctx.reduce(SUM, domain, (value,), a.device)
    return ctx.compute(ctx.at(total, axes(total.rank)))


def _wide_types(ctx: ImportContext) -> tuple[TensorType | None, ...]:
    """The types of the call's results on float32 operands, strides included, as torch itself says."""

    def wide(v: Any) -> Any:
        if not isinstance(v, torch.fx.Node):
            return v
        val = v.meta.get("val")
        return val.float() if isinstance(val, FakeTensor) and val.is_floating_point() else val

    first = next((v for v in (ctx.val if isinstance(ctx.val, (list, tuple)) else (ctx.val,)) if v is not None), None)
    if not isinstance(first, FakeTensor):
        raise NoConversion("a product of half types whose operands are unknown")
    target: Callable[..., Any] = ctx.node.target  # type: ignore[assignment]
    with first.fake_mode:
        args = torch.fx.node.map_aggregate(ctx.node.args, wide)
        found = target(*args, **{k: wide(v) for k, v in ctx.node.kwargs.items()})
    return tuple(
        None if v is None else ctx.sizes.tensor_type(v)
        for v in (found if isinstance(found, (list, tuple)) else (found,))
    )


def _wide(ctx: ImportContext, x: Tensor) -> Tensor:
    """An operand in float32, in the layout that it has."""
    if not x.dtype.is_half:
        return x
    like = TensorType(x.type.shape, x.type.strides, DType.FLOAT32, x.device)
    kind = like if _is_dense(like) else ctx.contiguous(x.shape, DType.FLOAT32, x.device)
    return ctx.compute(ctx.at(x, axes(x.rank)), kind, ctx.fresh("wide"))


def _is_dense(kind: TensorType) -> bool:
    """Whether the elements fill a block of memory, in some order of dimensions."""
    if not all(e.is_Integer for e in (*kind.shape, *kind.strides)):
        return False
    step = 1
    for stride, extent in sorted((int(s), int(e)) for s, e in zip(kind.strides, kind.shape, strict=True) if e != 1):
        if stride != step:
            return False
        step *= extent
    return True


def _argument(value: Any) -> Any:
    return tuple(map(_argument, value)) if isinstance(value, (list, tuple)) else value
