"""What is scattered and added to a product is scattered into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.value import Load
from torch_mlc.ir.graph.graph import Graph, IRModule, Library, Scatter
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import begin_scatters, eliminate_dead

aten = torch.ops.aten
ROWS = 7


def scattered(x: Tensor, ids: Tensor) -> Tensor:
    return aten.embedding_dense_backward(x, ids, ROWS, -1, False)


def after(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scattered(x, ids) + a @ b


def before(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    product = a @ b
    return product + scattered(x, ids)


def turned(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (b.t() @ a.t()).t() + scattered(x, ids)


def twice(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a @ b + scattered(x, ids) + aten.embedding_dense_backward(x * 2, ids, ROWS, -1, False)


def read_besides(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    made = scattered(x, ids)
    return a @ b + made, made.exp()


def scaled(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a @ b + 2 * scattered(x, ids)


def of_no_library(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :4] + 1).relu() + scattered(x, ids)


def inputs() -> list[Tensor]:
    ids = torch.tensor([[0, 6, 6], [2, 6, 0]])
    return [torch.randn(2, 3, 4), ids, torch.randn(ROWS, 5), torch.randn(5, 4)]


def imported(function: Callable[..., Tensor], given: list[Tensor]) -> Graph:
    (gm,) = capture(function, tuple(given))
    return import_graph(gm)


def of_zeros(graph: Graph) -> int:
    return sum(isinstance(n, Scatter) and not isinstance(n.initial, Load) for n in graph.nodes)


def multiplied(node: Library, arrays: Mapping[str, Any]) -> list[Any]:
    a, b = (arrays[r.name] for r in node.args)
    return [a @ b]


@pytest.mark.parametrize(("function", "left"), [(after, 0), (before, 0), (turned, None), (twice, 1)])
def test_what_is_added_to_is_scattered_into(function: Callable[..., Tensor], left: int | None) -> None:
    given = inputs()
    graph = imported(function, given)
    begun = eliminate_dead(begin_scatters(graph))
    verify(IRModule({"main": begun}))
    assert left is None or of_zeros(begun) == left < of_zeros(graph)
    by_shape = {tuple(t.shape): t.numpy() for t in given}
    arrays = {i.name: by_shape[tuple(map(int, i.type.shape))] for i in graph.inputs}
    wanted = function(*(t.double() if t.is_floating_point() else t for t in given)).numpy()
    (found,) = run_graph(begun, arrays, {}, library=multiplied).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [read_besides, scaled, of_no_library])
def test_other_sums_stay(function: Callable[..., Tensor]) -> None:
    graph = imported(function, inputs())
    assert begin_scatters(graph) is graph
