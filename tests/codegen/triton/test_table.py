"""Kernels over a table on GPUs: interpreted like the oracle, and compiled with whole accesses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy

from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, Load, call, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, default_alignment, resource_report
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

F32 = DType.FLOAT32
N, I0 = symbol("s0"), symbol("i0")
SM90 = gpu_target("cuda:sm_90")


def step(divisor: int = 1, upper: int | None = 1 << 20) -> TensorFunction:
    """A step of momentum over ``s0`` elements: both results in place, a scalar that all elements read."""

    def buffer(name: str, *shape: object) -> Buffer:
        return Buffer(name, shape, tuple(sympy.S.One for _ in shape), F32, align=16)  # type: ignore[arg-type]

    p, g, m, rate = buffer("in0", N), buffer("in1", N), buffer("in2", N), buffer("in3")

    def load(name: str) -> Expr:
        return Load(name, (I0,), F32)

    momentum = call("add", call("mul", load("in2"), const(0.9, F32)), load("in1"))
    moved = call("sub", load("in0"), call("mul", Load("in3", (), F32), load("t0")))
    return TensorFunction(
        "step", (Dim(I0, N),), (), (p, g, m, rate), (Output(m, "t0", (I0,)), Output(p, "t1", (I0,))),
        (Stage(("t0",), (momentum,), False), Stage(("t1",), (moved,), False)),
        SymbolTable((Size(N, 0, upper, divisor, 1 << 24),)), table=True,
    )  # fmt: skip


def scheduled(function: TensorFunction) -> LoopNest:
    return default_schedule(lower_to_loops(function), SM90).nest


@pytest.mark.parametrize("sizes", [(1,), (0, 5, 0), (3, 1024, 70, 0, 2049, 512)], ids=str)
def test_rows_of_any_size(interpreter, sizes: tuple[int, ...]) -> None:
    function = step()
    nest = scheduled(function)
    plain = lower_to_loops(replace(function, table=False))
    rng = np.random.default_rng(0)
    rows = [
        {b: rng.standard_normal(n if b != "in3" else ()).astype(np.float32) for b in ("in0", "in1", "in2", "in3")}
        for n in sizes
    ]
    found = interpreter.run_table(emit_triton(nest, SM90), nest.outputs, rows, [{"s0": n} for n in sizes])
    for row, n, results in zip(rows, sizes, found, strict=True):
        wanted = run_nest(plain, row, {"s0": n})
        for name in nest.outputs:
            np.testing.assert_allclose(results[name], wanted[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("upper", [1 << 20, None], ids=str)
def test_memory_is_accessed_16_bytes_at_a_time(upper: int | None) -> None:
    source = emit_triton(scheduled(step(upper=upper)), SM90)
    report = resource_report(compile_triton(source, SM90))
    assert report.spills == 0
    slow = resource_report(compile_triton(source, SM90, tuple(False for _ in default_alignment(source))))
    assert report.wide_loads > slow.wide_loads and report.wide_stores > slow.wide_stores


SUMS = ((256, 768), (64, 3072), (8, 2304), (0, 64), (1, 128))


def sums_of_columns(dtype: DType = F32) -> TensorFunction:
    """out[j] = sum of in[:, j]: the second stages of reductions with other numbers of pieces and of columns."""
    column, row, count, width = symbol("i0"), symbol("r0"), symbol("s0"), 64 * symbol("s1")
    given = Buffer("in0", (count, width), (width, sympy.S.One), F32, align=16)
    made = Buffer("out0", (width,), (sympy.S.One,), dtype, align=16)
    table = SymbolTable((Size(count, 0, 256, 1, 256), Size(symbol("s1"), 1, 48, 1, 48)))
    return TensorFunction(
        "sums", (Dim(column, width),), (Dim(row, count),), (given,), (Output(made, "t0", (column,)),),
        (Stage(("t0",), (Load("in0", (row, column), F32),), True, SUM),), table, table=True,
    )  # fmt: skip


def test_sums_of_columns_of_any_number(interpreter) -> None:
    function = sums_of_columns()
    nest = scheduled(function)
    rng = np.random.default_rng(0)
    rows = [{"in0": rng.standard_normal(shape).astype(np.float32)} for shape in SUMS]
    sizes = [{"s0": n, "s1": m // 64} for n, m in SUMS]
    found = interpreter.run_table(emit_triton(nest, SM90), nest.outputs, rows, sizes)
    for row, results in zip(rows, found, strict=True):
        np.testing.assert_allclose(results["out0"], row["in0"].astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)


def test_sums_of_columns_of_any_number_load_16_bytes() -> None:
    report = resource_report(compile_triton(emit_triton(scheduled(sums_of_columns(DType.BFLOAT16)), SM90), SM90))
    # What is read of the table itself, five numbers a program, is narrow.
    assert report.spills == 0 and report.wide_loads > 0.6
