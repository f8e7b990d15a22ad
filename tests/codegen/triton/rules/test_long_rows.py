"""Rows that registers do not hold: few at a time, so that a second visit finds them in the cache."""

from __future__ import annotations

import pytest

from tests.codegen.triton.rules.test_rules import BF16, F32, SM90, columns, scheduled, softmax
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.reports.prediction import kernel_work
from torch_mlc.ir.nest.hints import NUM_WARPS
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.rules.gpu.row import stay_in_cache

pytest.importorskip("triton")


def lines(nest: LoopNest) -> list[str]:
    return [line for line in emit_triton(nest, SM90).text.splitlines() if "tl.load" in line]


def test_a_program_has_a_multiprocessor_to_itself_and_memory_is_read_once() -> None:
    """132 rows of 128 KiB are in 50 MiB of cache at their second visit, a thousand are not: 1.5 times the bytes."""
    nest = scheduled(softmax(4096, 65536), "gpu_row_looped")
    source = emit_triton(nest, SM90)
    binary = compile_triton(source, SM90)
    work, report = kernel_work(binary, source, nest, SM90), resource_report(binary)
    assert work is not None and work.resident == 1 and report.spills == 0 and report.wide_loads == 1
    assert work.memory < 1.01 * 2 * 4096 * 65536 * 2


def test_caches_keep_a_row_until_its_last_visit() -> None:
    nest = scheduled(softmax(4096, 65536), "gpu_row_looped")
    *before, last = lines(nest)
    assert before and all('"evict_last"' in line for line in before) and '"evict_first"' in last
    text = compile_triton(emit_triton(nest, SM90), SM90).assembly
    assert "createpolicy.fractional.L2::evict_last" in text and "createpolicy.fractional.L2::evict_first" in text


@pytest.mark.parametrize(
    "nest",
    [softmax(4096, 32768, BF16), softmax(4096, 131072, F32), columns(65536, 64)],
    ids=["held in registers", "more than the cache", "no second visit"],
)
def test_other_rows_are_left_alone(nest: LoopNest) -> None:
    assert not stay_in_cache(nest, SM90)


@pytest.mark.parametrize(("target", "near"), [("cuda:sm_80", True), ("cuda:sm_100", True), ("hip:gfx942", False)])
def test_the_cache_of_the_target_decides(target: str, near: bool) -> None:
    assert stay_in_cache(softmax(4096, 65536), gpu_target(target)) is near


@pytest.mark.parametrize("columns", [40960, 40001])
def test_values(agrees, columns: int) -> None:
    nest = scheduled(softmax(3, columns, F32), "gpu_row_looped")
    assert NUM_WARPS.of(nest) == 32
    agrees(nest)
