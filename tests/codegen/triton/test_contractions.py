"""Contractions on GPUs: the rule keeps their meaning, and what it makes of large ones uses the tensor cores well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.dtypes import DType
from torch_mlc.ir.expr import symbol
from torch_mlc.ir.symbols import Size, SymbolTable
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu import compile_triton, resource_report
from torch_mlc.scheduler.rules import default_schedule, design_space

sys.path.insert(0, str(Path(__file__).parent))
from contractions import batched, dequantised, linear, normed, row_softmax

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
S0 = symbol("s0")
TABLE = SymbolTable((Size(S0, 2, 4096, 1, 40),))


def scheduled(nest, target=SM90):
    schedule = default_schedule(nest, target)
    assert schedule.rule == "gpu_contraction"
    return schedule.nest


SMALL = {
    "even": linear(32, 64, 64),
    "odd": linear(37, 51, 67),
    "float32": linear(33, 40, 50, F32),
    "float16": linear(20, 70, 40, F16),
    "left transposed": linear(40, 48, 36, a_strides=(1, 40)),
    "right transposed": linear(40, 48, 36, w_strides=(1, 48)),
    "strided": linear(40, 48, 36, a_strides=(40, 1), w_strides=(72, 2)),
    "few rows": linear(3, 80, 100),
    "few columns": linear(80, 5, 100),
    "bias and gelu": linear(35, 40, 64, epilogue="gelu"),
    "residual": linear(70, 33, 40, epilogue="residual"),
    "gated": linear(35, 36, 40, epilogue="gated"),
    "batch": batched(3, 20, 33, 24),
    "batch float32": batched(2, 17, 16, 33, F32),
    "bytes by row": dequantised(20, 40, 70),
    "bytes by group": dequantised(5, 40, 128, group=32),
    "bytes, odd": dequantised(70, 40, 51, group=17),
    "norm": normed(20, 33, 70),
    "softmax": row_softmax(20, 27, 40),
}


@pytest.mark.parametrize("name", SMALL)
def test_rule_keeps_the_meaning(agrees, name):
    source = agrees(scheduled(SMALL[name]), tolerance=2e-5 if "float32" in name else 2e-2)
    assert "tl.dot(" in source.text


@pytest.mark.parametrize("rows", [2, 16, 17, 70])
def test_symbolic_rows(agrees, rows):
    agrees(scheduled(linear(S0, 40, 36, epilogue="residual", table=TABLE)), {"s0": rows}, tolerance=2e-2)


def test_every_candidate_keeps_the_meaning(agrees):
    nest = linear(70, 130, 72)
    found = [c for c in design_space(nest, SM90).candidates() if c.rule == "gpu_contraction"]
    assert len(found) > 8
    for candidate in found[::3]:
        agrees(candidate.schedule.nest, tolerance=2e-2)
