"""Random numbers: one seed a call, drawn by the host, and a counter-based generator inside the kernel.

Source: Salmon et al. 2011 (Philox).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import sympy
import torch

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Const, Expr, Load, Select, call, cast, const
from ....ir.graph.graph import Library, TensorType
from ..context import ImportContext, Scalar, Tensor
from ..registry import NoConversion, converter
from ..terms import axes, convert, index_value, linear_offset


def _sample(ctx: ImportContext, fn: str, kind: TensorType, result: DType) -> Expr:
    """One word of the stream for every element; equal for equal seeds whatever the memory layout."""
    if ctx.fallback_random:
        raise NoConversion("random numbers of eager (fallback_random)")
    place = index_value(linear_offset(kind.shape, axes(len(kind.shape))))
    return call(fn, ctx.seed(kind.device), place, dtype=result)


def uniform(ctx: ImportContext, kind: TensorType) -> Expr:
    """A number in [0, 1) of the compute type, such that rounding to the element type never gives one."""
    if kind.dtype is DType.FLOAT64:
        bits = call("bit_and", _sample(ctx, "randbits", kind, DType.INT64), const((1 << 53) - 1, DType.INT64))
        return call("mul", cast(bits, DType.FLOAT64), Const(2.0**-53, DType.FLOAT64))
    if not kind.dtype.is_float:
        raise NoConversion(f"uniform numbers of type {kind.dtype.value}")
    value = _sample(ctx, "rand", kind, DType.FLOAT32)
    digits = {DType.BFLOAT16: 8, DType.FLOAT16: 11}.get(kind.dtype)
    if digits is None:
        return value
    steps = float(1 << digits)
    return call("mul", call("floor", call("mul", value, const(steps, value.dtype))), const(1 / steps, value.dtype))


def _normal(ctx: ImportContext, kind: TensorType) -> Expr:
    if not kind.dtype.is_float:
        raise NoConversion(f"normal numbers of type {kind.dtype.value}")
    if kind.dtype is DType.FLOAT64:  # Box and Muller's, of two streams that have a double's bits
        one, turn = const(1.0, kind.dtype), const(2 * math.pi, kind.dtype)
        size = call("log", call("sub", one, uniform(ctx, kind)))
        size = call("sqrt", call("mul", size, const(-2.0, kind.dtype)))
        return call("mul", size, call("cos", call("mul", uniform(ctx, kind), turn)))
    return _sample(ctx, "randn", kind, DType.FLOAT32)


def own_generator(generator: Any) -> None:
    """Raises NoConversion for a generator of the user's."""
    if generator is not None:
        raise NoConversion("a generator of the user's")


@converter(
    "aten.rand.default", "aten.rand_like.default", "prims.inductor_random.default", "aten.rand.generator",
)  # fmt: skip
def rand(ctx: ImportContext, *_: Any, generator: Any = None, **__: Any) -> Tensor:
    own_generator(generator)
    return ctx.compute(uniform(ctx, ctx.type()))


@converter("mlc.draw_seeds.default")
def draw_seeds(ctx: ImportContext, count: int, device: Any) -> Tensor:
    kind = ctx.type()
    drawn = (int(count), torch.device(kind.device))
    ctx.nodes.append(Library((ctx.result,), (kind,), "mlc::seeds", drawn, (), "random seeds", ctx.origins))
    return Tensor(ctx.result, kind)


@converter("mlc.uniform.default")
def uniform_of(ctx: ImportContext, seeds: Tensor, stream: int, size: Any) -> Tensor:
    seed = Load(seeds.name, (sympy.Integer(stream),), DType.INT64)
    with ctx.drawing(seed):
        return ctx.compute(_sample(ctx, "rand", ctx.type(), DType.FLOAT32))


def _gaussian(ctx: ImportContext, mean: Tensor | Scalar, std: Tensor | Scalar) -> Expr:
    """An element of the result with a mean and a standard deviation."""
    value, at = _normal(ctx, ctx.type()), axes(len(ctx.type().shape))
    spread = call("mul", value, ctx.value(std, at, value.dtype))
    return call("add", spread, ctx.value(mean, at, value.dtype))


