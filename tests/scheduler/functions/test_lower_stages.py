"""Stages with dimensions of their own: a product that feeds an online softmax, and sums over rows beside sums over
elements."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import ATTENTION, SUM
from torch_mlc.ir.expr.value import Load, call, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.compile.fallback import AtenKernel
from torch_mlc.scheduler.functions.lower import lower_to_loops

F32 = DType.FLOAT32
B, M, N, D, E = 2, 5, 7, 3, 4


def _buffer(name: str, *shape: int) -> Buffer:
    sizes = tuple(map(sympy.Integer, shape))
    return Buffer(name, sizes, contiguous_strides(sizes), F32)


def _dims(**extents: int) -> tuple[Dim, ...]:
    return tuple(Dim(symbol(k), sympy.Integer(v)) for k, v in extents.items())


def _attention() -> TensorFunction:
    b, m, n, d, e = map(symbol, ("i0", "i1", "r0", "x0", "x1"))
    q, k, v = _buffer("in0", B, M, E), _buffer("in1", B, N, E), _buffer("in2", B, N, D)
    score = Stage(("t0",), (call("mul", Load("in0", (b, m, e), F32), Load("in1", (b, n, e), F32)),), True, SUM,
                  axes=(b, m, n), over=(e,))  # fmt: skip
    capped = Stage(("t1",), (call("tanh", Load("t0", (b, m, n), F32)),), True, axes=(b, m, n))
    state = Stage(("t2", "t3", "t4"),
                  (Load("t1", (b, m, n), F32), const(1.0, F32), Load("in2", (b, n, d), F32)), True, ATTENTION,
                  axes=(b, m, d), over=(n,))  # fmt: skip
    out = Stage(("t5",), (call("div", Load("t4", (b, m, d), F32), Load("t3", (b, m, d), F32)),), False, axes=(b, m, d))
    return TensorFunction("attention", _dims(i0=B, i1=M), _dims(r0=N), (q, k, v),
                          (Output(_buffer("out0", B, M, D), "t5", (b, m, d)),), (score, capped, state, out),
                          extra=_dims(x0=D, x1=E))  # fmt: skip


def _row_and_column_sums() -> TensorFunction:
    i, r = symbol("i0"), symbol("r0")
    x = Load("in0", (i, r), F32)
    rows = Stage(("t0",), (x,), True, SUM)
    columns = Stage(("t1",), (call("mul", x, Load("t0", (i,), F32)),), True, SUM, axes=(r,), over=(i,))
    return TensorFunction("sums", _dims(i0=M), _dims(r0=N), (_buffer("in0", M, N),),
                          (Output(_buffer("out0", M), "t0", (i,)), Output(_buffer("out1", N), "t1", (r,))),
                          (rows, columns))  # fmt: skip


def _inputs(function: TensorFunction) -> list[torch.Tensor]:
    return [torch.randn([int(n) for n in b.shape]) for b in function.inputs]


def _expected(function: TensorFunction, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    if function.name == "sums":
        rows = inputs[0].sum(1)
        return [rows, (inputs[0] * rows[:, None]).sum(0)]
    q, k, v = inputs
    return [torch.softmax(torch.tanh(q @ k.mT), -1) @ v]


@pytest.mark.parametrize("function", [_attention(), _row_and_column_sums()], ids=lambda f: f.name)
def test_lowered_nest_and_aten_ops_agree_with_torch(function: TensorFunction) -> None:
    torch.manual_seed(0)
    inputs = _inputs(function)
    expected = _expected(function, inputs)
    nest = lower_to_loops(function)
    verify(nest)
    arrays = run_nest(nest, [t.numpy() for t in inputs], {})
    outputs = [torch.empty_like(t) for t in expected]
    AtenKernel(function)([*inputs, *outputs])
    for want, array, aten in zip(expected, arrays.values(), outputs, strict=True):
        np.testing.assert_allclose(array, want.numpy(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(aten, want)
