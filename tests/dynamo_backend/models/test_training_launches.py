"""A training step of GPT-2 on a GPU that is not here: how many launches and library calls a layer takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.models.gpt import GPT, SPECS
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device, retarget
from torch_mlc.ir.graph.graph import CallTensor, Library
from torch_mlc.ir.graph.slices import NOTHING
from torch_mlc.ir.passes import run_passes
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

SPEC = next(s for s in SPECS if s.name == "gpt2_d768")
OPTIONS = Options.resolve(None, {"target": "cuda:sm_90"}, {})
# Forward: the norm in front of attention with the residual sum before it, queries with keys and values, attention, the
# output with its residual sum, the norm behind it, up with the activation, down.
FORWARD = 7
# Backward: four gradients of weights; those of the operands of down (with that of the activation and the sums of its
# rows), up, the output and the joint product; two norms, each with its residual sum; attention; and the join of what
# that gives, with sums of its rows.
BACKWARD = 4 + 4 + 2 + 1 + 1


def planned(layers: int) -> list[Fusion]:
    """The calls of forward and backward, at the size of the model of 124 million parameters."""
    dims = SPEC.dims["full"]
    with torch.device("meta"):
        model = GPT(SPEC.config("full", layers=layers)).to(torch.bfloat16)
        ids, targets = (torch.empty(dims["batch"], dims["seq"], dtype=torch.int64) for _ in range(2))
    model, inputs = on_fake_device(model, [ids, targets], "cpu")

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    graphs = capture(step, inputs, training=True, options=OPTIONS)
    retarget(graphs, "cuda")
    context = context_of(OPTIONS)
    fused = [fuse(run_passes(GRAPH_PASSES, import_graph(gm), context), context) for gm in graphs]
    return [run_passes(CALL_PASSES, fusion, context) for fusion in fused]


def launches(fusion: Fusion) -> int:
    """Kernels and library calls that run."""
    nodes = fusion.graph.nodes
    return sum(isinstance(n, CallTensor) or (isinstance(n, Library) and n.target not in NOTHING) for n in nodes)


@pytest.fixture(scope="module")
def steps() -> tuple[list[Fusion], list[Fusion]]:
    return planned(2), planned(3)


@pytest.mark.parametrize(("which", "most"), [(0, FORWARD), (1, BACKWARD)], ids=["forward", "backward"])
def test_launches_of_a_layer(steps, which, most) -> None:
    two, three = (s[which] for s in steps)
    assert launches(three) - launches(two) <= most


def test_launches_beside_the_layers(steps) -> None:
    """Forward: the embeddings with the first norm, which is that of the first layer too, the head with its
    log-sum-exp, what combines the tiles of that, the loss. Backward: the gradient of the logits, both of the head, the
    last norm's, second stages of all sums in one, and six for the embeddings."""
    two, _ = steps
    assert launches(two[0]) <= 2 * FORWARD + 4
    assert launches(two[1]) <= 2 * BACKWARD + 11


def test_a_further_layer_has_no_functions_of_its_own(steps) -> None:
    assert [len(f.functions) for f in steps[0]] == [len(f.functions) for f in steps[1]]
