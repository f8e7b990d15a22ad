"""Which functions become approximate, and which stay exact."""

from __future__ import annotations

import re

import pytest

from tests.scheduler.attention_functions import SOFTCAP, Sizes, attention
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target, gpu_target, usual_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.approximate_functions import approximate_functions
from torch_mlc.scheduler.functions.context import FunctionContext
from torch_mlc.scheduler.functions.lower import FUNCTION_PASSES

SM90 = gpu_target("cuda:sm_90")
POINTS = """
@function
def f(in0: float32[64], in1: float32[64], out0: output({dtype}[64])):
    i0 = row(64)
    t0 = compute(rows, {value})
    out0[i0] = t0
"""
ROWS = """
@function
def f(in0: float32[8, 64], in1: float32[8], out0: output({dtype}[8, 64])):
    i0 = row(8)
    r0 = inner(64)
    t0, = reduce(sum, rows, inner, (exp(in0[i0, r0]),))
    t1 = compute(points, {value})
    out0[i0, r0] = t1
"""


def typed(text: str) -> str:
    """A text with the type of its numbers."""
    return re.sub(r"(?<![\w.])-?\d+(\.\d+|e-\d+)", lambda number: f"float32({number[0]})", text)


def function(text: str) -> TensorFunction:
    parsed = parse(typed(text))
    assert isinstance(parsed, TensorFunction)
    verify(parsed)
    return parsed


def points(value: str, dtype: str = "bfloat16") -> TensorFunction:
    return function(POINTS.format(value=value, dtype=dtype))


def rows(value: str, dtype: str = "bfloat16") -> TensorFunction:
    return function(ROWS.format(value=value, dtype=dtype))


def called(f: TensorFunction) -> str:
    """The text of a function, approximated, which is sound and read back from its text."""
    made = approximate_functions(f)
    verify(made)
    assert parse(show(made)) == made and approximate_functions(made) is made
    return show(made)


X, Y = "in0[i0]", "in1[i0]"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("value", "made"),
    [
        (f"exp({X})", "exp2_approx(mul(in0[i0], 1.4426950408889634))"),
        (f"exp(mul({X}, -0.5))", "exp2_approx(mul(in0[i0], -0.7213475204444817))"),
        (f"exp2({X})", "exp2_approx(in0[i0])"),
        (f"sigmoid({X})", "reciprocal_approx(add(exp2_approx(mul(in0[i0], -1.4426950408889634)), 1.0))"),
        (f"add(erf({X}), 1.0)", "erfc_approx(neg(in0[i0]))"),
        (f"add(1.0, erf({X}))", "erfc_approx(neg(in0[i0]))"),
        (f"sub(1.0, erf({X}))", "erfc_approx(in0[i0])"),
        (
            f"add(1.0, tanh({X}))",
            "mul(reciprocal_approx(add(exp2_approx(mul(in0[i0], -2.8853900817779268)), 1.0)), 2.0)",
        ),
        (f"div({X}, {Y})", "div_approx(in0[i0], in1[i0])"),
        (f"div({X}, 4.0)", "mul(in0[i0], 0.25)"),
        (f"reciprocal({X})", "reciprocal_approx(in0[i0])"),
        (f"mul({Y}, neg(abs(exp2({X}))))", "mul(in1[i0], neg(abs(exp2_approx(in0[i0]))))"),
        (f"select(gt({X}, 0.0), exp2({X}), {Y})", "select(gt(in0[i0], 0.0), exp2_approx(in0[i0]), in1[i0])"),
        (f"cast(cast(exp2({X}), {{dtype}}), float32)", "cast(cast(exp2_approx(in0[i0]), {dtype}), float32)"),
    ],
)
def test_what_is_rounded_to_a_half_type_is_approximated(dtype: str, value: str, made: str) -> None:
    assert f"compute(rows, {typed(made.format(dtype=dtype))})" in called(points(value.format(dtype=dtype), dtype))


