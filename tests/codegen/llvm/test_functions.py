"""Every function of the table, and every conversion, against the oracle: all types, vectors and scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torch_mlc.codegen.llvm.functions.elementary import APPROXIMATE
from torch_mlc.codegen.llvm.functions.functions import HANDLERS
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.iterations import ITERATIONS
from torch_mlc.ir.expr.ops import OPS, Result
from torch_mlc.ir.expr.value import call, cast
from torch_mlc.ir.oracle import ops as oracle_ops

Array = np.ndarray[Any, Any]
INTS = (DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8)
FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
RANDOM = ("rand", "randn", "randbits")
BITS = ["bit_and", "bit_or", "bit_xor", "bit_not"]
SHIFTS = ["shl", "shr"]
LOGICAL = ["logical_and", "logical_or", "logical_xor", "logical_not"]
INTEGER = [
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "floordiv",
    "remainder",
    "truncdiv",
    "fmod",
    "pow",
    "neg",
    "abs",
    "sign",
]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]
CHECKS = ["check_bounds", "check_divisor"]
# What has an error is measured against its promise in test_approximations.py.
FLOAT_ONLY = [
    f for f in OPS if f not in {*BITS, *SHIFTS, *LOGICAL, *RANDOM, *ITERATIONS, *CHECKS, *APPROXIMATE, "bitcast"}
]


def values(dtype: DType, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        small = rng.integers(max(info.min, -9), 10, count)
        wide = rng.integers(info.min, info.max, count, dtype=dtype.numpy, endpoint=True)
        result = np.where(rng.random(count) < 0.7, small, wide).astype(dtype.numpy)
        result[:3] = (info.min, info.max, 0)
        return result
    wide = rng.normal(0, 1, count) * np.where(rng.random(count) < 0.5, 1.0, 10.0 ** rng.uniform(-4, 4, count))
    result = wide.astype(np.float32).astype(dtype.numpy)
    result[:8] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5], np.float32).astype(dtype.numpy)
    return result


def expected(fn: str, dtype: DType, result: DType, arrays: list[Array]) -> Array:
    function = oracle_ops.function(fn, dtype, result)
    with np.errstate(all="ignore"):
        return np.array([function(*row) for row in zip(*arrays, strict=True)]).astype(result.numpy)


def check(got: Array, want: Array, dtype: DType, what: str, ulp: int = 0) -> None:
    if dtype.is_half:
        got, want = got.astype(np.float32), want.astype(np.float32)
    if not dtype.is_float or ulp == 0:
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    # The next few neighbours of the right answer, in the type's own spacing.
    eps = {8: 2.3e-16, 4: 1.2e-7}.get(dtype.itemsize, 9.8e-4 if dtype is DType.FLOAT16 else 7.9e-3)
    if what.startswith("digamma"):  # its zeros are no floats: the error there is that of terms near 1
        np.testing.assert_allclose(got, want, rtol=ulp * eps, atol=8 * eps, err_msg=what)
        return
    tiny = {8: 1e-320, 4: 1e-44}.get(dtype.itemsize, 6e-8 if dtype is DType.FLOAT16 else 1e-38)
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=ulp * eps, atol=ulp * tiny, err_msg=what
    )


def test_the_emitter_covers_the_table() -> None:
    assert set(HANDLERS) == set(OPS)


# 1 ulp functions of a library are called "within 4" so that one machine's Sleef is as good as another's.
ROUNDED = [
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "div",
    "fma",
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sqrt",
    "copysign",
    "nextafter",
]
EXACT = {*ROUNDED, *COMPARE, *BITS, *SHIFTS, *LOGICAL, "isnan", "isinf", "fmod", "floordiv", "remainder"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fn", FLOAT_ONLY)
def test_float_function(fn: str, dtype: DType, compute: Callable[..., Array]) -> None:
    if fn == "nextafter" and dtype.is_half:
        pytest.skip("torch has it for float32 and float64, and bfloat16 with a meaning of its own")
    arrays = [values(dtype, 133, seed) for seed in range(OPS[fn].arity)]
    result = DType.BOOL if OPS[fn].result is Result.BOOL else dtype
    want = expected(fn, dtype, result, arrays)
    for lanes in (16, 1):
        got = compute(lambda *args: call(fn, *args), *arrays, lanes=lanes)
        check(got, want, result, f"{fn} of {dtype.value}, {lanes} lanes", 0 if fn in EXACT else 4)


# What is zero of equal or opposite products only where each is rounded.
CANCELLING: dict[str, Callable[..., Any]] = {
    "difference of squares": lambda a, b, c, d: call("sub", call("mul", a, a), call("mul", c, c)),
    "minor": lambda a, b, c, d: call("sub", call("mul", a, b), call("mul", c, d)),
    "negated factor": lambda a, b, c, d: call("add", call("mul", a, call("neg", b)), call("mul", c, d)),
    "negated product": lambda a, b, c, d: call("add", call("neg", call("mul", a, b)), call("mul", c, d)),
    "square of a difference": lambda a, b, c, d: call(
        "sub", call("add", call("mul", a, a), call("mul", c, c)), call("mul", call("add", a, a), c)
    ),
}


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=str)
@pytest.mark.parametrize("name", CANCELLING)
def test_products_that_cancel_leave_nothing(name: str, dtype: DType, compute: Callable[..., Array]) -> None:
    """One of them in a fused multiply-add would leave the rounding error of the other, and a root of it NaN."""
    a, b = np.random.default_rng(0).normal(size=(2, 133)).astype(dtype.numpy)
    for lanes in (16, 1):
        got = compute(CANCELLING[name], a, b, a.copy(), b.copy(), lanes=lanes)
        np.testing.assert_array_equal(got, np.zeros_like(a), err_msg=f"{name}, {lanes} lanes")


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("fn", [*INTEGER, *COMPARE, *BITS, *SHIFTS])
def test_integer_function(fn: str, dtype: DType, compute: Callable[..., Array]) -> None:
    arrays = [values(dtype, 133, seed) for seed in range(OPS[fn].arity)]
    if fn == "pow":  # every other exponent is small, and of the rest all bits count
        arrays[1][::2] = np.clip(arrays[1][::2], -20, 20)
    result = DType.BOOL if OPS[fn].result is Result.BOOL else dtype
    want = expected(fn, dtype, result, arrays)
    for lanes in (16, 1):
        got = compute(lambda *args: call(fn, *args), *arrays, lanes=lanes)
        check(got, want, result, f"{fn} of {dtype.value}, {lanes} lanes")


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_greatest_common_divisor(dtype: DType, compute: Callable[..., Array]) -> None:
    arrays = [values(dtype, 133, seed) for seed in range(2)]
    want = expected("gcd", dtype, dtype, arrays)
    for lanes in (16, 1):
        check(compute(lambda *args: call("gcd", *args), *arrays, lanes=lanes), want, dtype, f"gcd, {lanes} lanes")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fn", sorted(ITERATIONS.keys() - {"gcd"}))
def test_iteration(fn: str, dtype: DType, compute: Callable[..., Array]) -> None:
    """Lanes that end early keep their values, whatever the others do."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0.1, 1, 77)
    second = rng.integers(-1, 9, 77).astype(np.float64) if not fn.startswith("gamma") else x
    first = rng.uniform(0.1, 1, 77) * (x if fn == "gamma_fraction" else 1)
    first[:3], second[3:5] = (np.nan, np.inf, 0), (np.nan, np.inf) if fn.startswith("gamma") else (np.nan, -np.inf)
    arrays = [v.astype(np.float32).astype(dtype.numpy) for v in (first, second)]
    want = expected(fn, dtype, dtype, arrays)
    for lanes in (16, 1):
        got = compute(lambda *args: call(fn, *args), *arrays, lanes=lanes)
        check(got, want, dtype, f"{fn}, {lanes} lanes", 1024)


