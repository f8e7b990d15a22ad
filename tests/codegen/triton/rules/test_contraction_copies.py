"""Contractions whose operands the tensor memory accelerator copies, and whose programs last over several tiles."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sympy

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.gpu.contraction import GPU_CONTRACTION
from torch_mlc.scheduler.rules.gpu.copies import lasting_programs

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import SM90, batched, byte_products, dequantised, integers, linear, scheduled

S0 = symbol("s0")


SMALL = {
    "even": linear(32, 64, 64),
    "tails": linear(37, 51, 72),
    "left transposed": linear(40, 48, 24, a_strides=(1, 40)),
    "right transposed": linear(40, 48, 24, w_strides=(1, 48)),
    "padded rows": linear(40, 48, 40, a_strides=(48, 1)),
    "few rows": linear(3, 80, 72),
    "gated": linear(35, 36, 40, epilogue="gated"),
    "batch": batched(3, 20, 40, 24),
    "one side computed": dequantised(20, 48, 80),
    "bytes": byte_products(20, 48, 80),
    "integers": integers(20, 48, 80),
    "symbolic rows": linear(S0, 48, 40, table=SymbolTable((Size(S0, 2, 4096, 1, 40),))),
    "any number of rows": linear(S0, 48, 40, table=SymbolTable((Size(S0, 2, None, 1, 40),))),
}


@pytest.mark.parametrize("name", SMALL)
def test_descriptors_keep_the_meaning(agrees, name):
    sizes = {"s0": 37} if name.endswith(" rows") else {}
    source = agrees(scheduled(SMALL[name], descriptors=True), sizes, tolerance=2e-2)
    read = {"one side computed": {"in0"}}.get(name, {"in0", "in1"})
    assert read <= set(str(source.option("descriptors")).split(","))
    assert "tl.dot(" in source.text and re.search(r"in0_map0\.load\(", source.text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_descriptors_on_a_gpu(agrees_on_gpu, name):
    sizes = {"s0": 37} if name.endswith(" rows") else {}
    agrees_on_gpu(lambda target: scheduled(SMALL[name], target, descriptors=True), sizes=sizes, tolerance=2e-2)


@pytest.mark.parametrize("strides", [{"a_strides": (41, 1)}, {"a_strides": (80, 2)}])
def test_rows_that_start_anywhere_are_copied_element_by_element(agrees, strides):
    source = agrees(scheduled(linear(40, 48, 40, **strides), descriptors=True), tolerance=2e-2)
    assert source.option("descriptors") == "in1"


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("nest", [linear(128, 64, 48), batched(4, 30, 40, 48)])
def test_programs_that_last_keep_the_meaning(agrees, nest, descriptors):
    target = replace(SM90, cores=1)  # which holds seven programs of these tiles
    tile = "16x16x16/4/2" if nest.name == "linear" else "32x16x16/4/2"
    wanted = scheduled(nest, target, persistent=True, descriptors=descriptors, tile=tile)
    source = agrees(wanted, tolerance=2e-2)
    assert "flatten=True" in source.text and source.grid[0] == (7 if nest.name == "linear" else 6)


UNEVEN = {
    "nine tiles": (linear(144, 16, 64), "16x16x16/4/2", {}),
    "prime sizes": (linear(103, 67, 40), "16x16x16/4/2", {}),
    "batch": (batched(3, 37, 40, 24), "16x16x16/4/2", {}),
    "transposed": (linear(40, 104, 24, a_strides=(1, 40), w_strides=(1, 104)), "16x16x16/4/2", {}),
    "gated": (linear(35, 72, 40, epilogue="gated"), "16x16x16/4/2", {}),
    "symbolic rows": (linear(S0, 48, 40, table=SymbolTable((Size(S0, 2, 4096, 1, 130),))), "16x16x16/4/2", {"s0": 37}),
    "few tiles": (linear(S0, 16, 40, table=SymbolTable((Size(S0, 2, 4096, 1, 512),))), "16x16x16/4/2", {"s0": 5}),
    "no rows": (linear(S0, 16, 40, table=SymbolTable((Size(S0, 0, None, 1, 512),))), "16x16x16/4/2", {"s0": 0}),
}  # fmt: skip


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("name", UNEVEN)
def test_the_last_round_of_programs_may_have_fewer_tiles(agrees, name, descriptors):
    nest, tile, sizes = UNEVEN[name]
    target = replace(SM90, cores=1)
    wanted = scheduled(nest, target, persistent=True, descriptors=descriptors, tile=tile)
    source = agrees(wanted, sizes, tolerance=2e-2)
    assert "flatten=True" in source.text


def test_programs_that_last_are_as_many_as_their_rounds_want():
    assert lasting_programs(sympy.Integer(4), 4) is None
    assert [lasting_programs(sympy.Integer(n), 4) for n in (5, 7, 8, 9, 513)] == [3, 4, 4, 3, 4]
    assert lasting_programs(S0, 4) == 4


LARGE = {
    "plain": linear(4096, 4096, 14336),
    "gelu": linear(2048, 4096, 1024, epilogue="gelu"),
    "gated": linear(4096, 14336, 4096, epilogue="gated"),
    "transposed": linear(4096, 4096, 4096, a_strides=(1, 4096), w_strides=(1, 4096)),
    "batch": batched(16, 1024, 1024, 1024),
    "symbolic rows": linear(S0, 4096, 4096, table=SymbolTable((Size(S0, 1, 65536, 1, 8192),))),
    "any number of rows": linear(S0, 4096, 4096, table=SymbolTable((Size(S0, 1, None, 1, 8192),))),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_contractions_are_copied_by_the_accelerator(name):
    source = emit_triton(scheduled(LARGE[name], SM90, descriptors=True, persistent=True), SM90)
    binary = compile_triton(source, SM90)
    report = resource_report(binary)
    assert {"in0", "in1"} <= set(str(source.option("descriptors")).split(","))
    assert "cp.async.bulk.tensor" in binary.assembly and "wgmma.mma_async" in binary.assembly
    assert report.spills == 0 and report.shared <= SM90.shared_bytes and binary.scratch_bytes > 0
    # A bias is read beside the tiles.
    assert report.wide_stores == 1.0 and (report.wide_loads >= 0.95 or name == "gelu")
    assert "flatten=True" in source.text


LOSS = """
@function
def f(
    in0: bfloat16[8192, 768], in1: bfloat16[{n}, 768],
    out0: output(bfloat16[8192, {n}]), out1: output(float32[{tiles}, 8192]),
):
    i0 = row(8192)
    i1 = row({n})
    r0 = inner(768)
    x0 = extra({tiles})
    x1 = extra(128)
    t0, = reduce(sum, rows, inner, (mul(cast(in0[i0, r0], float32), cast(in1[i1, r0], float32)),))
    t1 = compute(rows, t0[i0, i1])
    t2, = reduce(max, [x0, i0], [x1], (
        select(lt(index(x1 + 128*x0, int64), index({n}, int64)), t1[i0, x1 + 128*x0], float32(float("-inf"))),
    ))
    out0[i0, i1] = t1
    out1[x0, i0] = t2
