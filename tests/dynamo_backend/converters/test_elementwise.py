"""Elementwise converters equal eager: types, shapes, broadcasting, special values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.7, float("inf"), float("-inf"), float("nan"), 1e-3, 12.25]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def special(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(SPECIAL).to(dtype)


def integers(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, 2, 3, 5, 7, 100, info.max, info.min, info.max - 1], dtype=dtype)


UNARY: dict[str, Callable[[torch.Tensor], Any]] = {
    name: getattr(torch, name)
    for name in (
        *("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
        *("sigmoid", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"),
        *("asinh", "acosh", "atanh", "erf", "erfc", "neg", "abs", "sign", "floor", "ceil"),
        *("trunc", "round", "relu", "square", "isnan", "isinf", "isfinite", "logical_not"),
    )
} | {
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": lambda x: torch.nn.functional.silu(x),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    "elu": lambda x: torch.nn.functional.elu(x, 0.7),
    "softplus": lambda x: torch.nn.functional.softplus(x),
    "hardswish": lambda x: torch.nn.functional.hardswish(x),
    "hardsigmoid": lambda x: torch.nn.functional.hardsigmoid(x),
    "mish": lambda x: torch.nn.functional.mish(x),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x),
    "clamp": lambda x: x.clamp(-0.5, 2),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_-2": lambda x: x**-2,
    "pow_1.5": lambda x: x**1.5,
    "rpow": lambda x: 2.0**x,
    "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 3 / x,
    "to_int": lambda x: x.nan_to_num(0, 5, -5).to(torch.int32),
    "to_bool": lambda x: x.to(torch.bool),
    "to_half": lambda x: x.to(torch.bfloat16),
    "to_double": lambda x: x.to(torch.float64),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.5),
    "where": lambda x: torch.where(x > 0.1, x, 2.5),
}


# With AVX-512, torch's kernel for float32 makes NaN of an infinity, which that for float64 keeps.
EXACT = {"gelu": lambda x: torch.nn.functional.gelu(x.double()).to(x.dtype)}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unary_of_floats(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    check(UNARY[name], special(dtype), exact=EXACT.get(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_unary_of_other_floats(check: Callable[..., Any], dtype: torch.dtype) -> None:
    check(lambda x: (x.sigmoid(), x.neg(), x.exp(), x.floor(), x.relu()), special(dtype))


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_unary_of_integers(check: Callable[..., Any], dtype: torch.dtype) -> None:
    check(lambda x: (x.neg(), x.abs(), x.sign(), x.floor(), x**2, x.sqrt(), x.exp(), x.bool(), ~x), integers(dtype))


BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: torch.add(a, b, alpha=2),
    "sub": lambda a, b: torch.sub(a, b, alpha=3),
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "comparisons": lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b),
    "logical": lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b)),
}
FLOAT_BINARY: dict[str, Callable[..., Any]] = {
    # Eager has two answers for the power of a negative infinity, by position in the vector.
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
}


@pytest.mark.parametrize("name", [*BINARY, *FLOAT_BINARY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_binary_of_floats(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    a = special(dtype)
    check({**BINARY, **FLOAT_BINARY}[name], a[:, None], a[None, :])


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_binary_of_integers(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    a = integers(dtype)
    b = a[1:] if name in ("floor_divide", "trunc_divide", "remainder", "fmod", "div") else a
    if name in ("floor_divide", "trunc_divide", "remainder", "fmod"):
        b = b[(b != -1) & (b != 0)]  # the quotient of the least integer overflows, which C++ leaves undefined
    check(BINARY[name], a[:, None], b[None, :])


def test_bits(check: Callable[..., Any]) -> None:
    a, b = integers(torch.int32), torch.tensor([0, 1, 5, 31, 33, 12, 3, 2, 1, 0], dtype=torch.int32)
    check(lambda a, b: (a & b, a | b, a ^ b, ~a, a << b, a >> b, a & 7), a, b)
    p, q = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(lambda p, q: (p & q, p | q, p ^ q, ~p, p + q, p * q, p == q, p < q, p.float() - q.float()), p, q)


@pytest.mark.parametrize(
    "left,right",
    [
        (torch.float32, torch.int64), (torch.bfloat16, torch.float32), (torch.int32, torch.int64),
        (torch.bool, torch.int8), (torch.uint8, torch.float16), (torch.bool, torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_mixed_types(check: Callable[..., Any], left: torch.dtype, right: torch.dtype) -> None:
    a = torch.tensor([0, 1, 2, 3, 100]).to(left)
    b = torch.tensor([1, 1, 3, 2, 7]).to(right)
    check(lambda a, b: (a + b, a * b, a / b, a > b, torch.maximum(a, b), torch.where(a > 1, a, b)), a, b)


def test_scalar_operands_keep_the_type_of_the_tensor(check: Callable[..., Any]) -> None:
    half, whole = special(torch.bfloat16), integers(torch.int32)
    zero_dim = torch.tensor(2.5, dtype=torch.float64)
    check(lambda x: (x + 0.1, x * 3, x > 0.1, x / 2), half)
    check(lambda x: (x + 1, x + 0.5, x > 1.5, x // 3, x % 3), whole)
    check(lambda x, z: (x + z, x * z, z - x, x < z), half, zero_dim)
    check(lambda x, z: (x + z, x < z), whole, zero_dim)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7, 1, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_shapes(check: Callable[..., Any], shape: tuple[int, ...], dynamic: bool) -> None:
    x = torch.randn(shape)
    check(lambda x: (x * 2 + 1, x.relu(), x + x.sum()), x, dynamic=dynamic)


def test_strided_and_expanded_inputs(check: Callable[..., Any]) -> None:
    x, y = torch.randn(4, 6)[:, ::2].t(), torch.randn(3, 1).expand(3, 4)
    check(lambda x, y: (x + y, x.clone(), y.contiguous() * x), x, y)


BACKWARD: dict[str, Callable[..., Any]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": UNARY["gelu_tanh"],
    "silu": lambda x: torch.nn.functional.silu(x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": UNARY["leaky_relu"],
    "elu": UNARY["elu"],
    "softplus": UNARY["softplus"],
    "hardswish": UNARY["hardswish"],
    "hardsigmoid": UNARY["hardsigmoid"],
    "mish": UNARY["mish"],
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "pow3": UNARY["pow3"],
    "clamp": UNARY["clamp"],
}


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_backward(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    fn = BACKWARD[name]

    def gradient(x: torch.Tensor, g: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x), x, g)

    x = torch.tensor([-3.0, -1.0, -0.25, 0.1, 0.5, 1.0, 2.75, 6.0]).to(dtype)
    # Closer than the nearest float32: literals are to be those of eager.
    tight = {"rtol": 1e-13, "atol": 1e-13} if dtype is torch.float64 else {}
    check(gradient, x, torch.linspace(-1, 2, 8).to(dtype), **tight)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.uint8], ids=str)
def test_thresholds_of_integers_keep_their_digits(check: Callable[..., Any], dtype: torch.dtype) -> None:
    """Numbers with a fraction are made integers, as eager does."""
    edge = torch.iinfo(dtype)
    x = torch.tensor([edge.min, edge.max, edge.max - 10, 0, 1, 2, 3], dtype=dtype)
    numbers = (0.5, 0.25), (2.9, 7.9), (1, 3)
    check(lambda x: [torch.nn.functional.threshold(x, *n) for n in numbers], x)
    check(lambda x: torch.nn.functional.threshold(x.double(), 0.5, 0.25), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x + 0.3,
        lambda x, y: 0.3 - x,
        lambda x, y: (x * 1.7 + 0.3) * y / 0.7,
        lambda x, y: torch.add(x, y, alpha=0.3),
        lambda x, y: torch.rsub(x, y, alpha=0.3),
        lambda x, y: x + torch.tensor(0.3),
        lambda x, y: x * torch.tensor(0.3),
        lambda x, y: torch.atan2(x, torch.tensor(0.3)),
        lambda x, y: x.abs() ** 0.3 + 0.3**y,
    ],
    ids=["sum", "from", "chain", "scaled", "scaled from", "scalar", "product", "atan2", "powers"],
)
def test_numbers_of_half_types_are_taken_as_eager_takes_them(
    f: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    """Sums and powers round them, products and quotients do not. Of scaled sums eager rounds what is left of a vector
    otherwise than vectors, so there is nothing left here."""
    x, y = torch.randn(2, 3072, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"numerics": "eager"}
    torch.testing.assert_close(torch.compile(f, backend="mlc", options=options)(x, y), f(x, y), rtol=0, atol=0)
