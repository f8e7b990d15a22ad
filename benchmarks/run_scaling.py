"""Suite ``scaling``: torch-mlc's own compile time against the number of nodes of a graph, from an empty cache.

The ATen graphs are traced without Dynamo and AOTAutograd, whose time is not ours, and compiled in this process. Seconds
are those of the processor, by phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mlc.dynamo_backend.compiling import plans
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table
from torch_mlc.runtime.settings.options import Options

from .schema import CaseResult, PeerResult

WIDTH = 64
# Traced once to learn how many nodes a layer has.
_SAMPLE = (2, 6)


def blocks(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """A residual stream of norms, products and gates."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for k in range(0, len(weights), 2):
            h = F.layer_norm(x, (WIDTH,)) @ weights[k]
            x = x + F.gelu(h) @ weights[k + 1]
        return x

    return function, [torch.randn(32, WIDTH), *(torch.randn(WIDTH, WIDTH) for _ in range(2 * count))]


def chain(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Element-wise operations and softmaxes with nothing between them."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(count):
            x = (x.sin() * y).softmax(-1) + y
        return x

    return function, [torch.randn(32, WIDTH), torch.randn(32, WIDTH)]


def optimizer(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Steps of Adam over tensors of five shapes."""

    def function(step: Tensor, *tensors: Tensor) -> list[Tensor]:
        results = []
        for k in range(0, len(tensors), 4):
            p, g, m, v = tensors[k : k + 4]
            m, v = m.lerp(g, 0.1), v * 0.99 + g * g * 0.01
            results += [p - 1e-3 * m / ((v / step).sqrt() + 1e-8), m, v]
        return results

    shapes = [(64, 32 + 8 * k) for k in range(5)]
    return function, [torch.tensor(10.0), *(torch.randn(shapes[k // 4 % 5]) for k in range(4 * count))]


GRAPHS: dict[str, Callable[[int], tuple[Callable[..., Any], list[Tensor]]]] = {
    "blocks": blocks, "chain": chain, "optimizer": optimizer,
}  # fmt: skip


def traced(name: str, count: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """The ATen graph of so many layers (steps, tensors)."""
    function, inputs = GRAPHS[name](count)
    with torch.no_grad():
        return make_fx(function, decomposition_table=decomposition_table(), tracing_mode="fake")(*inputs), inputs


def size_of(gm: fx.GraphModule) -> int:
    """Calls of ATen ops."""
    return sum(n.op == "call_function" for n in gm.graph.nodes)


def run_scaling(name: str, nodes: int, repeat: int) -> CaseResult:
    """Compile a graph of about so many nodes; seconds of the processor, phases of the last repeat."""
    low, high = (size_of(traced(name, k)[0]) for k in _SAMPLE)
    layer = (high - low) / (_SAMPLE[1] - _SAMPLE[0])
    gm, inputs = traced(name, max(1, round(nodes / layer)))
    outcome = PeerResult(counts={"all": {"nodes": size_of(gm)}})
    for _ in range(repeat):
        begin = time.process_time()
        with mock.patch.object(plans, "find_layers", return_value=None):  # all nodes are planned, however alike
            compiled = compile_graph(gm, inputs, options=Options(), fresh=True)
        outcome.samples.append(time.process_time() - begin)
        outcome.phases = dict(compiled.timer.seconds)
    return CaseResult(name, f"{nodes} nodes", "inference", "float32", peers={"mlc": outcome})