"""


@pytest.mark.parametrize("columns", [50304, 50257])
def test_tiles_are_reduced_whether_or_not_the_last_one_has_a_tail(columns):
    """A tail of what is reduced is no tail of the reduction, so programs have one tile each there."""
    nest = lower_to_loops(parse(LOSS.format(n=columns, tiles=-(-columns // 128))))
    schedule = default_schedule(nest, SM90)
    assert schedule.rule == "gpu_contraction"
    assert ("flatten" in show(schedule.nest)) == (columns % 128 == 0)
    emit_triton(schedule.nest, SM90)


def test_warps_have_parts_of_the_work_where_that_is_asked_for():
    nest = linear(4096, 4096, 4096)
    wanted = scheduled(nest, descriptors=True, persistent=False, specialized=True, tile="64x128x64/4/4")
    binary = compile_triton(emit_triton(wanted, SM90), SM90)
    assert "setmaxnreg" in binary.assembly and binary.threads == 384 and resource_report(binary).spills == 0
    with pytest.raises(ScheduleError, match="four-warp programs"):
        scheduled(nest, specialized=True, tile="128x256x64/8/3")


def test_older_architectures_have_no_accelerator():
    nest = linear(4096, 4096, 4096)
    for name in ("cuda:sm_80", "hip:gfx942"):
        assert "descriptors" not in GPU_CONTRACTION.parameters(nest, gpu_target(name))
