"""Sums of rows that are zero but at one position are no sums any more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, IRModule, Reduction
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import collapse_one_hot, eliminate_dead, widen

X = torch.arange(20.0).reshape(4, 5)
# A position below and one past the row pick nothing.
LABELS = torch.tensor([1, 4, -1, 5])


def picked(x: Tensor, label: Tensor) -> Tensor:
    return torch.where(torch.arange(5) == label[:, None], x, 0.0).sum(1)


def of_two_axes(x: Tensor, label: Tensor) -> Tensor:
    return torch.where(label[:, None] == torch.arange(5), x, 0.0).sum()


def with_another_test(x: Tensor, label: Tensor) -> Tensor:
    at = torch.arange(5)
    return torch.where((at == label[:, None]) & (at < 4) & (x > 0), x * 2, 0.0).sum(1)


def otherwise_one(x: Tensor, label: Tensor) -> Tensor:
    return torch.where(torch.arange(5) == label[:, None], x, 1.0).sum(1)


def of_a_position_that_moves(x: Tensor, label: Tensor) -> Tensor:
    return torch.where(torch.arange(5) == x.long(), x, 0.0).sum(1)


def of_either(x: Tensor, label: Tensor) -> Tensor:
    at = torch.arange(5)
    return torch.where((at == label[:, None]) | (at == 3), x, 0.0).sum(1)


def imported(function: Callable[[Tensor, Tensor], Tensor]) -> Graph:
    (gm,) = capture(function, [X, LABELS])
    return import_graph(gm)


def reduced(graph: Graph) -> list[int]:
    return [len(n.reduce_axes) for n in graph.nodes if isinstance(n, Reduction)]


@pytest.mark.parametrize(("function", "left"), [(picked, []), (of_two_axes, [1]), (with_another_test, [])])
def test_one_term_is_left(function: Callable[[Tensor, Tensor], Tensor], left: list[int]) -> None:
    graph = imported(function)
    collapsed = eliminate_dead(collapse_one_hot(graph))
    verify(IRModule({"main": collapsed}))
    assert reduced(collapsed) == left
    arrays = {i.name: (X if i.type.dtype.is_float else LABELS).numpy() for i in graph.inputs}
    (found,) = run_graph(collapsed, arrays, {}).values()
    np.testing.assert_array_equal(found, function(X, LABELS).numpy())


@pytest.mark.parametrize("function", [otherwise_one, of_a_position_that_moves, of_either])
def test_other_sums_stay(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = imported(function)
    assert collapse_one_hot(graph) is graph


def test_what_is_rounded_on_purpose_is_rounded() -> None:
    """To eight bits, or from float64: in one term as in all of them."""
    for steps in ((torch.float8_e4m3fn, torch.float32), (torch.float64, torch.float32, torch.float64)):

        def rounded(x: Tensor, label: Tensor, steps: tuple[torch.dtype, ...] = steps) -> Tensor:
            terms = torch.where(torch.arange(5) == label[:, None], x.to(steps[0]).to(steps[-1]) / 3, 0.0)
            for kind in steps:
                terms = terms.to(kind)
            return terms.sum(1)

        result = torch.compile(rounded, backend="mlc", options={"cache": False})(X, LABELS)
        torch.testing.assert_close(result, rounded(X, LABELS), rtol=0, atol=0)
    graph = widen(imported(lambda x, label: picked(x, label).half().float() + picked(x.half(), label).float()))
    assert reduced(eliminate_dead(collapse_one_hot(graph))) == []


def test_the_gradient_of_a_loss_has_no_sum() -> None:
    x = X.clone().requires_grad_()
    _, backward = capture(lambda x, t: F.cross_entropy(x, t), [x, LABELS.clamp(0, 4)], training=True)
    assert reduced(eliminate_dead(collapse_one_hot(import_graph(backward)))) == []
