"""Floats of a model that are constants by the time Dynamo has traced it: AOTAutograd traces once, and values stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_mlc.dynamo_backend.entry import backend


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each graph that AOTAutograd is given."""
    found: list[str] = []
    real = backend.compile_with_aot

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append("aot")
        return real(*args, **kwargs)

    monkeypatch.setattr(backend, "compile_with_aot", counted)
    return found


class Tower(nn.Module):
    """A float that ops take as a number, one that nobody reads, and one that is multiplied."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, max_norm=limit)
        self.norm = nn.LayerNorm(8)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.table(x)) * self.scale


def test_a_graph_with_floats_is_traced_once(traced: list[str]) -> None:
    model = Tower()
    compiled = torch.compile(model, backend="mlc", dynamic=True)
    with torch.no_grad():
        for size in (3, 5):
            x = torch.arange(size)
            torch.testing.assert_close(compiled(x), model(x))
        assert traced == ["aot"]
        model.scale, model.norm.eps = 2.0, 0.25
        torch.testing.assert_close(compiled(x), model(x))


def test_gradients_and_graph_breaks(traced: list[str]) -> None:
    model = Tower()

    def step(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return (y * model.norm.eps).sum()

    x = torch.arange(4)
    step(x).backward()
    want = model.table.weight.grad.clone()
    model.zero_grad()
    torch.compile(step, backend="mlc", dynamic=True)(x).backward()
    torch.testing.assert_close(model.table.weight.grad, want)
    assert traced


def test_an_embedding_that_limits_norms_reads_their_degree() -> None:
    model = Tower(limit=1.0)
    want = model(torch.arange(5))
    with torch.no_grad():
        model.table.weight.mul_(3)
        have = torch.compile(model, backend="mlc", dynamic=True)(torch.arange(5))
    torch.testing.assert_close(have, want)