@converter("aten.randn.default", "aten.randn_like.default", "aten.randn.generator")
def randn(ctx: ImportContext, *_: Any, generator: Any = None, **__: Any) -> Tensor:
    own_generator(generator)
    return ctx.compute(_normal(ctx, ctx.type()))


@converter("aten.uniform.default")
def uniform_functional(
    ctx: ImportContext, x: Tensor, low: Scalar = 0.0, high: Scalar = 1.0, *, generator: Any = None
) -> Tensor:
    own_generator(generator)
    kind = ctx.type()
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and kind.dtype.is_float:
        if not low <= high or high - low > torch.finfo(kind.dtype.torch).max:
            raise NoConversion("numbers of no range, or of one beyond their type, which eager refuses")
    value = uniform(ctx, kind)
    start, end = ctx.scalar(low, value.dtype), ctx.scalar(high, value.dtype)
    return ctx.compute(call("add", call("mul", value, call("sub", end, start)), start))


@converter("aten.normal_functional.default")
def normal_functional(
    ctx: ImportContext, x: Tensor, mean: Scalar = 0.0, std: Scalar = 1.0, *, generator: Any = None
) -> Tensor:
    own_generator(generator)
    if isinstance(std, (int, float)) and not std >= 0:
        raise NoConversion("numbers of a negative deviation, which eager refuses")
    return ctx.compute(_gaussian(ctx, mean, std))


@converter(
    "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.float_float"
)
def normal(ctx: ImportContext, mean: Tensor | Scalar, std: Tensor | Scalar = 1.0, *_: Any, **how: Any) -> Tensor:
    own_generator(how.get("generator"))
    return ctx.compute(_gaussian(ctx, mean, std))


@converter("aten.log_normal.default")
def log_normal(
    ctx: ImportContext, x: Tensor, mean: Scalar = 1.0, std: Scalar = 2.0, *, generator: Any = None
) -> Tensor:
    own_generator(generator)
    return ctx.compute(call("exp", _gaussian(ctx, mean, std)))


def _positive(ctx: ImportContext) -> Expr:
    """A number in (0, 1], whatever the type of the result: what is made of it is rounded, not itself."""
    kind = ctx.type()
    if kind.dtype is not DType.FLOAT64:
        kind = replace(kind, dtype=DType.FLOAT32)
    value = uniform(ctx, kind)
    return call("sub", const(1.0, value.dtype), value)


@converter("aten.exponential.default")
def exponential(ctx: ImportContext, x: Tensor, rate: Scalar = 1.0, *, generator: Any = None) -> Tensor:
    own_generator(generator)
    value = _positive(ctx)
    # Never zero, by which users divide.
    size = call("maximum", call("neg", call("log", value)), const(2.0**-25, value.dtype))
    return ctx.compute(call("div", size, ctx.scalar(rate, value.dtype)))


@converter("aten.cauchy.default")
def cauchy(
    ctx: ImportContext, x: Tensor, median: Scalar = 0.0, sigma: Scalar = 1.0, *, generator: Any = None
) -> Tensor:
    own_generator(generator)
    value = _positive(ctx)
    angle = call("mul", call("sub", value, const(0.5, value.dtype)), const(math.pi, value.dtype))
    spread = call("mul", call("tan", angle), ctx.scalar(sigma, value.dtype))
    return ctx.compute(call("add", spread, ctx.scalar(median, value.dtype)))


@converter("aten.geometric.default")
def geometric(ctx: ImportContext, x: Tensor, p: Scalar, *, generator: Any = None) -> Tensor:
    own_generator(generator)
    value = _positive(ctx)
    fails = call("log1p", call("neg", ctx.scalar(p, value.dtype)))
    trials = call("ceil", call("div", call("log", value), fails))
    return ctx.compute(call("maximum", trials, const(1.0, value.dtype)))


