"""Comparisons, logic, bits and selection."""

from __future__ import annotations

import sympy
import torch

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Select, call, cast, const
from ..context import ImportContext, Scalar, Tensor
from ..registry import converter
from ..terms import axes, convert, rounded
from .elementwise import ensure_held

Operand = Tensor | Scalar

_NEGATED_XOR = {"eq": True, "ne": False}


def promoted(a: Operand, b: Operand) -> DType:
    """The type in which torch compares two operands: tensors with dims win over scalar tensors, those over numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is b.dtype:
        return a.dtype
    groups: list[torch.dtype | None] = [None, None, None]
    for x in (a, b):
        if isinstance(x, Tensor):
            rank, dtype = (0 if x.rank else 1), x.dtype.torch
        else:
            rank, dtype = 2, _number_type(x)
        known = groups[rank]
        groups[rank] = dtype if known is None else torch.promote_types(known, dtype)
    result: torch.dtype | None = None
    for dtype in groups:
        if dtype is not None and (result is None or _category(dtype) > _category(result)):
            result = dtype
    assert result is not None
    return DType.from_torch(result)


def _number_type(x: Scalar) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int) or (isinstance(x, sympy.Expr) and x.is_integer):
        return torch.int64
    return torch.get_default_dtype()


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 1 if not dtype.is_floating_point and not dtype.is_complex else 2


def in_half(x: Operand, dtype: DType) -> Operand:
    """A literal beside a half type, where eager makes it one before it computes."""
    if dtype.is_half and isinstance(x, (int, float)):
        return float(torch.tensor(x, dtype=dtype.torch).item())
    return x


def compare(fn: str, a: Expr, b: Expr) -> Expr:
    """A comparison of two values of one type, bools included."""
    if a.dtype is not DType.BOOL:
        return call(fn, a, b)
    if fn in _NEGATED_XOR:
        differs = call("logical_xor", a, b)
        return call("logical_not", differs) if _NEGATED_XOR[fn] else differs
    return call(fn, cast(a, DType.INT32), cast(b, DType.INT32))


def _register_comparison(fn: str) -> None:
    @converter(f"aten.{fn}.Tensor", f"aten.{fn}.Scalar")
    def comparison(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
        kind = promoted(a, b)
        # A tensor of another type, without dimensions, is compared in the half type that it is promoted to.
        wider = [kind.is_half and isinstance(v, Tensor) and v.dtype is not kind for v in (a, b)]

        def value(*operands: Expr) -> Expr:
            return compare(fn, *(rounded(v, kind) if w else v for v, w in zip(operands, wider, strict=True)))

        return ctx.pointwise(value, in_half(a, kind), in_half(b, kind), dtype=kind.compute)


for _fn in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register_comparison(_fn)


def _truth(ctx: ImportContext, x: Tensor) -> Expr:
    return convert(ctx.load(x, axes(len(ctx.type().shape))), DType.BOOL)


def _register_logical(fn: str) -> None:
    @converter(f"aten.{fn}.default")
    def logical(ctx: ImportContext, *operands: Tensor) -> Tensor:
        return ctx.compute(call(fn, *(_truth(ctx, x) for x in operands)))


for _fn in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    _register_logical(_fn)


def _register_classification(fn: str) -> None:
    @converter(f"aten.{fn}.default")
    def classify(ctx: ImportContext, x: Tensor) -> Tensor:
        v = ctx.load(x, axes(x.rank))
        return ctx.compute(call(fn, v) if v.dtype.is_float else const(False, DType.BOOL))


for _fn in ("isnan", "isinf"):
    _register_classification(_fn)

_BITS = {
    "bitwise_and": ("bit_and", "logical_and"),
    "bitwise_or": ("bit_or", "logical_or"),
    "bitwise_xor": ("bit_xor", "logical_xor"),
}


def _register_bits(name: str, on_integers: str, on_bools: str) -> None:
    @converter(f"aten.{name}.Tensor", f"aten.{name}.Scalar", f"aten.{name}.Scalar_Tensor")
    def bits(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
        return ctx.pointwise(lambda x, y: call(on_bools if x.dtype is DType.BOOL else on_integers, x, y), a, b)


for _name, (_ints, _bools) in _BITS.items():
    _register_bits(_name, _ints, _bools)


@converter("aten.bitwise_not.default")
def bitwise_not(ctx: ImportContext, x: Tensor) -> Tensor:
    return ctx.pointwise(lambda v: call("logical_not" if v.dtype is DType.BOOL else "bit_not", v), x)


def _register_shift(name: str, fn: str) -> None:
    dunder = "__lshift__" if fn == "shl" else "__rshift__"

    @converter(
        *(f"aten.{name}.{overload}" for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
        *(f"aten.{dunder}.{overload}" for overload in ("Tensor", "Scalar")),
    )
    def shift(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
        def shifted(v: Expr, by: Expr) -> Expr:
            # Shifts by the width or more are defined in torch: everything is shifted out.
            width = const(v.dtype.bits, v.dtype)
            inside = call("lt", by, width)
            if v.dtype.is_signed:
                inside = call("logical_and", inside, call("ge", by, const(0, v.dtype)))
            last = const(v.dtype.bits - 1, v.dtype)
            out = call("shr", v, last) if fn == "shr" and v.dtype.is_signed else const(0, v.dtype)
            return Select(inside, call(fn, v, by), out)

        return ctx.pointwise(shifted, a, b)


_register_shift("bitwise_left_shift", "shl")
_register_shift("bitwise_right_shift", "shr")


@converter("aten.where.self")
def where(ctx: ImportContext, condition: Tensor, a: Operand, b: Operand) -> Tensor:
    kind = ctx.type().dtype.compute
    at = axes(len(ctx.type().shape))
    device = ctx.type().device
    a, b, condition = (ctx.local(x, device) if isinstance(x, Tensor) else x for x in (a, b, condition))  # type: ignore[assignment]
    chosen = Select(convert(ctx.load(condition, at), DType.BOOL), ctx.value(a, at, kind), ctx.value(b, at, kind))
    return ctx.compute(chosen)


@converter("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(ctx: ImportContext, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    out = ctx.type()
    ensure_held(value, out.dtype)
    at = axes(len(out.shape))
    if isinstance(value, Tensor):
        value = ctx.local(value, out.device)
    filled = ctx.value(value, at, out.dtype.compute)
    return ctx.compute(Select(convert(ctx.load(mask, at), DType.BOOL), filled, ctx.load(x, at, out.dtype.compute)))
