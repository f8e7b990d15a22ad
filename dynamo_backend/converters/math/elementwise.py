"""Arithmetic and activation functions: one element of the result from one element of each operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy
import torch

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Const, Expr, Select, call, cast, const
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, convert

Operand = Tensor | Scalar

# Functions of the table that give a float for integers too.
_FLOAT_UNARY = (
    *("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "tanh"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "erfinv", "lgamma", "digamma"),
)
_ROUNDING = ["floor", "ceil", "trunc"]
_FLOAT_BINARY = ["atan2", "hypot", "copysign", "nextafter"]


def _register_unary(name: str, targets: tuple[str, ...], fn: Callable[[Expr], Expr]) -> None:
    @converter(*targets)
    def unary(ctx: ImportContext, x: Tensor) -> Tensor:
        return ctx.pointwise(fn, x)

    unary.__name__ = name


def _rounded_to(ctx: ImportContext) -> DType | None:
    """The half type in which eager's kernels for CPUs take all operands of the current node, numbers too and scalars of
    wider types; None elsewhere, and where rounding need not be eager's."""
    kind = ctx.type()
    return kind.dtype if ctx.numerics == "eager" and kind.dtype.is_half and kind.device == "cpu" else None


def _number(ctx: ImportContext, x: Scalar) -> Scalar:
    """A number as eager's kernels take it."""
    half = _rounded_to(ctx)
    return x if half is None or not isinstance(x, float) else half.rounded(x)


def _of_one_type(ctx: ImportContext, fn: Callable[..., Expr], *operands: Operand) -> Tensor:
    """``fn`` of operands as eager's kernels take them. Those of products and quotients are as they are given."""
    half = _rounded_to(ctx)
    if half is None:
        return ctx.pointwise(fn, *operands)
    others = [not isinstance(x, Tensor) or x.dtype is not half for x in operands]

    def rounded(*values: Expr) -> Expr:
        return fn(*(cast(cast(v, half), v.dtype) if other else v for v, other in zip(values, others, strict=True)))

    return ctx.pointwise(rounded, *operands)


