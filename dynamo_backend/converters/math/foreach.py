"""Ops over lists of tensors: one node for each tensor, by the converter of the op that they repeat.

Optimizers are written so. Nothing here decides what shares a kernel: equal small functions that do not depend on one
another are brought together after fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Select, call, const
from ..context import ImportContext, Scalar, Tensor
from ..registry import CONVERTERS, NoConversion, converter

# The op over lists, and the op over one tensor that has the same arguments.
_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "clone", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "lgamma"),
    *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)
_BINARY = {
    "add": "aten.add.Tensor",
    "sub": "aten.sub.Tensor",
    "mul": "aten.mul.Tensor",
    "div": "aten.div.Tensor",
    "clamp_min": "aten.clamp_min.default",
    "clamp_max": "aten.clamp_max.default",
    "maximum": "aten.maximum.default",
    "minimum": "aten.minimum.default",
}


def _each(ctx: ImportContext, fn: Callable[..., Tensor], lists: Sequence[Any], **kwargs: Any) -> tuple[Tensor, ...]:
    """``fn`` of the k-th entries, for every k; what is no list is the same for all."""
    count = len(ctx.val)
    results = []
    for k in range(count):
        with ctx.result_of(k):
            results.append(fn(ctx, *(x[k] if isinstance(x, (list, tuple)) else x for x in lists), **kwargs))
    return tuple(results)


def _register(target: str, one: Callable[..., Tensor]) -> None:
    @converter(target)
    def foreach(ctx: ImportContext, *lists: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return _each(ctx, one, lists, **kwargs)


def _broadcast_scalar(one: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A list of tensors with one tensor that has a single element."""

    def fn(ctx: ImportContext, x: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
        if other.rank:
            raise NoConversion("a list of tensors with one tensor that is no scalar")
        return one(ctx, x, other, **kwargs)

    return fn


for _name in _UNARY:
    _register(f"aten._foreach_{_name}.default", CONVERTERS[f"aten.{_name}.default"])
for _name, _one in _BINARY.items():
    for _overload in ("Scalar", "List", "ScalarList"):
        _register(f"aten._foreach_{_name}.{_overload}", CONVERTERS[_one])
for _name in ("add", "mul", "div"):
    _register(f"aten._foreach_{_name}.Tensor", _broadcast_scalar(CONVERTERS[_BINARY[_name]]))
for _overload in ("Scalar", "ScalarList"):
    _register(f"aten._foreach_pow.{_overload}", CONVERTERS["aten.pow.Tensor_Scalar"])
_register("aten._foreach_pow.List", CONVERTERS["aten.pow.Tensor_Tensor"])
_register("aten._foreach_pow.ScalarAndTensor", CONVERTERS["aten.pow.Scalar"])


def _zero(ctx: ImportContext, x: Tensor) -> Tensor:
    kind = ctx.type()
    return ctx.compute(const(0, kind.dtype.compute), kind)


def _copy(ctx: ImportContext, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copy: Callable[..., Tensor] = CONVERTERS["aten.copy.default"]
    return copy(ctx, x, source)


_register("aten._foreach_zero.default", _zero)
_register("aten._foreach_copy.default", _copy)


# --- three operands -------------------------------------------------------------------------------------------------


def _add_scaled(fn: str) -> Callable[..., Tensor]:
    """``self + value * fn(tensor1, tensor2)``, in the order in which eager computes it."""

    def one(ctx: ImportContext, x: Tensor, a: Tensor, b: Tensor, value: Scalar = 1) -> Tensor:
        def element(v: Expr, p: Expr, q: Expr) -> Expr:
            if isinstance(value, (int, float)) and value == 1:
                return call("add", v, call(fn, p, q))
            return call("add", v, call(fn, call("mul", ctx.scalar(value, v.dtype), p), q))

        if ctx.type().dtype is DType.BOOL or not ctx.type().dtype.is_float:
            raise NoConversion("products of integers in lists")
        return ctx.pointwise(element, x, a, b)

    return one


for _name, _fn in (("addcmul", "mul"), ("addcdiv", "div")):
    for _overload in ("Scalar", "ScalarList"):
        _register(f"aten._foreach_{_name}.{_overload}", _add_scaled(_fn))


def _lerp(ctx: ImportContext, start: Tensor, end: Tensor, weight: Tensor | Scalar) -> Tensor:
    """From the nearer end, as eager does, so that both ends are exact."""

    def element(a: Expr, b: Expr, w: Expr) -> Expr:
        span = call("sub", b, a)
        near, far = call("add", a, call("mul", w, span)), call("sub", b, call("mul", span, call("sub", one_of(w), w)))
        if isinstance(weight, (int, float)):
            return near if abs(weight) < 0.5 else far
        return Select(call("lt", call("abs", w), const(0.5, w.dtype)), near, far)

    return ctx.pointwise(element, start, end, weight)


def one_of(like: Expr) -> Expr:
    """The number one in the type of another expression."""
    return const(1, like.dtype)


for _overload in ("List", "Scalar", "ScalarList"):
    _register(f"aten._foreach_lerp.{_overload}", _lerp)


def _norm(ctx: ImportContext, x: Tensor, ord: Scalar = 2, dtype: Any = None) -> Tensor:
    norm: Callable[..., Tensor] = CONVERTERS["aten.linalg_vector_norm.default"]
    return norm(ctx, x, ord, None, False, dtype=dtype)


_register("aten._foreach_norm.Scalar", _norm)
