"""Norm backward on GPUs: sums along rows and across them, of rows that a program holds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.versions import heavy_with_triton_3_6
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.reports.traffic import traffic_of
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.machine_code.issue import issue_report
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.cost.flight import bytes_wanted
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.rules import default_schedule, design_space
from torch_mlc.scheduler.rules.gpu import cross as gpu_cross
from torch_mlc.scheduler.schedule.schedule import Schedule

SM90 = gpu_target("cuda:sm_90")


def layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, w, b, [True, True, True])


def nests(rows: int, columns: int, dtype: torch.dtype, dynamic: bool = False) -> list[LoopNest]:
    """The two kernels."""
    row, column = torch.zeros(rows, 1, dtype=dtype), torch.zeros(columns, dtype=dtype)
    x = torch.zeros(rows, columns, dtype=dtype)
    if dynamic:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    found = capture(layer_norm_backward, (x, x.clone(), row, row.clone(), column, column), dynamic=None)
    retarget(found, "cuda")
    fusion = fuse(import_graph(found[0]))
    calls = [n for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    return [lower_to_loops(fusion.functions[c.function]) for c in calls]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(32, 64, torch.float32), (45, 64, torch.bfloat16), (33, 45, torch.float32), (37, 130, torch.bfloat16)],
)
def test_interpreted(rows: int, columns: int, dtype: torch.dtype, agrees: Callable[..., KernelSource]) -> None:
    first, second = nests(rows, columns, dtype)
    scheduled = default_schedule(first, SM90)
    assert scheduled.rule == "gpu_cross_reduction"
    source = agrees(scheduled.nest, tolerance=2e-2 if dtype is torch.bfloat16 else 2e-5)
    assert source.text.count("tl.load(in0_ptr") == 1, "the gradient is read once"
    agrees(default_schedule(second, SM90).nest, tolerance=2e-5)


def test_every_choice_interpreted(agrees: Callable[..., KernelSource]) -> None:
    first, _ = nests(50, 40, torch.float32)
    found = [c for c in design_space(first, SM90).candidates() if c.rule == "gpu_cross_reduction"]
    assert len(found) > 3
    for candidate in found[:4]:
        agrees(candidate.schedule.nest, tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [pytest.param(1024, marks=heavy_with_triton_3_6), 4096, 5000, 8192])
def test_no_spills(columns: int, dtype: torch.dtype) -> None:
    for nest in nests(4096, columns, dtype):
        schedule = default_schedule(nest, SM90)
        report = resource_report(compile_triton(emit_triton(schedule.nest, SM90), SM90))
        assert report.spills == 0, f"{schedule.rule}: {report}"
        if schedule.rule == "gpu_cross_reduction":
            assert report.wide_loads > 0.85


@pytest.mark.parametrize("columns", [256, 250])
def test_narrow_rows_interpreted(
    columns: int, agrees: Callable[..., KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Visits of a row begin from what was loaded: parts of it, each with sums of its own."""
    monkeypatch.setattr(gpu_cross, "long_row", lambda machine: 128)
    monkeypatch.setattr(gpu_cross, "held_words", lambda machine: 128)
    first, _ = nests(37, columns, torch.bfloat16)
    scheduled = default_schedule(first, SM90)
    assert scheduled.rule == "gpu_cross_reduction"
    source = agrees(scheduled.nest, tolerance=2e-2)
    assert source.text.count("tl.load(in0_ptr") == gpu_cross.PARTS and "mlc_held(in0_0)" in source.text
    # Parts of a row have one address in registers, and each a constant beside it.
    starts = {m[1] for m in re.finditer(r"tl\.load\(in0_ptr \+ \(([^)]*)\)(?: \+ \d+)?[,)]", source.text)}
    assert len(starts) == 1 and source.text.count(" + 64") and source.text.count(" + 192")
    traffic = traffic_of(scheduled.nest)
    assert traffic.moved == traffic.least


@pytest.mark.parametrize("columns", [512, 501])
def test_parts_of_which_a_thread_sums_up_what_it_loads(columns: int, agrees: Callable[..., KernelSource]) -> None:
    first, _ = nests(37, columns, torch.bfloat16)
    schedule = Schedule(first, rule=gpu_cross.GPU_CROSS_REDUCTION.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_cross, "_is_narrow", lambda shape, target: True)
        gpu_cross.GPU_CROSS_REDUCTION.apply(schedule, SM90, {"rows": 1, "warps": 1, "parts": 2, "stages": 1})
    source = agrees(schedule.nest, tolerance=2e-2)
    assert source.text.count("[32, 8]), 1)") == 2 * 2, "two sums of a row, in two parts"


@pytest.mark.parametrize("columns", [pytest.param(16384, marks=heavy_with_triton_3_6), 12000])
def test_long_rows_with_two_sums(columns: int) -> None:
    """The gradient and the row stay in registers as half types, beside both sums."""
    first, _ = nests(4096, columns, torch.bfloat16)
    schedule = default_schedule(first, SM90)
    assert schedule.rule == "gpu_cross_reduction"
    source = emit_triton(schedule.nest, SM90)
    assert "mlc_held" in source.text
    binary = compile_triton(source, SM90)
    report, issue = resource_report(binary), issue_report(binary, source, {})
    assert report.spills == 0 and report.wide_loads > 0.95
    # The next row is copied while this one is reduced: more than memory takes up meanwhile.
    assert issue is not None and report.occupancy is not None
    held = issue.on_multiprocessor(report.threads, report.occupancy, SM90.machine)
    assert held is not None and held >= bytes_wanted(SM90.machine)


@pytest.mark.parametrize(("target", "stages"), [("cuda:sm_80", 2), ("cuda:sm_120", 1), ("hip:gfx942", 1)])
def test_the_next_row_is_copied_where_shared_memory_holds_it(target: str, stages: int) -> None:
    """Two arrays of rows, and what all rows have in common by each of two visits."""
    first, _ = nests(4096, 16384, torch.bfloat16)
    assert gpu_cross.GPU_CROSS_REDUCTION.parameters(first, gpu_target(target))["stages"][0] == stages


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def test_long_rows() -> None:
    """One sum for each element of 16384 stays in registers, of a program a multiprocessor."""
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((4096, 16384), (16384,))]
    found = capture(rms_norm, inputs, training=True)
    retarget(found, "cuda")
    fusion = fuse(import_graph(found[1]))
    first, _ = (lower_to_loops(fusion.functions[c.function]) for c in fusion.graph.nodes if isinstance(c, CallTensor))
    schedule = default_schedule(first, SM90)
    assert schedule.rule == "gpu_cross_reduction"
    source = emit_triton(schedule.nest, SM90)
    assert source.grid == (128,)
    assert resource_report(compile_triton(source, SM90)).spills == 0