def _register_binary(name: str, targets: tuple[str, ...], fn: Callable[[Expr, Expr], Expr]) -> None:
    @converter(*targets)
    def binary(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
        if name == "nextafter" and ctx.type().dtype.is_half:
            raise NoConversion("the next number of a half type, which is no neighbour in float32")
        return ctx.pointwise(fn, a, b) if name in ("mul", "div") else _of_one_type(ctx, fn, a, b)

    binary.__name__ = name


def _rounding(name: str) -> Callable[[Expr], Expr]:
    return lambda v: call(name, v) if v.dtype.is_float else v


def _sign(v: Expr) -> Expr:
    return v if v.dtype is DType.BOOL else call("sign", v)


def _absolute(v: Expr) -> Expr:
    return call("abs", v) if v.dtype.is_signed else v


def relu(v: Expr) -> Expr:
    return call("maximum", v, const(0, v.dtype)) if v.dtype.is_signed else v


def ensure_held(x: Operand | None, dtype: DType) -> None:
    """Raises NoConversion for a number that eager refuses to make one of ``dtype``, since it is beyond that type."""
    if isinstance(x, (int, float)) and not _is_held(x, dtype):
        raise NoConversion(f"a number that {dtype!r} does not hold, which is an error")


def ensure_bound(x: Operand | None, dtype: DType) -> None:
    """Raises NoConversion for a bound that an integer type does not hold: eager refuses it, takes the integer of the
    same bits, or leaves the bound out, by torch's version.
    """
    ensure_held(x, dtype)
    if isinstance(x, int) and not dtype.is_float and dtype is not DType.BOOL:
        info = torch.iinfo(dtype.torch)
        if not info.min <= x <= info.max:
            raise NoConversion(f"a bound that {dtype!r} does not hold")


def _is_held(x: float, dtype: DType) -> bool:
    """As ``c10::overflows`` has it: integers become unsigned ones of their size, infinities and NaN floats of any."""
    if dtype is DType.BOOL or isinstance(x, bool) or (dtype.bits < 16 and dtype.is_float):
        return True
    if dtype.is_float:
        return not abs(x) > torch.finfo(dtype.torch).max or math.isinf(x)
    info = torch.iinfo(dtype.torch)
    low = -info.max if info.min == 0 and isinstance(x, int) else info.min
    return low <= x <= info.max


def number(value: float, like: Expr) -> Const:
    """A literal of the type of another expression."""
    return const(value, like.dtype)


for _name in _FLOAT_UNARY:
    _register_unary(_name, (f"aten.{_name}.default",), lambda v, fn=_name: call(fn, v))  # type: ignore[misc]
for _name in _ROUNDING:
    _register_unary(_name, (f"aten.{_name}.default",), _rounding(_name))
_register_unary("round", ("aten.round.default",), _rounding("round"))
_register_unary("neg", ("aten.neg.default",), lambda v: call("neg", v))
_register_unary("sign", ("aten.sign.default", "aten.sgn.default"), _sign)
_register_unary("abs", ("aten.abs.default",), _absolute)
_register_unary("relu", ("aten.relu.default",), relu)
_register_unary("square", ("aten.square.default",), lambda v: call("mul", v, v))


def add(a: Expr, b: Expr) -> Expr:
    return call("logical_or" if a.dtype is DType.BOOL else "add", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return call("logical_and" if a.dtype is DType.BOOL else "mul", a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    return call("logical_or" if a.dtype is DType.BOOL else "maximum", a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    return call("logical_and" if a.dtype is DType.BOOL else "minimum", a, b)


_register_binary("gcd", ("aten.gcd.default",), lambda a, b: call("gcd", a, b))
_register_binary("mul", ("aten.mul.Tensor", "aten.mul.Scalar"), mul)
_register_binary(
    "div", ("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"), lambda a, b: call("div", a, b)
)
_register_binary("maximum", ("aten.maximum.default",), maximum)
_register_binary("minimum", ("aten.minimum.default",), minimum)
_register_binary("fmax", ("aten.fmax.default",), lambda a, b: call("fmax" if a.dtype.is_float else "maximum", a, b))
_register_binary("fmin", ("aten.fmin.default",), lambda a, b: call("fmin" if a.dtype.is_float else "minimum", a, b))
for _name in _FLOAT_BINARY:
    _targets = tuple(f"aten.{_name}.{overload}" for overload in ("default", "Tensor", "Scalar"))
    _register_binary(_name, _targets, lambda a, b, fn=_name: call(fn, a, b))  # type: ignore[misc]


def _scaled(ctx: ImportContext, v: Expr, alpha: Scalar) -> Expr:
    return v if isinstance(alpha, (int, float)) and alpha == 1 else mul(v, ctx.scalar(alpha, v.dtype))


@converter("aten.add.Tensor", "aten.add.Scalar")
def add_alpha(ctx: ImportContext, a: Operand, b: Operand, alpha_: Scalar = 1, *, alpha: Scalar | None = None) -> Tensor:
    scale = _number(ctx, alpha_ if alpha is None else alpha)
    return _of_one_type(ctx, lambda x, y: add(x, _scaled(ctx, y, scale)), a, b)


@converter("aten.sub.Tensor", "aten.sub.Scalar")
def sub_alpha(ctx: ImportContext, a: Operand, b: Operand, alpha_: Scalar = 1, *, alpha: Scalar | None = None) -> Tensor:
    _ensure_subtracted(a, b)
    scale = _number(ctx, alpha_ if alpha is None else alpha)
    return _of_one_type(ctx, lambda x, y: call("sub", x, _scaled(ctx, y, scale)), a, b)


@converter("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(ctx: ImportContext, a: Operand, b: Operand, alpha: Scalar = 1) -> Tensor:
    _ensure_subtracted(a, b)
    scale = _number(ctx, alpha)
    return _of_one_type(ctx, lambda x, y: call("sub", y, _scaled(ctx, x, scale)), a, b)


def _ensure_subtracted(*operands: Operand) -> None:
    """Truth values are not, by eager's ops of any device."""
    if any(isinstance(x, Tensor) and x.dtype is DType.BOOL for x in operands):
        raise NoConversion("a difference of truth values")


@converter("prims.fma.default")
def fma(ctx: ImportContext, a: Operand, b: Operand, c: Operand) -> Tensor:
    """Into it torch takes ``addcmul`` and the like apart."""
    if not ctx.type().dtype.is_float:
        raise NoConversion("fused multiply-add of integers")
    return ctx.pointwise(lambda x, y, z: call("fma", x, y, z), a, b, c)


def integer_power(v: Expr, exponent: int) -> Expr:
    """``v ** exponent`` by products, for a small non-negative exponent."""
    if exponent == 0:
        return number(1, v)
    half = integer_power(v, exponent // 2) if exponent > 1 else None
    squared = call("mul", half, half) if half is not None else None
    if squared is None:
        return v
    return call("mul", squared, v) if exponent % 2 else squared


def _power(v: Expr, exponent: float) -> Expr:
    if not v.dtype.is_float:
        if exponent != int(exponent) or exponent < 0:
            raise NoConversion("fractional power of integers, or a negative one, which is an error")
        ensure_held(exponent, v.dtype)
        small = 0 <= exponent <= 16
        return integer_power(v, int(exponent)) if small else call("pow", v, number(exponent, v))
    if exponent in (0, 1, 2, 3, 4):
        return integer_power(v, int(exponent))
    if exponent == 0.5:
        return call("sqrt", v)
    if exponent == -0.5:
        return call("rsqrt", v)
    if exponent == -1:
        return call("reciprocal", v)
    if exponent == -2:
        return call("reciprocal", call("mul", v, v))
    return call("pow", v, number(exponent, v))


@converter("aten.pow.Tensor_Scalar")
def pow_scalar(ctx: ImportContext, x: Tensor, exponent: Scalar) -> Tensor:
    if isinstance(exponent, sympy.Expr):
        return ctx.pointwise(_general_power, x, exponent)
    power = _number(ctx, exponent)
    return ctx.pointwise(lambda v: _power(v, power), x)  # type: ignore[arg-type]


def _general_power(a: Expr, b: Expr) -> Expr:
    if a.dtype is DType.BOOL:
        return call("logical_or", a, call("logical_not", b))
    return call("pow", a, b)


@converter("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_tensor(ctx: ImportContext, a: Operand, b: Operand) -> Tensor:
    return _of_one_type(ctx, _general_power, a, b)


@converter("aten.round.decimals")
def round_decimals(ctx: ImportContext, x: Tensor, *, decimals: int) -> Tensor:
    def fn(v: Expr) -> Expr:
        power = number(float(f"1e{abs(decimals)}"), v)  # infinity, where it is no number
        there, back = ("mul", "div") if decimals >= 0 else ("div", "mul")
        return call(back, call("round", call(there, v, power)), power)

    return ctx.pointwise(fn, x) if ctx.type().dtype.is_float else _identity(ctx, x)


@converter("aten.signbit.default")
def signbit(ctx: ImportContext, x: Tensor) -> Tensor:
    v = ctx.load(x, axes(x.rank))
    if v.dtype.is_float:
        v = call("bitcast", v, dtype=DType.INT64 if v.dtype is DType.FLOAT64 else DType.INT32)
    return ctx.compute(call("lt", v, number(0, v)) if v.dtype.is_signed else const(False, DType.BOOL))


@converter("aten.angle.default")
def angle(ctx: ImportContext, x: Tensor) -> Tensor:
    """Of real numbers: pi left of zero, NaN for NaN."""

    def fn(v: Expr) -> Expr:
        value: Expr = Select(call("lt", v, number(0, v)), number(math.pi, v), number(0, v))
        return Select(call("isnan", v), v, value)

    return ctx.pointwise(fn, x)


@converter("aten.frexp.Tensor")
def frexp(ctx: ImportContext, x: Tensor) -> tuple[Tensor, Tensor]:
    """``x = mantissa * 2 ** exponent`` with a mantissa from a half to one; zeros, NaN and infinities are mantissas."""
    kind, bits = DType.FLOAT64, DType.INT64
    value = convert(ctx.load(x, axes(x.rank)), kind)
    # Subnormals become normal first; of narrower types float64 has none.
    tiny = call("lt", call("abs", value), number(2.0**-1022, value))
    scaled = Select(tiny, call("mul", value, number(2.0**54, value)), value)
    pattern = call("bitcast", scaled, dtype=bits)
    exponent = call("bit_and", call("shr", pattern, const(52, bits)), const(0x7FF, bits))
    fraction = call("bit_or", call("bit_and", pattern, const(~(0x7FF << 52), bits)), const(1022 << 52, bits))
    size = call("abs", value)
    plain = call("logical_and", call("gt", size, number(0, value)), call("lt", size, number(math.inf, value)))
    mantissa = Select(plain, call("bitcast", fraction, dtype=kind), value)
    moved = call("sub", exponent, Select(tiny, const(1022 + 54, bits), const(1022, bits)))
    power = Select(plain, moved, const(0, bits))
    return ctx.compute(mantissa, ctx.type(0), ctx.name(0)), ctx.compute(power, ctx.type(1), ctx.name(1))


@converter("aten.clamp.default", "aten.clamp.Tensor", "aten.hardtanh.default")
def clamp(ctx: ImportContext, x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    if ctx.node.target._opname == "hardtanh":  # type: ignore[union-attr]
        min, max = -1.0 if min is None else min, 1.0 if max is None else max
    out = ctx.type()
    bounds = [b for b in (min, max) if b is not None]
    for b in bounds:
        ensure_bound(b, out.dtype)

    def fn(v: Expr, *given: Expr) -> Expr:
        rest = list(given)
        if min is not None:
            v = maximum(v, rest.pop(0))
        return minimum(v, rest.pop(0)) if max is not None else v

    return ctx.pointwise(fn, x, *bounds, dtype=out.dtype.compute)


@converter("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(ctx: ImportContext, x: Tensor, bound: Operand) -> Tensor:
    ensure_bound(bound, ctx.type().dtype)
    return ctx.pointwise(maximum, x, bound)


@converter("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(ctx: ImportContext, x: Tensor, bound: Operand) -> Tensor:
    ensure_bound(bound, ctx.type().dtype)
    return ctx.pointwise(minimum, x, bound)


# --- activations and their backward
# -------------------------------------------------------------------------------------

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_SIXTH = float(np.float32(1 / 6))


def _times(v: Expr, factor: float) -> Expr:
    return call("mul", v, number(factor, v))


def _one_minus(v: Expr) -> Expr:
    return call("sub", number(1, v), v)


def _normal_cdf(v: Expr) -> Expr:
    return _times(call("add", call("erf", _times(v, _SQRT_HALF)), number(1, v)), 0.5)


def _gelu_inner(v: Expr) -> Expr:
    cube = call("mul", call("mul", v, v), v)
    return _times(call("add", v, _times(cube, _CUBIC)), _SQRT_2_OVER_PI)


@converter("aten.gelu.default")
def gelu(ctx: ImportContext, x: Tensor, *, approximate: str = "none") -> Tensor:
    def fn(v: Expr) -> Expr:
        if approximate == "none":
            return call("mul", v, _normal_cdf(v))
        return call("mul", _times(v, 0.5), call("add", call("tanh", _gelu_inner(v)), number(1, v)))

    return ctx.pointwise(fn, x)


@converter("aten.gelu_backward.default")
def gelu_backward(ctx: ImportContext, grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    def fn(g: Expr, v: Expr) -> Expr:
        if approximate == "none":
            density = _times(call("exp", _times(call("mul", v, v), -0.5)), 1 / math.sqrt(2 * math.pi))
            return call("mul", g, call("add", _normal_cdf(v), call("mul", v, density)))
        # sech² = 1 - tanh², with the hyperbolic tangent of the inner polynomial.
        t = call("tanh", _gelu_inner(v))
        slope = _times(call("add", _times(call("mul", v, v), 3 * _CUBIC), number(1, v)), _SQRT_2_OVER_PI)
        left = _times(call("add", t, number(1, v)), 0.5)
        right = call("mul", call("mul", _times(v, 0.5), _one_minus(call("mul", t, t))), slope)
        return call("mul", g, call("add", left, right))

    return ctx.pointwise(fn, grad, x)


@converter("aten.silu.default")
def silu(ctx: ImportContext, x: Tensor) -> Tensor:
    return ctx.pointwise(lambda v: call("mul", v, call("sigmoid", v)), x)


@converter("aten.silu_backward.default")
def silu_backward(ctx: ImportContext, grad: Tensor, x: Tensor) -> Tensor:
    def fn(g: Expr, v: Expr) -> Expr:
        s = call("sigmoid", v)
        inner = call("add", call("mul", v, _one_minus(s)), number(1, v))
        return call("mul", g, call("mul", s, inner))

    return ctx.pointwise(fn, grad, x)


@converter("aten.sigmoid_backward.default")
def sigmoid_backward(ctx: ImportContext, grad: Tensor, y: Tensor) -> Tensor:
    return ctx.pointwise(lambda g, v: call("mul", g, call("mul", v, _one_minus(v))), grad, y)


@converter("aten.tanh_backward.default")
def tanh_backward(ctx: ImportContext, grad: Tensor, y: Tensor) -> Tensor:
    return ctx.pointwise(lambda g, v: call("mul", g, _one_minus(call("mul", v, v))), grad, y)


@converter("aten.threshold_backward.default")
def threshold_backward(ctx: ImportContext, grad: Tensor, x: Tensor, threshold: Scalar) -> Tensor:
    return ctx.pointwise(lambda g, v: Select(call("le", v, ctx.scalar(threshold, v.dtype)), number(0, g), g), grad, x)


@converter("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(ctx: ImportContext, grad: Tensor, x: Tensor) -> Tensor:
    """With the sixth of eager's, which is one of float32 for float64 too."""

    def fn(g: Expr, v: Expr) -> Expr:
        steep = call("logical_and", call("gt", v, number(-3, v)), call("lt", v, number(3, v)))
        return Select(steep, _times(g, _SIXTH), number(0, g))

    return ctx.pointwise(fn, grad, x)


@converter("aten.leaky_relu.default")
def leaky_relu(ctx: ImportContext, x: Tensor, slope: Scalar = 0.01) -> Tensor:
    return ctx.pointwise(
        lambda v: Select(call("gt", v, number(0, v)), v, call("mul", v, ctx.scalar(slope, v.dtype))), x
    )


@converter("aten.leaky_relu_backward.default")
def leaky_relu_backward(ctx: ImportContext, grad: Tensor, x: Tensor, slope: Scalar, is_result: bool) -> Tensor:
    return ctx.pointwise(
        lambda g, v: Select(call("gt", v, number(0, v)), g, call("mul", g, ctx.scalar(slope, g.dtype))), grad, x
    )


@converter("aten.elu.default")
def elu(ctx: ImportContext, x: Tensor, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Tensor:
    def fn(v: Expr) -> Expr:
        low = _times(call("expm1", _times(v, input_scale)), alpha * scale)
        return Select(call("gt", v, number(0, v)), _times(v, scale), low)

    return ctx.pointwise(fn, x)


# --- copies and casts
# ---------------------------------------------------------------------------------------------------


@converter("aten.clone.default", "aten.lift_fresh_copy.default", "aten.contiguous.default")
def clone(ctx: ImportContext, x: Tensor, *, memory_format: Any = None) -> Tensor:
    return _identity(ctx, x)


@converter("prims.convert_element_type.default")
def convert_element_type(ctx: ImportContext, x: Tensor, dtype: Any) -> Tensor:
    return _identity(ctx, x)


@converter("aten._to_copy.default")
def to_copy(ctx: ImportContext, x: Operand, **options: Any) -> Tensor:
    return _identity(ctx, x)


@converter("aten.copy.default")
def copy(ctx: ImportContext, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    ctx.own_places()
    return _identity(ctx, source)


@converter("aten.copy_.default")
def copy_over(ctx: ImportContext, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    # Nothing, or what is there already.
    if any(extent.is_zero for extent in destination.type.shape) or source.name == destination.name:
        return destination
    raise NoConversion("a value that is written over an argument")


@converter("aten.fill.Scalar", "aten.fill.Tensor")
def fill(ctx: ImportContext, x: Tensor, value: Operand) -> Tensor:
    ensure_held(value, ctx.type().dtype)
    return ctx.pointwise(lambda v: v, value)


def _identity(ctx: ImportContext, x: Operand) -> Tensor:
    if not isinstance(x, Tensor):  # torch's own scans cast plain numbers
        return ctx.pointwise(lambda v: v, x)
    out = ctx.type()
    if x.device != out.device:
        raise NoConversion("copy between devices")
    return ctx.compute(ctx.load(x, axes(len(out.shape)), x.dtype), out)
