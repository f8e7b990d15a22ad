"""Every kernel of the benchmark models compiles for GPUs that are not here: none is refused, none spills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import fx

import torch_mlc
from benchmarks.models.registry import MODELS
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.structure import function_key
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

pytest.importorskip("triton")
TARGETS = ["cuda:sm_90", "hip:gfx942"]
F32, BF16 = torch.float32, torch.bfloat16
HALF = ("gpt2_d128", "llama", "bert", "resnet18")
# Models whose kernels are much like those of another one here.
ALIKE = ("gpt2_d768", "bert", "resnet50", "mixer")
# Of the second target's, those that run always.
SECOND = ("gpt2_d128", "dlrm")
DYNAMIC = ("gpt2_d128", "llama", "resnet18")


@dataclass(frozen=True)
class Program:
    """A model as it is compiled. ``layers`` 0: the size "tiny"; else "small" with so many layers and short batches."""

    model: str
    dtype: torch.dtype = F32
    dynamic: bool = False
    layers: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join(filter(None, (self.model, dtype, "dynamic" * self.dynamic, "wide" * bool(self.layers))))

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The graphs of inference and of a training step, for a GPU."""
        spec, size = MODELS[self.model], "small" if self.layers else "tiny"
        model = spec.build(size, **({"layers": self.layers} if self.layers else {})).to(self.dtype)
        dims = {k: min(v, 64) for k, v in spec.dims[size].items()}
        inputs = spec.inputs(size, dtype=self.dtype, **dims)
        found = (
            capture(lambda batch: spec.loss(model(*batch.args), batch), (inputs,), training=True, dynamic=self.dynamic)
            if spec.trains
            else []
        )
        found += capture(model.eval(), inputs.args, dynamic=self.dynamic)
        retarget(found, "cuda")
        yield from found


PROGRAMS = [
    *(Program(name) for name in MODELS),
    *(Program(name, BF16) for name in HALF),
    *(Program(name, dynamic=True) for name in DYNAMIC),
    *(Program("gpt2_d128", dtype, layers=2) for dtype in (F32, BF16)),
]


def cases() -> Iterator[object]:
    """Every program for every target. One model of those that are alike runs always; of the variants by type, size and
    symbolic sizes those of one model, on the first target: the second's compiler is the same up to its last steps, and
    some models do for it."""
    for name in TARGETS:
        for program in PROGRAMS:
            varied = program.dynamic or program.dtype is BF16 or bool(program.layers)
            second = name != TARGETS[0]
            rare = (varied and (second or program.model != "gpt2_d128")) or (second and program.model not in SECOND)
            # Of each size one type: the large one in bfloat16, the small one in float32.
            rare |= program.dtype is (F32 if program.layers else BF16) or program.model in ALIKE
            yield pytest.param(name, program, id=f"{name}-{program}", marks=[pytest.mark.slow] if rare else [])


@cache
def functions(program: Program) -> dict[str, TensorFunction]:
    """The kernels of a program by the key of their structure."""
    found: dict[str, TensorFunction] = {}
    options = Options.resolve(None, {"target": TARGETS[0]}, {})
    for gm in program.graphs():
        context = context_of(options)
        graph = run_passes(GRAPH_PASSES, import_graph(gm), context)
        fusion = run_passes(CALL_PASSES, fuse(graph, context), context)
        called = {n.function for n in fusion.graph.nodes if isinstance(n, CallTensor)}
        found.update({function_key(fusion.functions[name]): fusion.functions[name] for name in called})
    return found


@pytest.fixture(scope="module")
def compiled() -> set[object]:
    """What has been compiled: kernels that models share are compiled once."""
    return set()


def alike(source: KernelSource) -> object:
    """The same for kernels that differ in sizes alone."""
    kernel = source.text.replace(source.name, "")
    return re.sub(r"\d{2,}", "#", kernel), tuple(b.dtype for b in source.params), source.option("index")


# Bytes that a called function, a division of subnormal numbers, saves outside of all loops.
CALLED = 8


@pytest.mark.parametrize(("name", "program"), list(cases()))
def test_kernels_compile(name: str, program: Program, compiled: set[object]) -> None:
    """On the second target, whose compiler is the same up to its last steps, one kernel stands for those alike."""
    target = gpu_target(name)
    wrong: list[str] = []
    for key, function in functions(program).items():
        if (name, key) in compiled:
            continue
        compiled.add((name, key))
        schedule = default_schedule(lower_to_loops(function), target)
        source = emit(schedule.nest, target)
        if name != TARGETS[0] and (name, alike(source)) in compiled:
            continue
        compiled.add((name, alike(source)))
        report = resource_report(compile_triton(source, target))
        spills = target.kind == "cuda" and report.spills > CALLED
        if schedule.rule == "gpu_plain" or report.shared > target.shared_bytes or spills:
            wrong.append(f"{function.name}, {schedule.rule}: {report}")
    assert functions(program), "no kernels"
    assert not wrong, "\n".join(wrong)


def test_explain_needs_no_gpu() -> None:
    spec = MODELS["bert"]
    report = torch_mlc.explain(spec.build("tiny").eval(), *spec.inputs("tiny").args, target="cuda:sm_90")
    (graph,) = report.graphs
    assert graph.target == "cuda:sm_90" and graph.fallbacks == ()
    assert graph.kernels and all(k.rule.startswith("gpu_") and "@triton.jit" in k.source for k in graph.kernels)
