"""Point-wise kernels that read across: tiles by how rows lie in cache lines, and the code that turns them round."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_mlc
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.nest.loops import Loop, LoopKind, LoopNest, blocks
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.cost.cpu_kernels import TRANSPOSED_TILE
from torch_mlc.scheduler.rules.cpu.column import CPU_COLUMN_REDUCTION
from torch_mlc.scheduler.rules.cpu.pointwise import CPU_POINTWISE
from torch_mlc.scheduler.schedule.schedule import Schedule

WIDE = replace(cpu_target(2), vector_bytes=64)
NARROW = replace(cpu_target(2), vector_bytes=32)


def nest_for(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> LoopNest:
    x, y = torch.zeros(rows, columns, dtype=dtype), torch.zeros(columns, rows, dtype=dtype)
    (kernel,) = torch_mlc.explain(lambda x, y: x + y.t(), x, y).kernels
    return kernel.nest


def scheduled(nest: LoopNest, target: Target, **chosen: bool) -> LoopNest:
    schedule = Schedule(nest)
    params = {k: v[0] for k, v in CPU_POINTWISE.parameters(nest, target).items()} | chosen
    CPU_POINTWISE.apply(schedule, target, params)
    return schedule.nest


def around(nest: LoopNest) -> tuple[Loop, ...]:
    ((_, outer),) = blocks(nest)
    return outer


def extents(nest: LoopNest) -> list[int]:
    return [int(lp.extent) for lp in around(nest)]


def test_rows_in_whole_lines_are_visited_in_blocks() -> None:
    nest = nest_for(256, 192)
    assert extents(scheduled(nest, WIDE))[-4:] == [4, 4, 16, 16]
    assert extents(scheduled(nest, NARROW))[-4:] == [4, 8, 16, 8]
    assert extents(scheduled(nest, WIDE, blocks=False))[-2:] == [16, 16]


def test_rows_that_begin_anywhere_in_a_line_have_tiles_of_half_a_line() -> None:
    nest = nest_for(255, 191)
    assert "blocks" not in CPU_POINTWISE.parameters(nest, WIDE)
    for target in (WIDE, NARROW):
        done = scheduled(nest, target)
        assert extents(done)[-2:] == [16, 8]
        assert [lp.kind for lp in around(done)][-2:] == [LoopKind.UNROLLED, LoopKind.VECTORIZED]


def test_a_line_is_loaded_once() -> None:
    """By the rows of a tile that are as long as a line: their second halves would not be in the cache any more."""
    nest = nest_for(256, 192)
    for target, side in ((WIDE, 16), (NARROW, 8)):
        text = emit_llvm(scheduled(nest, target), target).text
        across = re.findall(r"load <(\d+) x float>, ptr %\S+, align 4$", text, re.M)
        assert set(across) == {str(side)}
        assert "gather" not in text
    assert len(across) == 16  # of half a line each, for 8 rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (48, 80), (63, 65), (16, 16)], ids=str)
def test_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    nest = nest_for(*shape, dtype)
    rng = np.random.default_rng(sum(shape))
    given = [(rng.standard_normal(int(np.prod(shape))) * 9).astype(nest.params[k].dtype.numpy) for k in (0, 1)]
    wanted = run_nest(nest, given, {})[nest.outputs[0]]
    for target in (WIDE, NARROW):
        if target.vector_bytes > cpu_target().vector_bytes:
            continue
        kernel = load_kernel(emit_llvm(scheduled(nest, target), target), target)
        got = np.zeros(shape, wanted.dtype)
        kernel(*(a.ctypes.data for a in given), got.ctypes.data)
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), wanted.view(f"u{got.itemsize}"))


def channels_last_norm(rows: int, channels: int) -> LoopNest:
    """A norm over channels that lie far apart, whose result has them side by side."""
    x, w = torch.zeros(2, channels, rows), torch.zeros(channels)
    (kernel,) = torch_mlc.explain(lambda x, w: F.layer_norm(x.transpose(1, 2), (channels,), w), x, w).kernels
    assert kernel.rule == "cpu_column_reduction"
    return kernel.nest


@pytest.mark.parametrize("shape", [(192, 96), (191, 95), (35, 20)], ids=str)
def test_elements_behind_a_reduction_across_leave_in_rows(shape: tuple[int, int]) -> None:
    nest = channels_last_norm(*shape)
    rng = np.random.default_rng(sum(shape))
    given = [rng.standard_normal(int(np.prod(nest.params[k].shape))).astype(np.float32) for k in (0, 1)]
    wanted = run_nest(nest, given, {})[nest.outputs[0]]
    for target in (WIDE, NARROW):
        schedule = Schedule(nest)
        rule = CPU_COLUMN_REDUCTION
        rule.apply(schedule, target, {k: v[0] for k, v in rule.parameters(nest, target).items()})
        source = emit_llvm(schedule.nest, target)
        if not shape[0] % TRANSPOSED_TILE and not shape[1] % TRANSPOSED_TILE:
            assert "scatter" not in source.text, "lanes are written one by one"
        if target.vector_bytes > cpu_target().vector_bytes:
            continue
        got = np.zeros(wanted.shape, wanted.dtype)
        load_kernel(source, target)(*(a.ctypes.data for a in given), got.ctypes.data)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