@converter("aten.rrelu_with_noise_functional.default")
def rrelu(
    ctx: ImportContext, x: Tensor, noise: Tensor, lower: Scalar = 1 / 8, upper: Scalar = 1 / 3,
    training: bool = False, generator: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In training each negative element has a slope of its own, which is the noise."""
    own_generator(generator)
    at = axes(x.rank)
    v = ctx.at(x, at)
    low, high = ctx.scalar(lower, v.dtype), ctx.scalar(upper, v.dtype)
    negative = call("le", v, const(0, v.dtype))
    if training:
        share = convert(uniform(ctx, ctx.type(1)), v.dtype)
        slope = call("add", call("mul", share, call("sub", high, low)), low)
        made = ctx.compute(Select(negative, slope, const(1, v.dtype)), ctx.type(1), ctx.name(1))
        slope = ctx.at(made, at)
    else:
        made = ctx.compute(ctx.at(noise, at, noise.dtype), ctx.type(1), ctx.name(1))
        slope = call("mul", call("add", low, high), const(0.5, v.dtype))
    return ctx.compute(Select(negative, call("mul", v, slope), v), ctx.type(0), ctx.name(0)), made


@converter("aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.bernoulli.default")
def bernoulli(ctx: ImportContext, x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    own_generator(generator)
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise NoConversion("a chance that is none, which eager refuses")
    kind = ctx.type()
    sample = _sample(ctx, "rand", kind, DType.FLOAT32)
    chance = ctx.value(x if p is None else p, axes(len(kind.shape)), DType.FLOAT32)
    return ctx.compute(convert(call("lt", sample, chance), kind.dtype.compute))


@converter("aten.native_dropout.default")
def native_dropout(ctx: ImportContext, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    out, mask_type = ctx.type(0), ctx.type(1)
    at = axes(x.rank)
    if train is False:
        ones = ctx.compute(const(True, DType.BOOL), mask_type, ctx.name(1))
        return ctx.compute(ctx.at(x, at, x.dtype), out, ctx.name(0)), ones
    keep = call("lt", _sample(ctx, "rand", mask_type, DType.FLOAT32), const(1.0 - p, DType.FLOAT32))
    mask = ctx.compute(keep, mask_type, ctx.name(1))
    value = ctx.at(x, at)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    kept = call("mul", value, convert(ctx.at(mask, at), value.dtype))
    return ctx.compute(call("mul", kept, const(scale, value.dtype)), out, ctx.name(0)), mask


@converter("aten.native_dropout_backward.default")
def native_dropout_backward(ctx: ImportContext, grad: Tensor, mask: Tensor, scale: Scalar) -> Tensor:
    at, kind = axes(grad.rank), ctx.type().dtype.compute
    kept = call("mul", ctx.at(grad, at, kind), convert(ctx.at(mask, at), kind))
    return ctx.compute(call("mul", kept, ctx.scalar(scale, kind)))


def _integers(ctx: ImportContext, low: Any, high: Any) -> Tensor:
    kind = ctx.type()
    if isinstance(low, int) and isinstance(high, int) and kind.dtype is not DType.BOOL:
        info = torch.finfo(kind.dtype.torch) if kind.dtype.is_float else torch.iinfo(kind.dtype.torch)
        if low < info.min or high - 1 > info.max:
            raise NoConversion("integers that their type does not hold, which eager refuses")
        if high - low >= 1 << 63:
            raise NoConversion("integers of a range that is no int64")
    bits = call("bit_and", _sample(ctx, "randbits", kind, DType.INT64), const((1 << 63) - 1, DType.INT64))
    start, end = ctx.scalar(low, DType.INT64), ctx.scalar(high, DType.INT64)
    return ctx.compute(call("add", call("remainder", bits, call("sub", end, start)), start))


@converter("aten.randint.default", "aten.randint_like.default")
def randint(ctx: ImportContext, *args: Any, **_: Any) -> Tensor:
    # (high, size) and (x, high) alike.
    high = args[1] if isinstance(args[0], Tensor) else args[0]
    return _integers(ctx, 0, high)


@converter("aten.randint.low", "aten.randint_like.low_dtype")
def randint_low(ctx: ImportContext, *args: Any, **_: Any) -> Tensor:
    low, high = args[1:3] if isinstance(args[0], Tensor) else args[0:2]
    return _integers(ctx, low, high)
