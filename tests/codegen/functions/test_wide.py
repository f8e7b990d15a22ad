"""Functions that call no library, against many digits, in units in the last place, over all magnitudes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from tests.codegen.llvm.conftest import pointwise, run_compiled
from tests.codegen.llvm.test_elementary import samples, ulps
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.codegen.llvm.functions.wide import ONE, TWO
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import call
from torch_mlc.ir.target import Target
from torch_mlc.runtime.targets import cpu_target

Array = np.ndarray[Any, Any]
ALONE = cpu_target(1, libraries="none")
RANGES = {
    "sin": (-3e5, 3e5), "cos": (-3e5, 3e5), "tan": (-300, 300), "asin": (-1, 1), "acos": (-1, 1), "atan": (-9, 9),
    "sinh": (-90, 90), "cosh": (-90, 90), "asinh": (-9, 9), "acosh": (0.9, 50), "atanh": (-1, 1), "erfc": (-5, 11),
}  # fmt: skip


def computed(fn: str, *args: Array, lanes: int = 16, target: Target = ALONE) -> Array:
    nest = pointwise([DType.FLOAT32] * len(args), lambda *v: call(fn, *v), lanes)
    return run_compiled(nest, args, {"n": len(args[0])}, target)["out0"]


def exact(fn: str, *args: Array) -> Array:
    """In float64, of which torch's functions have nearly all digits, where no reduction of the argument needs more."""
    with np.errstate(invalid="ignore"):
        wide = [torch.from_numpy(a.astype(np.float64)) for a in args]
    return getattr(torch, fn)(*wide).numpy()


def test_every_function_is_measured() -> None:
    assert set(RANGES) == set(ONE)


@pytest.mark.parametrize("fn", sorted(RANGES))
def test_within_an_ulp(fn: str) -> None:
    x = samples(*RANGES[fn])
    error = ulps(computed(fn, x), exact(fn, x))
    worst = int(np.nanargmax(error))
    assert not np.isnan(error).any(), f"{fn}({x[np.isnan(error)][0]!r})"
    assert error[worst] <= 1.0, f"{fn}({x[worst]!r}): {error[worst]:.2f} ulp"


@pytest.mark.parametrize("fn", ["sin", "cos", "tan"])
def test_next_to_a_zero_all_digits_are_there(fn: str) -> None:
    """Multiples of a quarter of a turn, up to the arguments that are reduced here and beyond them."""
    quarters = np.float32(np.arange(1, 330000, 7) * (np.pi / 2))
    x = np.concatenate([quarters, np.float32([1e6, 1e8, 3e38, 8388609.0])])
    with mpmath.workdps(60):
        want = np.array([float(getattr(mpmath, fn)(mpmath.mpf(float(v)))) for v in x[::131]])
        last = np.array([float(getattr(mpmath, fn)(mpmath.mpf(float(v)))) for v in x[-4:]])
    got = computed(fn, x)
    assert np.max(ulps(got[::131], want)) <= 1.0
    assert np.max(ulps(got[-4:], last)) <= 1.0


def pairs() -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    special = np.float32([0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-45, -3e38, 1e10])
    x, y = (a.ravel() for a in np.meshgrid(special, special))
    some = rng.uniform(-20, 20, (2, 30000)).astype("f4")
    wide = rng.integers(0, 1 << 32, (2, 20000), dtype=np.uint32).view("f4")
    whole = np.round(rng.uniform(-9, 9, (2, 5000))).astype("f4")
    return tuple(np.concatenate([a, *parts]) for a, *parts in zip((x, y), some, wide, whole, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("fn", sorted(TWO))
def test_two_arguments_within_an_ulp(fn: str) -> None:
    x, y = pairs()
    if fn == "pow":
        x = np.concatenate([x, np.abs(x)])
        y = np.concatenate([y, y])
    want = exact(fn, x, y)
    got = computed(fn, x, y)
    error = ulps(got, want)
    wrong = np.flatnonzero(np.isnan(error) | (error > 1.0))
    assert not len(wrong), f"{fn}({x[wrong[0]]!r}, {y[wrong[0]]!r}) = {got[wrong[0]]!r}, exact {want[wrong[0]]!r}"
    signs = np.signbit(got) == np.signbit(want)
    assert np.all(signs | np.isnan(want)), fn


@pytest.mark.parametrize("fn", sorted(RANGES))
def test_a_lane_gives_what_a_scalar_gives(fn: str) -> None:
    x = samples(*RANGES[fn])[::97]
    np.testing.assert_array_equal(computed(fn, x, lanes=8), computed(fn, x, lanes=1))


@pytest.mark.parametrize("fn", sorted({*ONE, "exp", "log", "digamma", "erfinv", "lgamma", "nextafter", *TWO}))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_nothing_but_the_c_library_is_called(fn: str, dtype: DType) -> None:
    many = 2 if fn in TWO or fn == "nextafter" else 1
    nest = pointwise([dtype] * many, lambda *v: call(fn, *v), 16)
    text = emit_llvm(nest, replace(ALONE, libraries=())).text
    called = set(re.findall(r"declare .* @([\w.]+)\(", text))
    assert not [name for name in called if "Sleef" in name or name.startswith("sgemm")]
    assert "Sleef" in emit_llvm(nest, replace(ALONE, libraries=("aten",))).text or fn in ("exp", "log")
