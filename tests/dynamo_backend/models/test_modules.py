"""Modules of whole models, in inference and training, for a CPU and for a GPU: sound, and read back from their text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from benchmarks.models.registry import MODELS
from tests.dynamo_backend.architectures import ARCHITECTURES
from torch_mlc.codegen.host.steps.ops import may_alias
from torch_mlc.dynamo_backend.compiling.plans import run_passes
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.calls.horizontal import share_launches
from torch_mlc.scheduler.fusion.fuse import fuse

# Those that always run: one with attention, and one without.
QUICK = ("gpt2_d128", "dlrm")
NAMES = [*MODELS, *ARCHITECTURES]


def graphs(name: str) -> Iterator[fx.GraphModule]:
    """The graphs of inference and of a training step."""
    if name in ARCHITECTURES:
        model = ARCHITECTURES[name].build()
        inputs = ARCHITECTURES[name].inputs(ARCHITECTURES[name].sizes[0])

        def loss(*given: torch.Tensor) -> torch.Tensor:
            leaves = torch.utils._pytree.tree_leaves(model(*given))
            return sum(r.sum() for r in leaves if r.is_floating_point())  # type: ignore[return-value]

        yield from capture(loss, inputs, training=True)
        yield from capture(model.eval(), inputs)
        return
    spec = MODELS[name]
    model = spec.build("tiny")
    batch = spec.inputs("tiny", dtype=torch.float32, **spec.dims["tiny"])
    if spec.trains:
        yield from capture(lambda b: spec.loss(model(*b.args), b), (batch,), training=True)
    yield from capture(model.eval(), batch.args)


@pytest.mark.parametrize("target", [None, "cuda:sm_90"], ids=["cpu", "sm_90"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_modules_are_sound_and_read_back(name: str, target: str | None) -> None:
    torch.manual_seed(0)
    found = list(graphs(name))
    if target is not None:
        retarget(found, "cuda")
    options = Options.resolve(None, {} if target is None else {"target": target}, {})
    roles: set[Role | None] = set()
    for gm in found:
        graph = run_passes(import_graph(gm), options)
        assert parse(show(graph)) == graph
        module = share_launches(fuse(graph, numerics=options.numerics), may_alias).module
        verify(module)
        assert parse(show(module)) == module
        for function in module.functions.values():
            if isinstance(function, TensorFunction):
                assert parse(show(function)) == function
                roles |= {s.role for s in function.stages}
    if name == "gpt2_d128":
        assert {Role.SCORE, Role.WEIGHT, Role.STATE, Role.RESULT} <= roles, "attention is not one kernel"
