"""A step of Llama's decoding on a GPU that is not here: how many launches a layer takes, and what its kernels are."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models.registry import MODELS
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device, retarget
from torch_mlc.ir.graph.graph import CallTensor, Library
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

pytest.importorskip("triton")
TARGET = "cuda:sm_90"
# Queries with keys and values; their rotation, with the write into the caches; attention, a library's call of the CPU's
# graph and two kernels of a GPU's; the output with the residual; gate and up; down with the residual. Norms are made by
# the products that read them.
LAUNCHES = 6


def decoded(layers: int) -> Fusion:
    """The calls of a step for one token, at the size of a model of a billion parameters."""
    spec = MODELS["llama_decode"]
    inputs = spec.inputs("full", dtype=torch.bfloat16)
    inputs = inputs._replace(args=inputs.args[: 2 + 2 * layers])
    model, (args, _) = on_fake_device(spec.build("full", layers=layers).to(torch.bfloat16), inputs, "cpu")
    found = capture(model.eval(), args)
    retarget(found, "cuda")
    (gm,) = found
    context = context_of(Options.resolve(None, {"target": TARGET}, {}))
    return run_passes(CALL_PASSES, fuse(run_passes(GRAPH_PASSES, import_graph(gm), context), context), context)


def launches(fusion: Fusion) -> int:
    return sum(isinstance(n, (CallTensor, Library)) for n in fusion.graph.nodes)


def test_a_layer_takes_six_launches() -> None:
    one, two = decoded(1), decoded(2)
    assert launches(two) - launches(one) <= LAUNCHES
    # Beside the layers: the rotation's angles, and the head, which makes the last norm.
    assert launches(one) <= LAUNCHES + 2
    target = gpu_target(TARGET)
    called = {n.function for n in two.graph.nodes if isinstance(n, CallTensor)}
    norms = [two.functions[name] for name in called]
    norms = [f for f in norms if f.rows and len([s for s in f.stages if s.monoid is not None]) > 1]
    assert norms and not any(s.scan for f in norms for s in f.stages)
    for function in norms:
        schedule = default_schedule(lower_to_loops(function, target), target)
        assert schedule.rule in ("gpu_row_persistent", "gpu_attention")
        assert resource_report(compile_triton(emit_triton(schedule.nest, target), target)).spills == 0