@pytest.mark.parametrize("fn", [*LOGICAL, "bit_and", "bit_or", "bit_xor", "eq", "ne", "maximum", "minimum"])
def test_bool_function(fn: str, compute: Callable[..., Array]) -> None:
    arrays = [values(DType.BOOL, 40, seed) for seed in range(OPS[fn].arity)]
    want = expected(fn, DType.BOOL, DType.BOOL, arrays)
    check(compute(lambda *args: call(fn, *args), *arrays), want, DType.BOOL, fn)


@pytest.mark.parametrize("fn", RANDOM)
def test_random_function(fn: str, compute: Callable[..., Array]) -> None:
    seed = np.full(77, 0x1234567890ABCDEF, np.int64)
    offset = np.arange(77, dtype=np.int64) * 0x87654321
    result = DType.INT64 if fn == "randbits" else DType.FLOAT32
    want = expected(fn, DType.INT64, result, [seed, offset])
    got = compute(lambda s, o: call(fn, s, o, dtype=result), seed, offset)
    check(got, want, result, fn, 0 if fn != "randn" else 8)


PAIRS = [(a, b) for a in (*FLOATS, *INTS, DType.BOOL) for b in (*FLOATS, *INTS, DType.BOOL) if a is not b]


@pytest.mark.parametrize(("source", "into"), PAIRS, ids=str)
def test_cast(source: DType, into: DType, compute: Callable[..., Array]) -> None:
    x = values(source, 133, 3)
    if source.is_float and not into.is_float:  # what does not fit is undefined in torch as well
        limit = 100 if into is not DType.UINT8 else 200
        x = np.nan_to_num(np.clip(x.astype(np.float32), 0 if into is DType.UINT8 else -limit, limit)).astype(
            source.numpy
        )
    with np.errstate(all="ignore"):
        want = np.array([oracle_ops.converter(source, into)(v) for v in x]).astype(into.numpy)
    for lanes in (16, 1):
        check(
            compute(lambda v: cast(v, into), x, lanes=lanes),
            want,
            into,
            f"{source.value} to {into.value}, {lanes} lanes",
        )


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2], ids=str)
def test_rounding_to_narrow_floats(dtype: DType, compute: Callable[..., Array]) -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.integers(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32),
                        (rng.normal(0, 1, 4000) * 10.0 ** rng.uniform(-8, 3, 4000)).astype(np.float32)])  # fmt: skip
    with np.errstate(all="ignore"):
        converted = oracle_ops.converter(DType.FLOAT32, dtype)
        want = np.array([converted(v) for v in x])
    got = compute(lambda v: cast(v, dtype), x)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    back = compute(lambda v: cast(v, DType.FLOAT32), want)
    np.testing.assert_array_equal(back, want.astype(np.float32))
