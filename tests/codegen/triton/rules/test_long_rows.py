"""Rows that registers do not hold: few at a time, so that a second visit finds them in the cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from tests.codegen.triton.rules.test_rules import BF16, F32, SM90, columns, scheduled, softmax
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.reports.model_report import Report
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


def norms(rows: int, columns: int, dtype: torch.dtype) -> Report:
    with FakeTensorMode():
        x, w, b = torch.empty(rows, columns, dtype=dtype), *(torch.empty(columns, dtype=dtype) for _ in range(2))
    return torch_mlc.explain(
        lambda x, w, b: F.layer_norm(x, (columns,), w, b), x, w, b, target="cuda:sm_90", options={"cache": False}
    )


@pytest.mark.parametrize("columns", [65536, 131072])
def test_norms_of_rows_that_the_cache_holds_read_memory_once(columns: int) -> None:
    """Of rows past 65,536 elements moments were taken in pieces: three kernels, and half as many bytes again."""
    (kernel,) = norms(2048, columns, torch.bfloat16).kernels
    assert kernel.rule == "gpu_row_looped" and kernel.traffic is not None and kernel.prediction is not None
    assert kernel.traffic.arrays["in0"].times == 1 and kernel.traffic.moved < 1.01 * kernel.traffic.least
    memory = kernel.traffic.moved / SM90.machine.bandwidth * 1e-9
    assert kernel.prediction.bounds["memory"] < 1.1 * memory


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(2048, 131072, torch.float32), (64, 131072, torch.bfloat16), (2048, 4 << 20, torch.bfloat16)],
    ids=["more than the cache", "few rows", "sums of too many terms"],
)
def test_moments_of_other_long_rows_are_taken_in_pieces(rows: int, columns: int, dtype: torch.dtype) -> None:
    assert len(norms(rows, columns, dtype).kernels) == 3


@pytest.mark.parametrize("columns", [40960, 40001])
def test_values(agrees, columns: int) -> None:
    nest = scheduled(softmax(3, columns, F32), "gpu_row_looped")
    assert NUM_WARPS.of(nest) == 32
    agrees(nest)
