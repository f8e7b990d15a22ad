"""Programs whose products are opened: from ATen to Triton, every kernel interpreted against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES, eliminate_dead, simplify_algebra
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")
BF16 = torch.bfloat16


class Quantised(nn.Module):
    """Bytes with a scale for each group of a row, a gate, an activation and a residual."""

    def __init__(self, features: int, hidden: int, group: int) -> None:
        super().__init__()
        self.register_buffer("up", torch.zeros(hidden, features, dtype=torch.int8))
        self.register_buffer("gate", torch.zeros(hidden, features, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(hidden, features // group, dtype=BF16))
        self.group = group

    def weight(self, packed: torch.Tensor) -> torch.Tensor:
        parts = packed.unflatten(1, (-1, self.group)).to(BF16) * self.scale.unsqueeze(-1)
        return parts.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x @ self.weight(self.gate).t()) * (x @ self.weight(self.up).t())


class Block(nn.Module):
    """A product of a transposed view, a bias, an activation and a residual."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.out = nn.Linear(heads * size, heads * size, dtype=BF16)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        merged = x.transpose(1, 2).flatten(2)
        return residual + functional.gelu(self.out(merged))


def normed(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return functional.relu(torch.bmm(x, w) * g)


class Call(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs):
        return self.fn(*inputs)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


PROGRAMS = {
    "quantised": (Quantised(64, 48, 32), (empty(5, 64),)),
    "block": (Block(3, 16), (empty(2, 3, 7, 16), empty(2, 7, 48))),
    "batch": (Call(normed), (empty(3, 17, 20), empty(3, 20, 33), empty(33))),
}


def test_a_sum_in_pieces_keeps_the_meaning(agrees):
    """Groups of a row fall into pieces whole; the second kernel adds them up and goes on."""
    model, inputs = PROGRAMS["quantised"]
    model, inputs = on_fake_device(model.eval(), inputs, "cuda")
    graph = simplify_algebra(import_graph(capture(model, inputs)[0]))
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        decision = Decision(True, "asked for", (False, True), pieces=4)
        nodes += [node] if p is None else decompose_product(p, decision, graph, taken)
    functions = fuse(eliminate_dead(replace(graph, nodes=tuple(nodes)))).functions.values()
    schedules = [default_schedule(lower_to_loops(f), SM90) for f in functions]
    assert "gpu_contraction" in [s.rule for s in schedules] and len(schedules) > 1
    for s in schedules:
        agrees(s.nest, tolerance=3e-2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_opened_products_keep_the_meaning(agrees, name):
    model, inputs = PROGRAMS[name]
    model, inputs = on_fake_device(model.eval(), inputs, "cuda")
    (gm,) = capture(model, inputs)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    functions = fuse(graph).functions.values()
    schedules = [default_schedule(lower_to_loops(f), SM90) for f in functions]
    assert [s.rule for s in schedules] == ["gpu_contraction"]
    agrees(schedules[0].nest, tolerance=3e-2)
