"""Whole models, in inference and training, for a CPU and for a GPU: what every step makes is sound, and read back from
its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import fx

from benchmarks.models.registry import MODELS
from tests.dynamo_backend.architectures import ARCHITECTURES
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of, pass_lists
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import Graph, IRModule
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.passes import Pass
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.functions.context import FunctionContext
from torch_mlc.scheduler.functions.lower import lower_stages
from torch_mlc.scheduler.fusion.fusion import Fusion
from torch_mlc.scheduler.rules import default_schedule

# Those that always run: one with attention, and one without.
QUICK = ("gpt2_d128", "dlrm")
NAMES = [*MODELS, *ARCHITECTURES]
IR = TypeVar("IR", Graph, IRModule, TensorFunction, LoopNest)


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


def checked(subject: IR) -> IR:
    """Something that is sound, and read back from its text."""
    verify(subject)
    assert parse(show(subject)) == subject
    return subject


def stepped(passes: Iterable[Pass[Any, Any]], subject: Any, context: object, shown: Callable[[Any], Any]) -> Any:
    """What passes make of a subject, each of whose steps is ``checked`` as it is ``shown``."""
    for p in passes:
        if p.applies(context):
            before, subject = subject, p.run(subject, context)
            if subject is not before:
                checked(shown(subject))
    return subject


@pytest.mark.parametrize("target", [None, "cuda:sm_90"], ids=["cpu", "sm_90"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_step_of_a_model_is_sound_and_read_back(name: str, target: str | None) -> None:
    torch.manual_seed(0)
    found = list(graphs(name))
    if target is not None:
        retarget(found, "cuda")
    options = Options.resolve(None, {} if target is None else {"target": target}, {})
    lists, context = pass_lists(), context_of(options)
    machine = target_for("cpu" if target is None else "cuda:0", options.target)
    functions: dict[TensorFunction, None] = {}
    for gm in found:
        graph = stepped(lists.graph, checked(import_graph(gm)), context, lambda graph: graph)
        fused = stepped((*lists.fuse, *lists.calls), Fusion(graph), context, lambda fusion: fusion.module)
        functions |= dict.fromkeys(fused.functions.values())
    for function in functions:
        given = FunctionContext(function, machine, context.fast)
        lowered = stepped(lists.function, function, given, lambda function: function)
        nest = checked(lower_stages(lowered))
        checked(default_schedule(nest, machine).nest)
    roles = {s.role for f in functions for s in f.stages}
    if name == "gpt2_d128" and target is None:  # what was traced on a CPU keeps its attention op on a GPU
        assert {Role.SCORE, Role.WEIGHT, Role.STATE, Role.RESULT} <= roles, "attention is not one kernel"