@pytest.mark.parametrize(
    "value",
    [
        f"sin(exp({X}))",  # a function that a small error of its argument may change as it likes
        f"log(exp({X}))",
        f"select(gt(exp({X}), 1.0), {X}, {Y})",  # what is compared
        f"cast(cast(exp({X}), int32), float32)",
        f"add(erf({X}), 0.5)",
        f"add(tanh({X}), {Y})",  # what may leave the error alone of it
        f"div({X}, 0.0)",
        f"div({X}, 1e-40)",  # whose reciprocal is no number
    ],
)
def test_what_becomes_of_more_than_a_rounding_stays_exact(value: str) -> None:
    f = points(value)
    assert approximate_functions(f) is f


@pytest.mark.parametrize("fn", ["exp", "sigmoid", "tanh", "reciprocal"])
def test_what_is_stored_as_float32_stays_exact(fn: str) -> None:
    f = points(f"{fn}({X})", "float32")
    assert approximate_functions(f) is f


def test_a_tangent_is_a_single_instruction_for_bfloat16_alone() -> None:
    """It is exact to 11 bits."""
    assert "tanh_approx(in0[i0])" in called(points(f"mul(tanh({X}), {Y})", "bfloat16"))
    f = points(f"mul(tanh({X}), {Y})", "float16")
    assert approximate_functions(f) is f


def test_what_one_of_several_readers_keeps_stays_exact() -> None:
    text = """
@function
def f(in0: float32[64], out0: output(bfloat16[64]), out1: output({dtype}[64])):
    i0 = row(64)
    t0 = compute(rows, exp2(in0[i0]))
    t1 = compute(rows, sigmoid(t0[i0]))
    t2 = compute(rows, mul(t0[i0], 3.0))
    out0[i0] = t1
    out1[i0] = t2
"""
    # The sigmoid's argument is exact too, whatever is stored.
    for dtype in ("float32", "bfloat16"):
        told = called(function(text.format(dtype=dtype)))
        assert "exp2(in0[i0])" in told and "reciprocal_approx" in told
    alone = text.replace("sigmoid(t0[i0])", "neg(t0[i0])")
    assert "exp2_approx(in0[i0])" in called(function(alone.format(dtype="bfloat16")))
    f = function(alone.format(dtype="float32"))
    assert approximate_functions(f) is f


def test_sums_of_rows_are_of_approximate_elements_and_are_divided_by_exactly() -> None:
    """A row's reciprocal is computed once, and would be the error of all of its elements."""
    told = called(rows("div(exp(in0[i0, r0]), t0[i0])"))
    exponential = typed("exp2_approx(mul(in0[i0, r0], 1.4426950408889634))")
    assert f"reduce(sum, rows, inner, ({exponential},))" in told
    assert f"mul({exponential}, reciprocal(t0[i0]))" in told
    kept = called(rows("mul(in0[i0, r0], exp(in1[i0]))"))
    assert "mul(in0[i0, r0], exp(in1[i0]))" in kept


def test_sums_that_are_stored_as_float32_stay_exact() -> None:
    text = ROWS.replace("out0: output({dtype}[8, 64])", "out0: output(float32[8])")
    text = text.replace("    t1 = compute(points, {value})\n", "").replace("out0[i0, r0] = t1", "out0[i0] = t0")
    f = function(text)
    assert approximate_functions(f) is f


def test_other_monoids_take_exact_elements() -> None:
    text = ROWS.replace("reduce(sum,", "reduce(product,").format(value="mul(in0[i0, r0], t0[i0])", dtype="bfloat16")
    f = function(text)
    assert approximate_functions(f) is f


def test_attention_stays_as_it_is() -> None:
    f = attention(SOFTCAP, Sizes(dtype=DType.BFLOAT16))
    assert any(s.role is not None and s.role.is_of_attention for s in f.stages)
    assert approximate_functions(f) is f


@pytest.mark.parametrize("target", [SM90, gpu_target("hip:gfx942"), usual_target("cpu"), None], ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_fast_numerics_alone_are_approximate(target: Target | None, fast: bool) -> None:
    f = points(f"exp({X})")
    made = run_passes(FUNCTION_PASSES, f, FunctionContext(f, target, fast))
    assert ("exp2_approx" in show(made)) == (fast and target is not None)
