"""Scalar functions of users as instructions: by formula, and by code of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import torch_mlc
from torch_mlc.codegen.kernel import EmitError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import call

Array = np.ndarray[Any, Any]


def squareplus(x: Any, b: Any) -> Any:
    return (x + (x * x + b).sqrt()) * 0.5


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_by_formula(kind: Any, lanes: int, compute: Callable[..., Array]) -> None:
    x, b = np.linspace(-3, 3, 33).astype(kind), np.linspace(0, 4, 33).astype(kind)
    with torch_mlc.register_intrinsic("squareplus", squareplus):
        got = compute(lambda *args: call("squareplus", *args), x, b, lanes=lanes)
    wide = x.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(got, (wide[0] + np.sqrt(wide[0] ** 2 + wide[1])) / 2, rtol=2e-3, atol=1e-6)
    assert got.dtype == x.dtype


def test_conditions(compute: Callable[..., Array]) -> None:
    x = np.arange(-8, 8, dtype=np.int32)
    with torch_mlc.register_intrinsic("is_small", lambda x: (abs(x) < 3) & (x > -2)):
        got = compute(lambda x: call("is_small", x), x)
    np.testing.assert_array_equal(got, (abs(x) < 3) & (x > -2))


def test_by_instructions(compute: Callable[..., Array]) -> None:
    x = np.linspace(-3, 3, 33).astype(np.float32)
    with torch_mlc.register_intrinsic("middle", lambda x: x * 3, llvm=lambda b, x: b.intrinsic("fabs", x)):
        np.testing.assert_array_equal(compute(lambda x: call("middle", x), x), abs(x))


def test_instructions_that_give_something_else(compute: Callable[..., Array]) -> None:
    x = np.ones(3, np.float32)
    for write, given in (
        (lambda b, x: 3, "gives a int"), (lambda b, x: b.const(1, DType.INT64), "gives a int64"),
    ):  # fmt: skip
        with (
            torch_mlc.register_intrinsic("wrong", lambda x: x * 3, llvm=write),
            pytest.raises(EmitError, match=f"code of wrong {given}; it must give a Val of float32"),
        ):
            compute(lambda x: call("wrong", x), x)
