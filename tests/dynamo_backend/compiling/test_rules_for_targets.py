"""Every rule for GPUs compiles for each kind of GPU that is known: by its default schedule or a lighter one, within the
shared memory of a block and the registers of a thread, on tensor cores where the target's kernels reach them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.codegen.triton.rules.test_contractions import LARGE
from tests.scheduler.cost.test_decisions import Program, imported, planned
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.compiling.lighter import fitting_code
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.compile.kernels import KernelCode, compile_source, gpu_binary
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import resource_report
from torch_mlc.runtime.triton.report import ResourceReport
from torch_mlc.runtime.triton.worker_pool import worker_pool
from torch_mlc.scheduler.calls.join_small import join_small
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.scatter import begin_apart
from torch_mlc.scheduler.rules import RULES, default_schedule, design_space
from torch_mlc.scheduler.schedule.schedule import Schedule

pytest.importorskip("triton")

HALF, FULL, WORDS = torch.bfloat16, torch.float32, torch.int64
SM90 = gpu_target("cuda:sm_90")
# Compute capability 11.0 is one of the family of 10.0; Triton 3.9 aborts for it.
TARGETS = ("cuda:sm_75", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx90a",
           "hip:gfx942")  # fmt: skip


def _norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125 + bias, -1) @ v


_HEADS = [((2, 8, 1024, 64), HALF)] * 3
PROGRAMS: Mapping[str, Program] = {
    "gpu_pointwise": Program(lambda x, b: F.gelu(x + b), [((8192, 3072), HALF), ((3072,), HALF)]),
    "gpu_transpose": Program(lambda x, y: x + y.mT, [((4096, 4096), HALF)] * 2),
    "gpu_row_persistent": Program(lambda x: torch.softmax(x, -1), [((4096, 8192), HALF)]),
    "gpu_row_online": Program(lambda x: torch.softmax(x, -1), [((1024, 131072), FULL)]),
    "gpu_row_looped": Program(_norm, [((1024, 131072), FULL), ((131072,), FULL)]),
    "gpu_column_reduction": Program(lambda x: x.sum(0), [((8192, 256), HALF)]),
    "gpu_cross_reduction": Program(_norm, [((4096, 4096), HALF), ((4096,), HALF)], training=True),
    "gpu_scan": Program(lambda x: x.cumsum(-1), [((256, 4096), FULL)]),
    "gpu_scatter": Program(lambda x, at, out: out.index_add(0, at, x),
                           [((8192, 256), FULL), ((8192,), WORDS), ((1000, 256), FULL)]),
    "gpu_segments": Program(lambda x, at, out: out.index_add(0, at, x),
                            [((16384, 768), HALF), ((16384,), WORDS), ((50257, 768), HALF)]),
    "gpu_small": Program(lambda x, y: (x.sin(), y.cos()), [((16, 1024), HALF), ((3, 700), HALF)]),
    "gpu_stencil": Program(lambda x: F.max_pool2d(x, 3, 2, 1), [((32, 64, 112, 112), HALF)]),
    "gpu_filters": Program(lambda x, w: F.conv2d(x, w, padding=1, groups=96),
                           [((32, 96, 56, 56), HALF), ((96, 1, 3, 3), HALF)], training=True),
    "gpu_matrix_vector": Program(lambda x, w, scale: F.linear(x, w.to(x.dtype) * scale),
                                 [((1, 4096), HALF), ((14336, 4096), torch.int8), ((14336, 1), HALF)]),
    "gpu_attention": Program(_biased, [*_HEADS, ((8, 1024, 1024), HALF)], training=True),
    "gpu_attention_gradients": Program(_biased, [*_HEADS, ((8, 1024, 1024), HALF)], training=True),
    "gpu_attention_bias": Program(_biased, [*_HEADS, ((8, 1024, 1024), HALF)], training=True),
}  # fmt: skip
# Bytes of registers that a thread has in memory at most, where neither the default nor a lighter schedule does without.
SPILLS: Mapping[tuple[str, str], int] = {}


@cache
def nests(name: str) -> tuple[LoopNest, ...]:
    """The kernels of a program, as they are lowered for one GPU."""
    fusions = [begin_apart(planned(g, SM90)) for g in imported(PROGRAMS[name], "cuda")]
    if name == "gpu_small":
        fusions = [join_small(f, context_of(Options(target="cuda:sm_90"))) for f in fusions]
    return tuple(lower_to_loops(f) for fusion in fusions for f in fusion.functions.values())


def nest_of(rule: str) -> LoopNest:
    if rule == "gpu_contraction":
        return LARGE["bias and gelu"]
    return next(n for n in nests("gpu_pointwise" if rule == "gpu_plain" else rule)
                if rule in ("gpu_plain", default_schedule(n, SM90).rule))  # fmt: skip


def schedule_of(nest: LoopNest, rule: str, target: Target) -> Schedule:
    if rule != "gpu_plain":
        return default_schedule(nest, target)
    last = design_space(nest, target).rules[-1]
    schedule = Schedule(nest, last.name)
    last.apply(schedule, target, {})
    return schedule


def compiled(nest: LoopNest, schedule: Schedule, target: Target) -> ResourceReport:
    """What the code takes that another process makes, for a compiler's crash is the end of one. Raises MlcError."""
    run = partial(worker_pool().run, stop=threading.Event())

    def make(source: KernelSource) -> KernelCode:
        return compile_source(source, target, "key", run=run)

    return resource_report(gpu_binary(fitting_code(nest, target, schedule, emit_triton(schedule.nest, target), make)))


def test_every_rule_for_gpus_has_a_workload() -> None:
    assert {r.name for r in RULES if "cuda" in r.kinds} == {*PROGRAMS, "gpu_contraction", "gpu_plain"}
    assert {(t, r) for t, r in SPILLS if t in TARGETS and r in PROGRAMS} == SPILLS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_rule_compiles(target: str) -> None:
    machine = gpu_target(target)
    found: dict[str, str] = {}
    for rule in (*PROGRAMS, "gpu_contraction", "gpu_plain"):
        if rule == "gpu_matrix_vector" and not machine.has_pairs:
            continue  # a vector times a packed matrix is a sum of rows there
        nest = nest_of(rule)
        schedule = schedule_of(nest, rule, machine)
        assert schedule.rule == rule
        report = compiled(nest, schedule, machine)
        most = SPILLS.get((target, rule), 0)
        dots = emit_triton(schedule.nest, machine).text.count("tl.dot(")
        by_cores = dots and machine.multiplies(DType.BFLOAT16)
        if report.spills > most:
            found[rule] = f"{report.spills} bytes of registers in memory"
        elif report.shared > machine.shared_bytes or report.occupancy == 0:
            found[rule] = f"no room: {report}"
        elif by_cores and not report.group_products + report.warp_products:
            found[rule] = "no tensor cores"
    assert not found
