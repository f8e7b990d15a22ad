"""Sums in lanes of an odd number: kept in as many as a power of two, and right in all that count."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import torch_mlc
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.rules import default_schedule

KEPT = re.compile(r"alloca \[\d+ x <(\d+) x (\w+)>\]")
BYTES = {"double": 8, "float": 4, "half": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 0}
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(1),
    "amax": lambda x: x.amax(1),
    "argmin": lambda x: x.argmin(1),
    "var": lambda x: x.float().var(1),
    "softmax": lambda x: x.float().softmax(1),
    "last": lambda x: x.transpose(1, 2).float().sum((0, 2)),
}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("width", [64, 32], ids=["64 bytes", "32 bytes"])
@pytest.mark.parametrize("columns", [12, 20, 24, 31, 48])
def test_no_odd_vector_is_kept_from_step_to_step(width: int, columns: int, target: Target) -> None:
    x = torch.zeros(3, 40, columns)
    q = torch.zeros(2, 3, 40, columns)
    kernels = [*torch_mlc.explain(lambda x: (x.sum(1), x.double().var(1)), x).kernels]
    kernels += torch_mlc.explain(attention, q, q, q).kernels
    assert kernels
    machine = replace(target, vector_bytes=width)
    for kernel in kernels:
        text = emit_llvm(default_schedule(kernel.nest, machine).nest, machine).text
        for lanes, kind in KEPT.findall(text):
            odd = int(lanes) & (int(lanes) - 1)
            assert not odd or int(lanes) * BYTES[kind] <= width, (kernel.name, lanes, kind)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT8, DType.INT64], ids=str)
def test_odd_columns_are_right(name: str, dtype: DType) -> None:
    reduction = REDUCTIONS[name]
    for columns in (9, 12, 17, 24, 31, 41, 48):
        x = torch.randn(5, 37, columns).mul(20).to(dtype.torch)
        if dtype.is_float and name == "amax":
            x[0, 3, columns - 1], x[1, 7, 0] = float("nan"), float("-inf")
        torch._dynamo.reset()
        got = torch.compile(reduction, backend="mlc", dynamic=False)(x)
        wanted = reduction(x)
        if wanted.is_floating_point():
            wide = x.double() if dtype.is_float and name in ("sum", "amax") else x
            wanted = reduction(wide).to(wanted.dtype)
        rtol, atol = (1.6e-2, 1e-5) if wanted.dtype is torch.bfloat16 else (1e-5, 3e-4)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.parametrize("columns", [17, 24, 31, 40])
def test_attention_with_odd_heads_is_right(columns: int) -> None:
    q, k, v = (torch.randn(2, 3, 37, columns, requires_grad=True) for _ in range(3))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, wanted = torch.compile(attention, backend="mlc", dynamic=False)(q, k, v), attention(*wide)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    out.sin().sum().backward()
    wanted.sin().sum().backward()
    for t, w in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(t.grad.double(), w.grad, rtol=1e-4, atol=1e-5)
