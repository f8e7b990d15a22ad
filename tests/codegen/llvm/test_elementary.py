"""Accuracy of the inline functions against float64, in units in the last place, over all magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.codegen.llvm.functions.elementary import INLINE
from torch_mlc.codegen.llvm.text.builder import Builder, Val
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import call
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target

Array = np.ndarray[Any, Any]
SPECIALS = np.array(
    [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, -1e-38, 3.4e38, -3.4e38, 0.5, 2], "f4"
)


def every_magnitude(count: int, seed: int = 0) -> Array:
    """Random bit patterns: denormals, infinities and NaN among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return bits.view(np.float32)


def reference(fn: str, x: Array) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return getattr(torch, fn)(torch.from_numpy(x.astype(np.float64))).numpy()


def ulps(got: Array, exact: Array) -> Array:
    """Distance in units of the last place of the float32 nearest to the exact value."""
    with np.errstate(all="ignore"):
        nearest = exact.astype(np.float32)
        unit = np.spacing(np.abs(nearest)).astype(np.float64)
        away = np.abs(got.astype(np.float64) - exact) / unit
    same = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
    return np.where(same, 0.0, away)


def samples(low: float, high: float) -> Array:
    rng = np.random.default_rng(1)
    return np.concatenate(
        [
            rng.uniform(low, high, 40000).astype("f4"),
            rng.normal(0, 1, 20000).astype("f4"),
            every_magnitude(20000),
            SPECIALS,
        ]
    )


# sigmoid below -87 is denormal: 1 / (1 + exp(-x)) is zero there, as torch's own is.
RANGES = {
    "exp": (-105, 90), "exp2": (-151, 130), "expm1": (-20, 90), "log": (0, 100), "log2": (0, 100), "log10": (0, 100),
    "log1p": (-1, 10), "erf": (-5, 5), "tanh": (-10, 10), "sigmoid": (-87, 90),
}  # fmt: skip


def test_every_inline_function_is_measured() -> None:
    assert set(RANGES) == set(INLINE)


@pytest.mark.parametrize("fn", sorted(RANGES))
def test_within_two_ulp(fn: str, compute: Callable[..., Array]) -> None:
    x = samples(*RANGES[fn])
    if fn == "sigmoid":
        x = np.where(x < -87, np.float32(-80), x)
    exact = reference(fn, x)
    got = compute(lambda v: call(fn, v), x)
    error = ulps(got, exact)
    worst = int(np.nanargmax(error))
    assert not np.isnan(error).any(), f"{fn}({x[np.isnan(error)][0]!r}) is {got[np.isnan(error)][0]!r}"
    assert error[worst] <= 2.0, f"{fn}({x[worst]!r}) = {got[worst]!r}, exact {exact[worst]!r}: {error[worst]:.2f} ulp"


@pytest.mark.parametrize("fn", sorted(RANGES))
def test_a_lane_gives_what_a_scalar_gives(fn: str, compute: Callable[..., Array]) -> None:
    x = samples(*RANGES[fn])[::97]
    np.testing.assert_array_equal(
        compute(lambda v: call(fn, v), x, lanes=8), compute(lambda v: call(fn, v), x, lanes=1)
    )


@pytest.mark.parametrize("lanes", [4, 8, 16, 48, 64])
@pytest.mark.parametrize("fn", ["exp", "exp2", "sigmoid"])
def test_every_number_of_lanes_gives_the_same(fn: str, lanes: int, compute: Callable[..., Array]) -> None:
    x = np.concatenate([samples(-180, 130)[::53], np.float32([-104, -127, -150, -176, -254, -400, -1e4, -np.inf])])
    np.testing.assert_array_equal(
        compute(lambda v: call(fn, v), x, lanes=lanes), compute(lambda v: call(fn, v), x, lanes=1)
    )


AVX2 = Target("cpu", "znver3", 2, features="+avx2,+fma")
AVX512 = Target("cpu", "sapphirerapids", 2, vector_bytes=64, features="+avx2,+fma,+avx512f,+avx512vl")


@pytest.mark.parametrize("lanes, calls", [(64, 4), (16, 1), (8, 1), (4, 1), (1, 0)])
def test_one_instruction_a_register_scales_by_a_power_where_there_is_one(
    lanes: int, calls: int, nest_of: Callable[..., LoopNest]
) -> None:
    nest = nest_of([DType.FLOAT32], lambda v: call("exp", v), lanes)
    # The last, masked part of a wide loop is a register at a time.
    assert emit_llvm(nest, AVX512).text.count("@llvm.x86.avx512.mask.scalef.ps.") >= calls
    assert ("scalef" in emit_llvm(nest, AVX512).text) == (calls > 0)
    assert "x86" not in emit_llvm(nest, AVX2).text


@pytest.mark.parametrize("target", [AVX2, AVX512])
@pytest.mark.parametrize("fn, least", [("exp", 1 / math.log(2)), ("exp2", 1.0)])
def test_what_masks_leave_out_is_zero_without_a_denormal_number(fn: str, least: float, target: Target) -> None:
    """Where an argument is minus infinity, no product is rounded: a factor is zero, or the exponent tells."""
    b = Builder("define void @f(<16 x float> %x)", frozenset(f[1:] for f in target.features.split(",")))
    INLINE[fn](b, Val("%x", DType.FLOAT32, 16))
    text = b.text()
    bound = next(line for line in text.splitlines() if "fcmp ogt" in line)
    bits = int(bound.split("0x")[1].split(")")[0], 16)
    power = np.array(bits, "u8").view("f8") * least
    if target is AVX512:
        assert power <= -512
    else:
        n = round(float(power))
        half = n >> 1
        assert np.array((half + 127) << 23, "i4").view("f4") == 0 and n - half >= -127


def test_odd_functions_keep_the_sign_of_zero(compute: Callable[..., Array]) -> None:
    zeros = np.array([0.0, -0.0], "f4")
    for fn in ("tanh", "erf", "expm1", "log1p"):
        assert [math.copysign(1, v) for v in compute(lambda v, fn=fn: call(fn, v), zeros)] == [1, -1], fn
