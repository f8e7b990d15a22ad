"""Scalar functions of users in Triton: by formula, and by text of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import torch_mlc
from tests.codegen.triton.test_functions import nest_of, operand
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import call
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton


def squareplus(x: Any, b: Any) -> Any:
    root = x * x + b * b
    return (x + (root * root + 1.0).sqrt()) * 0.5


def nest(dtype: DType) -> Any:
    return nest_of(call("squareplus", operand(0, dtype), operand(1, dtype)), {"in0": dtype, "in1": dtype})


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_by_formula(dtype: DType, agrees: Callable[..., KernelSource]) -> None:
    with torch_mlc.register_intrinsic("squareplus", squareplus):
        source = agrees(nest(dtype), tolerance=1e-6)
    name = f"mlc_defined_squareplus_{dtype.compute.value}"
    assert f"def {name}(a0, a1):" in source.text and source.text.count("    t0 = ((a0 * a0) + (a1 * a1))") == 1


def test_conditions(agrees: Callable[..., KernelSource]) -> None:
    with torch_mlc.register_intrinsic("is_small", lambda x: (abs(x) < 3) & (x > -2)):
        agrees(nest_of(call("is_small", operand(0, DType.INT32)), {"in0": DType.INT32}))


@pytest.mark.parametrize("text", ["tl.abs({0}) + {1}", lambda x, y: f"tl.abs({x}) + {y}"], ids=["text", "function"])
def test_by_text(text: Any, agrees: Callable[..., KernelSource]) -> None:
    with torch_mlc.register_intrinsic("squareplus", lambda x, y: abs(x) + y, triton=text):
        source = agrees(nest(DType.FLOAT32))
    assert "mlc_defined" not in source.text


def test_it_compiles_for_a_gpu() -> None:
    target = gpu_target("cuda:sm_90")
    with torch_mlc.register_intrinsic("squareplus", squareplus):
        assert compile_triton(emit_triton(nest(DType.FLOAT32), target), target)
