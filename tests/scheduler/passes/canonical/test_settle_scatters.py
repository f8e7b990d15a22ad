"""Scatters whose places are known are element-wise, and mean what they did."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, IRModule, Scatter
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import eliminate_dead, settle_scatters

aten = torch.ops.aten


def in_order(x: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, torch.arange(x.shape[0]), x.shape[0], -1, False)


def in_a_larger_table(x: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, torch.arange(2, 2 + x.shape[0]), x.shape[0] + 5, -1, False)


def padded(x: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, torch.arange(x.shape[0]), x.shape[0] + 1, 3, False)


def of_rows_and_columns(x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[0])[:, None] + 1, torch.arange(x.shape[1])
    made = torch.zeros(x.shape[1] + 2, x.shape[0] + 3)
    return made.index_put((columns.expand(x.shape), rows.expand(x.shape)), x)


def at_one_row(x: Tensor) -> Tensor:
    return torch.zeros(4, *x.shape[1:]).index_add(0, torch.arange(2, 3), x[:1])


def backwards(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_copy(0, x.shape[0] - 1 - torch.arange(x.shape[0]), x)


def all_at_one_place(x: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, torch.arange(x.shape[0]) * 0, 3, -1, False)


def outside(x: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, torch.arange(x.shape[0]), x.shape[0] - 1, -1, False)


def over_a_tensor(x: Tensor) -> Tensor:
    return x.index_copy(0, torch.arange(2), x[2:4])


def imported(function: Callable[[Tensor], Tensor], x: Tensor) -> Graph:
    (gm,) = capture(function, (x,))
    return import_graph(gm)


def scatters(graph: Graph) -> int:
    return sum(isinstance(n, Scatter) for n in graph.nodes)


@pytest.mark.parametrize("function", [in_order, in_a_larger_table, padded, of_rows_and_columns, at_one_row])
@pytest.mark.parametrize("rows", [7, 1])
def test_known_places(function: Callable[[Tensor], Tensor], rows: int) -> None:
    x = torch.randn(rows, 5)
    x[0, :2] = torch.tensor([torch.nan, -0.0])
    graph = imported(function, x)
    settled = eliminate_dead(settle_scatters(graph))
    verify(IRModule({"main": settled}))
    assert scatters(graph) == 1 and scatters(settled) == 0
    arrays = {i.name: x.numpy() for i in graph.inputs}
    (found,) = run_graph(settled, arrays, {}).values()
    np.testing.assert_array_equal(found, function(x).numpy())


@pytest.mark.parametrize("function", [backwards, all_at_one_place, outside, over_a_tensor])
def test_other_scatters_stay(function: Callable[[Tensor], Tensor]) -> None:
    graph = imported(function, torch.randn(6, 5))
    assert scatters(graph) == 1 and settle_scatters(graph) is graph
