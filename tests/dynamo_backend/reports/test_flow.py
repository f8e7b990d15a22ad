"""The calls of a run in their order: what they read of one another, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_mlc
from torch_mlc.dynamo_backend.reports.flow import RunFlow

Tensor = torch.Tensor


class Layers(torch.nn.Module):
    """Layers that are alike, which the compiler makes a loop of."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.layer_norm(x + torch.tanh(layer(x)), (24,))
        return x


def chain(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x) @ w, -1)


def joined(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([torch.cumsum(x, 1), y.sum(1, keepdim=True)], 1)
    return torch.sort(both, 1).values, both.exp()


def flow_of(model: Callable[..., Any], *inputs: Tensor, training: bool = False) -> list[tuple[RunFlow, int]]:
    return [(g.flow, g.typical_peak) for g in torch_mlc.explain(model, *inputs, training=training).graphs]


def test_a_chain_reads_the_call_before_it() -> None:
    ((flow, _),) = flow_of(chain, torch.randn(40, 60), torch.randn(60, 30))
    assert [c.is_library for c in flow.calls] == [False, True, False]
    assert [c.reads for c in flow.calls] == [(), (0,), (1,)]
    assert [len(c.inputs) for c in flow.calls] == [1, 1, 0]
    assert flow.results == (2,)
    assert all("in chain" in line for c in flow.calls for line in c.lines)


def test_what_lies_between_is_held_as_long_as_it_is_read() -> None:
    ((flow, _),) = flow_of(chain, torch.randn(40, 60), torch.randn(60, 30))
    assert [c.held for c in flow.calls] == [4 * 40 * 60, 4 * 40 * (60 + 30), 2 * 4 * 40 * 30]


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("count", (2, 9))
def test_layers_are_told_one_by_one(count: int, training: bool) -> None:
    """Of layers in a loop too every call is there, with what it reads of the layer before."""
    model = Layers(count)
    flow, _ = flow_of(model, torch.randn(16, 24), training=training)[0]
    products = [k for k, c in enumerate(flow.calls) if c.is_library]
    assert len(products) == count
    last = len(flow.calls) - 1
    assert last in flow.results
    reached, todo = set[int](), [last]
    while todo:
        at = todo.pop()
        assert all(maker < at for maker in flow.calls[at].reads)
        reached |= {at}
        todo += [maker for maker in flow.calls[at].reads if maker not in reached]
    assert {*products} <= reached


@pytest.mark.parametrize(
    ("model", "shapes"),
    ((chain, ((40, 60), (60, 30))), (joined, ((8, 30), (8, 5))), (Layers(6), ((16, 24),))),
    ids=("chain", "joined", "layers"),
)
@pytest.mark.parametrize("training", (False, True))
def test_the_most_that_is_held_is_the_peak(model: Any, shapes: tuple[tuple[int, ...], ...], training: bool) -> None:
    inputs = [torch.randn(shape, requires_grad=training) for shape in shapes]
    for flow, peak in flow_of(model, *inputs, training=training):
        held = [c.held for c in flow.calls if c.held is not None]
        assert len(held) == len(flow.calls)
        assert 0 <= peak - max(held) < 64 * len(held)  # pieces of one arena begin at multiples of 64


def test_who_reads_joined_memory_reads_all_that_wrote_it() -> None:
    ((flow, _),) = flow_of(joined, torch.randn(8, 300), torch.randn(8, 50))
    writers = [k for k, c in enumerate(flow.calls) if any("joined" in line and "cat" in line for line in c.lines)]
    sorts = [c for c in flow.calls if c.is_library and "sort" in c.name]
    assert writers and all({*c.reads} & {*writers} for c in sorts)
