"""Contractions whose results go on in parts of their columns, so that registers hold a part of what is made of them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torch_mlc.codegen.kernel import EmitError
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.hints import COLUMN_PARTS
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.gpu.contraction import GPU_CONTRACTION

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import F32, SM90, batched, dequantised, integers, linear, row_softmax, scheduled

S0 = symbol("s0")


SMALL = {
    "plain": linear(37, 51, 72),
    "gelu": linear(35, 70, 40, epilogue="gelu"),
    "residual": linear(32, 67, 24, epilogue="residual"),
    "gated": linear(35, 36, 40, epilogue="gated"),
    "batch": batched(3, 20, 40, 24),
    "columns become rows": dequantised(20, 48, 80),
    "integers": integers(20, 48, 80),
    "symbolic rows": linear(S0, 48, 40, epilogue="gelu", table=SymbolTable((Size(S0, 0, None, 1, 40),))),
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_parts_keep_the_meaning(agrees, name, parts):
    sizes = {"s0": 37} if name.startswith("symbolic") else {}
    source = agrees(scheduled(SMALL[name], column_parts=parts), sizes, tolerance=2e-2)
    assert len(re.findall(r"tl\.split\(", source.text)) == (parts - 1) * (2 if name == "gated" else 1)
    assert len(re.findall(r"tl\.store\(", source.text)) == parts


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_programs_that_last_keep_the_meaning(agrees, parts):
    nest, target = linear(103, 67, 40, epilogue="residual"), replace(SM90, cores=1)
    given = {"persistent": True, "descriptors": True, "tile": "16x16x16/4/2"}
    source = agrees(scheduled(nest, target, column_parts=parts, **given), tolerance=2e-2)
    assert "flatten=True" in source.text and len(re.findall(r"tl\.store\(", source.text)) == parts


def test_infinities_and_nan_stay_in_their_columns(agrees):
    """What one part has does not reach another."""
    w = np.ones((64, 32), np.float32)
    for column, value in ((0, np.nan), (15, np.inf), (16, -np.inf), (31, 3e38), (63, np.nan)):
        w[column, 5] = value
    given = {"in0": np.ones((32, 32), np.float32), "in1": w}
    agrees(scheduled(linear(32, 64, 32, dtype=F32), column_parts=2), inputs=given, tolerance=2e-2)


def test_there_are_two_parts_where_results_take_half_of_the_registers():
    def parts(nest, target=SM90):
        return GPU_CONTRACTION.parameters(nest, target).get("column_parts", ("none",))[0]

    assert parts(linear(8192, 4096, 1024, epilogue="gelu")) == 2
    assert parts(linear(4096, 14336, 4096, epilogue="gated")) == 2
    assert parts(linear(256, 256, 1024)) == 1
    # A row is wanted whole; a warp of older tensor cores has columns of its neighbours.
    assert parts(row_softmax(4096, 256, 512)) == "none"
    assert parts(linear(8192, 4096, 1024), gpu_target("cuda:sm_80")) == "none"


def test_columns_that_have_no_parts_are_an_error():
    nest = scheduled(linear(32, 64, 32))
    plain = replace(nest, annotations=(*nest.annotations, (COLUMN_PARTS.name, 2)))
    emit_triton(plain, SM90)
    vector = default_schedule(linear(1, 64, 64), SM90).nest
    with pytest.raises(EmitError, match="no 2 parts"):
        emit_triton(replace(vector, annotations=(*vector.annotations, (COLUMN_PARTS.name, 2))), SM90)


@pytest.mark.parametrize("epilogue", ["gelu", "residual"])
def test_parts_spare_the_registers_that_the_whole_tile_spills(epilogue):
    nest, registers = linear(8192, 3072, 768, epilogue=epilogue), {}
    for parts in (1, 2):
        wanted = scheduled(nest, tile="128x256x64/8/3", column_parts=parts)
        report = resource_report(compile_triton(emit_triton(wanted, SM90), SM90))
        registers[parts] = report.registers
        assert report.spills == 0 or parts == 1
    assert registers[2] + 40 <= registers[1]
