"""Products of packed matrices with a vector on GPUs: what they compute, and that the machine code reads wide and is
bound by memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import sympy

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.function.function import Output, Stage
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.machine_code.issue import issue_report
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.cost.flight import bytes_wanted
from torch_mlc.scheduler.rules import default_schedule

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import buffer, dims, function, silu, wide

SM90 = gpu_target("cuda:sm_90")
F32, F16, BF16, U8, I8, I64 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.UINT8, DType.INT8, DType.INT64
ROW, R0, R1, R2 = (symbol(s) for s in ("i0", "r0", "r1", "r2"))


def nibbles(n, groups, size, half=BF16, high_first=False, signed=False, epilogue=False) -> LoopNest:
    """``w @ x`` of w (n, groups * size) with two numbers of four bits in a byte, a scale and a zero point for each
    group, which round after each operation; with ``epilogue``, a bias and an activation."""
    inputs = [buffer("in0", (groups * size,), half), buffer("in1", (n, groups * size // 2), I8 if signed else U8)]
    inputs += [buffer(f"in{k}", (n, groups), half) for k in (2, 3)]
    kind = I8 if signed else U8
    byte, four = Load("in1", (ROW, R0 * (size // 2) + R1), kind), const(4, kind)
    low = call("shr", call("shl", byte, four), four) if signed else call("bit_and", byte, const(15, U8))
    parts = low, call("shr", byte, four)
    first = call("lt", IndexValue(R2, I64), const(1, I64))
    digit = cast(cast(Select(first, *(parts[::-1] if high_first else parts)), F32), half)
    centred = cast(call("sub", cast(digit, F32), wide("in2", (ROW, R0), half)), half)
    weight = cast(call("mul", cast(centred, F32), wide("in3", (ROW, R0), half)), half)
    product = call("mul", wide("in0", (R0 * size + 2 * R1 + R2,), half), cast(weight, F32))
    return _ended(inputs, product, n, dims(r0=groups, r1=size // 2, r2=2), half, epilogue)


def rows(n, k, half=BF16, kind=I8, epilogue=False) -> LoopNest:
    """``w @ x`` of bytes w (n, k), with a scale for each row."""
    inputs = [buffer("in0", (k,), half), buffer("in1", (n, k), kind), buffer("in2", (n,), half)]
    weight = cast(call("mul", wide("in1", (ROW, R0), kind), wide("in2", (ROW,), half)), half)
    product = call("mul", wide("in0", (R0,), half), cast(weight, F32))
    return _ended(inputs, product, n, dims(r0=k), half, epilogue)


def _ended(inputs: list, product: Expr, n: int, inner: tuple, half: DType, epilogue: bool) -> LoopNest:
    result: Expr = Load("t0", (ROW,), F32)
    if epilogue:
        inputs.append(buffer(f"in{len(inputs)}", (n,), half))
        result = silu(call("add", result, wide(inputs[-1].name, (ROW,), half)))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (result,), False)]
    out = Output(buffer("out0", (1, n), half), "t1", (sympy.S.Zero, ROW))
    return function("vector", dims(i0=n), inner, inputs, [out], stages)


def scheduled(nest: LoopNest, target=SM90) -> LoopNest:
    schedule = default_schedule(nest, target)
    assert schedule.rule == "gpu_matrix_vector"
    return schedule.nest


SMALL = {
    "4 bits": nibbles(80, 4, 128),
    "4 bits, high ones first": nibbles(80, 2, 128, high_first=True),
    "4 bits with a sign": nibbles(64, 2, 128, signed=True),
    "4 bits, float16": nibbles(72, 2, 64, F16),
    "4 bits, odd rows and groups": nibbles(37, 3, 44),
    "4 bits, few rows, activated": nibbles(17, 5, 32, epilogue=True),
    "4 bits, four groups a step": nibbles(24, 8, 64),
    "bytes": rows(80, 512),
    "bytes, float16": rows(72, 256, F16),
    "bytes without a sign": rows(72, 256, BF16, U8),
    "bytes, odd rows, activated": rows(51, 384, epilogue=True),
    "bytes, a tail of the sum": rows(33, 200),
}


@pytest.mark.parametrize("name", SMALL)
def test_packed_matrices_times_a_vector(agrees, name):
    agrees(scheduled(SMALL[name]), tolerance=2e-2)


def test_scales_of_groups_that_lie_side_by_side_are_loaded_together():
    """In words, which are copied ahead as the matrix is; of a tail of rows, too."""
    text = emit_triton(scheduled(SMALL["4 bits, four groups a step"]), SM90).text
    for name in ("in2", "in3"):
        assert text.count(f"tl.load({name}_ptr") == text.count(f"{name}_0 = ") == 1
    assert text.count("tl.arange(0, 4)[None, :]") == 2


def test_rows_at_odd_places_are_left_to_other_rules():
    for nest in (rows(80, 511), nibbles(80, 3, 42)):
        in_words = nest.buffer("in1").strides[0] % 2 == 0
        assert (default_schedule(nest, SM90).rule == "gpu_matrix_vector") == in_words


def test_a_nan_of_the_vector_is_one_of_all_results(interpreter):
    """The columns of the tile are all alike, and one of them is taken."""
    nest = rows(32, 128)
    source = emit_triton(scheduled(nest), SM90)
    given = {"in0": np.ones(128, BF16.numpy), "in1": np.ones((32, 128), np.int8), "in2": np.ones(32, BF16.numpy)}
    given["in0"][5] = np.nan
    (found,) = interpreter.run(source, ("out0",), given, {}).values()
    assert np.isnan(found.astype(np.float32)).all()
    given["in0"][5] = np.inf
    (found,) = interpreter.run(source, ("out0",), given, {}).values()
    assert np.isposinf(found.astype(np.float32)).all()


LARGE = {"4 bits": nibbles(14336, 32, 128), "bytes": rows(14336, 4096)}


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120"])
@pytest.mark.parametrize("name", LARGE)
def test_large_matrices_are_read_wide(name, target):
    """By 16 bytes, but for the scales, which a thread loads once, and as much ahead as memory takes up meanwhile, where
    shared memory has room for that; nothing spills."""
    gpu = gpu_target(target)
    source = emit_triton(scheduled(LARGE[name], gpu), gpu)
    binary = compile_triton(source, gpu)
    report, issue = resource_report(binary), issue_report(binary, source, {})
    assert report.spills == 0 and report.shared <= gpu.shared_bytes
    assert report.wide_loads >= 0.95 and report.group_products + report.warp_products > 0
    assert issue is not None and report.occupancy is not None
    in_flight = issue.on_multiprocessor(report.threads, report.occupancy, gpu.machine)
    assert in_flight is not None
    assert in_flight >= (bytes_wanted(gpu.machine) if target != "cuda:sm_120" or name == "4 bits" else 15e3)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_89", "cuda:sm_90"])
@pytest.mark.parametrize(("kind", "size"), [(DType.FLOAT8_E4M3FN, 512), (DType.FLOAT8_E5M2, 512), (I8, 500), (U8, 500)])
def test_a_matrix_that_is_converted_alone(interpreter, kind, size, target):
    """Nothing but the conversion is between memory and the product, on either side. Where Triton brings parts of
    operands ahead, it took the columns of a vector for rows, and compiled nothing."""
    gpu = gpu_target(target)
    inputs = [buffer("in0", (size,), BF16), buffer("in1", (96, size), kind)]
    product = call("mul", wide("in0", (R0,), BF16), cast(cast(Load("in1", (ROW, R0), kind), BF16), F32))
    nest = scheduled(_ended(inputs, product, 96, dims(r0=size), BF16, False), gpu)
    source = emit_triton(nest, gpu)
    compile_triton(source, gpu)
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal(size).astype(BF16.numpy), (rng.standard_normal((96, size)) * 9).astype(kind.numpy)
    found = interpreter.run(source, ("out0",), {"in0": x, "in1": w}, {})["out0"][0].astype(np.float64)
    wanted = w.astype(np.float64) @ x.astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=8e-3, atol=8e-3 * np.abs(wanted).max())
