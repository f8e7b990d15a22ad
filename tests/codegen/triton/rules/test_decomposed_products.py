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
from torch_mlc.ir.expr.value import Call as Function
from torch_mlc.ir.expr.value import walk
from torch_mlc.ir.graph.graph import Graph, Reduction
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES, eliminate_dead, simplify_algebra, widen
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


def rms(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w @ m


def routed(x: torch.Tensor, weight: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x * weight[:, None]) @ m


def scaled(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.relu(x @ (w.to(x.dtype) * scale).t())


FACTORS = {
    "a norm": (rms, (empty(37, 50), empty(50), empty(50, 19))),
    "a weight of a row": (routed, (empty(37, 50), empty(37), empty(50, 19))),
    "a scale of a column": (scaled, (empty(37, 50), torch.empty(19, 50, dtype=torch.int8), empty(19, 1))),
    "aligned": (scaled, (empty(37, 64), torch.empty(32, 64, dtype=torch.int8), empty(32, 1))),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_rows_and_columns_are_applied_to_the_result(agrees, name):
    fn, inputs = FACTORS[name]
    model, inputs = on_fake_device(Call(fn), inputs, "cuda")
    graph = widen(simplify_algebra(import_graph(capture(model, inputs)[0])))
    graph = _opened(graph, Decision(True, "asked for", (True, True)))
    products = [n for n in graph.nodes if isinstance(n, Reduction) and n.axes[0] != n.axes[-1]]
    assert not any(isinstance(e, Function) and e.fn == "rsqrt" for n in products for v in n.values for e in walk(v))
    schedules = [default_schedule(lower_to_loops(f), SM90) for f in fuse(graph).functions.values()]
    assert "gpu_contraction" in [s.rule for s in schedules]
    for s in schedules:
        agrees(s.nest, tolerance=3e-2)


def _opened(graph: Graph, decision: Decision) -> Graph:
    """Every product as a decision has it."""
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        nodes += [node] if p is None else decompose_product(p, decision, graph, taken)
    return eliminate_dead(replace(graph, nodes=tuple(nodes)))


def test_a_sum_in_pieces_keeps_the_meaning(agrees):
    """Groups of a row fall into pieces whole; the second kernel adds them up and goes on."""
    model, inputs = PROGRAMS["quantised"]
    model, inputs = on_fake_device(model.eval(), inputs, "cuda")
    graph = simplify_algebra(import_graph(capture(model, inputs)[0]))
    functions = fuse(_opened(graph, Decision(True, "asked for", (False, True), pieces=4))).functions.values()
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
