"""Products with a vector whose programs make that vector, a norm, themselves: what they compute, and their text."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import sympy

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM, WELFORD
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, Load, call, cast, const, symbol
from torch_mlc.ir.function.function import Output, Stage
from torch_mlc.ir.nest.hints import EARLY
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.gpu.row import GPU_ROW_PERSISTENT
from torch_mlc.scheduler.schedule.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import buffer, dims, function, silu, wide

SM90 = gpu_target("cuda:sm_90")
F32, BF16 = DType.FLOAT32, DType.BFLOAT16
ROW, R0 = symbol("i0"), symbol("r0")
ZERO = sympy.S.Zero


def gated(n, k, dtype=BF16, norm="rms", bias=False, table=SymbolTable()) -> LoopNest:  # noqa: B008
    """``silu(w @ norm(x)) * (v @ norm(x))`` of w and v (n, k), the norm made for each row of them."""
    inputs = [buffer("in0", (1, k), dtype), buffer("in1", (k,), dtype)]
    inputs += [buffer(f"in{j}", (n, k), dtype) for j in (2, 3)]
    x = wide("in0", (ZERO, R0), dtype)
    if norm == "rms":
        stages = [Stage(("t0",), (call("mul", x, x),), True, SUM)]
        mean: Expr = const(0.0, F32)
        square = call("mul", Load("t0", (ROW,), F32), const(1.0 / k, F32))
    else:
        names = ("t0", "m2", "count")
        stages = [Stage(names, (x, const(0.0, F32), const(1.0, F32)), True, WELFORD)]
        mean = Load("t0", (ROW,), F32)
        square = call("div", Load("m2", (ROW,), F32), Load("count", (ROW,), F32))
    stages.append(Stage(("t1",), (call("rsqrt", call("add", square, const(1e-5, F32))),), False))
    centred = call("sub", x, mean) if norm != "rms" else x
    scaled = call("mul", call("mul", centred, Load("t1", (ROW,), F32)), wide("in1", (R0,), dtype))
    stages.append(Stage(("t2",), (scaled,), True))
    row = Load("t2", (ROW, R0), F32)
    stages += [Stage((f"t{j + 1}",), (call("mul", row, wide(f"in{j}", (ROW, R0), dtype)),), True, SUM) for j in (2, 3)]
    result = call("mul", silu(Load("t3", (ROW,), F32)), Load("t4", (ROW,), F32))
    if bias:
        inputs.append(buffer("in4", (n,), dtype))
        result = call("add", result, wide("in4", (ROW,), dtype))
    stages.append(Stage(("t5",), (cast(result, dtype),), False))
    out = Output(buffer("out0", (1, n), dtype), "t5", (ZERO, ROW))
    return function("gated", dims(i0=n), dims(r0=k), inputs, [out], stages, table)


def scheduled(nest: LoopNest, rows: int = 2, warps: int = 4) -> LoopNest:
    schedule = Schedule(nest, GPU_ROW_PERSISTENT.name)
    GPU_ROW_PERSISTENT.apply(schedule, SM90, {"rows": rows, "warps": warps})
    return schedule.nest


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (13, 40), (1, 24), (7, 129)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gated_products_of_a_norm(agrees, n, k, norm, rows, dtype):
    agrees(scheduled(gated(n, k, dtype, norm, bias=True), rows), tolerance=2e-2 if dtype is BF16 else 1e-4)


def test_rows_that_vary_in_number(agrees):
    s0 = symbol("s0")
    nest = gated(s0, 40, F32, table=SymbolTable((Size(s0, 0, 100, 1, 30),)))
    for size in (0, 1, 29):
        agrees(scheduled(nest), {"s0": size}, tolerance=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_special_values(agrees, value):
    nest = gated(6, 40, F32)
    row = np.ones((1, 40), np.float32)
    row[0, 7] = value
    agrees(scheduled(nest), inputs={"in0": row}, tolerance=1e-4)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_row_is_made_once_and_matrices_come_first(norm):
    """What is the same for all rows of a program is a tile of one row, and loads stand before the first reduction."""
    schedule = default_schedule(gated(8192, 2048, norm=norm), SM90)
    assert schedule.rule == "gpu_row_persistent"
    assert all(EARLY.of(schedule.nest, f"in{j}") for j in range(4))
    text = emit_triton(schedule.nest, SM90).text
    loads, _, rest = text.partition("tl.sum")
    assert loads.count("tl.load") == 4 and "tl.load" not in rest
    assert "tl.broadcast_to" not in text


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("k", [2048, 4096, 8192])
def test_nothing_spills(target, k):
    gpu = gpu_target(target)
    report = resource_report(compile_triton(emit_triton(default_schedule(gated(4 * k, k), gpu).nest, gpu), gpu))
    assert report.spills == 0 and report.wide_loads >= 0.95
