"""Functions of half types whose parts are approximate, interpreted, against exact ones in double precision.

A result is as promised in docs/numbers.md: the rounding of what differs from the exact one by 2**-15 of it, or by
2**-29 of what it is a multiple of. Single instructions are exact in the interpreter; ``test_approximations.py`` has
their errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

TARGETS = ("cuda:sm_70", "cuda:sm_90", "hip:gfx942")
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
POINTS = """
@function
def f(in0: {dtype}[{n}], out0: output({dtype}[{n}])):
    i0 = row({n})
    t0 = compute(rows, cast(in0[i0], float32))
    t1 = compute(rows, {value})
    out0[i0] = t1
"""
SOFTMAX = """
@function
def f(in0: {dtype}[{m}, {n}], out0: output({dtype}[{m}, {n}])):
    i0 = row({m})
    r0 = inner({n})
    t0, = reduce(max, rows, inner, (cast(in0[i0, r0], float32),))
    t1 = compute(points, exp(sub(cast(in0[i0, r0], float32), t0[i0])))
    t2, = reduce(sum, rows, inner, (t1[i0, r0],))
    t3 = compute(points, div(t1[i0, r0], t2[i0]))
    out0[i0, r0] = t3
"""
X = "t0[i0]"
GELU = f"mul(mul({X}, 0.5), add(erf(mul({X}, 0.7071067811865476)), 1.0))"
CUBIC = f"mul(add({X}, mul(mul(mul({X}, {X}), {X}), 0.044715)), 0.7978845608028654)"


def tangent_gelu(x: Tensor) -> Tensor:
    """``1 + tanh(u)`` as twice a sigmoid, of which nothing is lost far below zero."""
    return x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x**3))


FUNCTIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "GELU": (GELU, F.gelu),
    "GELU by a tangent": (f"mul(mul({X}, 0.5), add(tanh({CUBIC}), 1.0))", tangent_gelu),
    "SiLU": (f"mul({X}, sigmoid({X}))", F.silu),
    "SiLU by a quotient": (f"div({X}, add(exp(neg({X})), 1.0))", F.silu),
    "sigmoid": (f"sigmoid({X})", torch.sigmoid),
    "tangent": (f"tanh({X})", torch.tanh),
    "exponential": (f"exp({X})", torch.exp),
    "power of two": (f"exp2({X})", torch.exp2),
    "reciprocal": (f"reciprocal({X})", torch.reciprocal),
    "third": (f"div({X}, 3.0)", lambda x: x / 3.0),
}
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 6e4, -6e4, 100.0, -100.0, 88.0, -88.0, 1e-4, -1e-4)


def result(interpreter, text: str, target: str, **inputs: np.ndarray) -> np.ndarray:
    typed = re.sub(r"(?<![\w.])-?\d+\.\d+", lambda number: f"float32({number[0]})", text)
    function, machine = parse(typed), gpu_target(target)
    assert isinstance(function, TensorFunction)
    source = emit_triton(default_schedule(lower_to_loops(function, machine), machine).nest, machine)
    (got,) = interpreter.run(source, ("out0",), inputs, {}).values()
    return got


def assert_rounded(got: np.ndarray, exact: np.ndarray, floor: np.ndarray | float) -> None:
    """Whether each result is the rounding of something near the exact one."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = np.where(np.isinf(exact), 0, np.abs(exact) * 2.0**-15 + floor)
        low, high = ((exact + sign * near).astype(np.float32).astype(got.dtype) for sign in (-1, 1))
    got, low, high = (a.astype(np.float64) for a in (got, low, high))
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(got), nan)
    inside = (np.where(nan, 0, low) <= np.where(nan, 0, got)) & (np.where(nan, 0, got) <= np.where(nan, 0, high))
    assert inside.all(), [(g, e) for g, e in zip(got[~inside][:5], exact[~inside][:5], strict=True)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_the_rounding_of_what_is_nearly_exact(interpreter, name: str, dtype: str, target: str) -> None:
    value, reference = FUNCTIONS[name]
    rng = np.random.default_rng(3)
    n = 4099
    x = np.concatenate([SPECIAL, rng.uniform(-9, 9, n // 2), rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-14, 7, n)])
    x = x[:n].astype(np.float32).astype(TYPES[dtype])
    got = result(interpreter, POINTS.format(dtype=dtype, n=n, value=value), target, in0=x)
    wide = x.astype(np.float64)
    # Torch computes what is infinite times zero in single precision, where it is none. Of one element it is no vector:
    # with AVX-512 torch makes NaN of a vector that holds infinities.
    exact = reference(torch.from_numpy(wide)).numpy()
    if name in ("GELU", "GELU by a tangent", "SiLU", "SiLU by a quotient"):
        for k in np.flatnonzero(~np.isfinite(wide)):
            exact[k] = reference(torch.tensor([wide[k]], dtype=torch.float32)).item()
    with np.errstate(invalid="ignore"):
        floor = np.where(np.isfinite(wide), np.abs(wide) * 2.0**-29, 0) if name == "GELU" else 2.0**-118
    assert_rounded(got, exact, floor)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 37), (3, 4096), (2, 9000)], ids=str)
def test_a_softmax_is_the_rounding_of_what_is_nearly_exact(interpreter, shape: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(0, 8, shape).astype(np.float32).astype(TYPES[dtype])
    x[0, :3], x[-1, 1] = (-np.inf, -3e4, 30.0), -np.inf
    m, n = shape
    got = result(interpreter, SOFTMAX.format(dtype=dtype, m=m, n=n), "cuda:sm_90", in0=x)
    exact = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    assert_rounded(got, exact, 2.0**-118)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_softmax_of_a_row_with_what_is_no_number_is_none(interpreter, bad: float) -> None:
    x = np.zeros((3, 64), ml_dtypes.bfloat16)
    x[1, :] = -np.inf if bad == -np.inf else 0
    x[1, 5] = bad
    got = result(interpreter, SOFTMAX.format(dtype="bfloat16", m=3, n=64), "cuda:sm_90", in0=x).astype(np.float32)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], np.full((2, 64), 1 / 64))
