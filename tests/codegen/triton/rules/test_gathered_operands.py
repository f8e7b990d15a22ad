"""Products that read an operand through indices, interpreted, against products in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import eliminate_dead, simplify_algebra, widen
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")


class Gathering(torch.nn.Module):
    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.fn(*inputs)


def rows(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return x[index] @ w


def selected(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return torch.index_select(x, 0, index) @ w


def classes(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return w.t() @ x[index].t()


def lookup(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.nn.functional.embedding(index, x) @ w)


def nest_of(fn: Callable[..., Tensor], x: Tensor, index: Tensor, w: Tensor):
    """The nest of a product that makes both operands itself, the one kernel of its graph."""
    model, inputs = on_fake_device(Gathering(fn), (x, index, w), "cuda")
    graph = widen(simplify_algebra(import_graph(capture(model, inputs)[0])))
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        made = () if p is None else tuple(o.prologue is not None for o in (p.a, p.b))
        nodes += [node] if p is None else decompose_product(p, Decision(True, "asked for", made), graph, taken)
    (function,) = fuse(eliminate_dead(replace(graph, nodes=tuple(nodes)))).functions.values()
    schedule = default_schedule(lower_to_loops(function), SM90)
    assert schedule.rule == "gpu_contraction"
    return schedule.nest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fn", [rows, selected, classes, lookup])
@pytest.mark.parametrize("sizes", [(37, 50, 19, 23), (64, 64, 32, 128)])
def test_operands_are_read_through_indices(interpreter, fn, dtype, sizes):
    count, depth, columns, table = sizes
    torch.manual_seed(0)
    x, w = torch.randn(table, depth).to(dtype), torch.randn(depth, columns).to(dtype)
    low = -table if fn in (rows, classes) else 0  # eager takes negative indices there alone
    index = torch.randint(low, table, (count,))
    index[1] = index[0]
    nest = nest_of(fn, x, index, w)
    source = emit_triton(nest, SM90)
    kinds = {tuple(map(int, b.shape)): t for b in nest.params for t in (x, w, index) if tuple(t.shape) == b.shape}
    given = {}
    for b in nest.params:
        if b.name not in nest.outputs:
            t = kinds[tuple(map(int, b.shape))]
            given[b.name] = t.numpy() if b.dtype is DType.INT64 else t.float().numpy().astype(b.dtype.numpy)
    (out,) = nest.outputs
    found = interpreter.run(source, nest.outputs, given, {})[out].astype(np.float64)
    wanted = fn(x.double(), index, w.double()).numpy()
    scale = np.abs(wanted).max()
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-3}[dtype]
    assert np.abs(found - wanted).max() <= bound * scale


def test_indices_are_loaded_once_before_the_sum():
    x, w = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    text = emit_triton(nest_of(rows, x, torch.zeros(64, dtype=torch.int64), w), SM90).text
    before, loop = text.split("for k0")
    assert "tl.where" in before and "tl.where" not in loop and loop.count("tl.load") == 2
