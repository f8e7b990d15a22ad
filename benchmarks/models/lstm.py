"""LSTM language model with the cell written out, unrolled over a fixed number of steps.

``nn.LSTM`` is one opaque library call; the cell written out is what a compiler can improve.
Source: Hochreiter and Schmidhuber (1997), gates in the order input, forget, cell, output as in ``nn.LSTM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class LSTMConfig(NamedTuple):
    layers: int
    dim: int
    vocab: int
    steps: int


class Cell(nn.Module):
    """One step: ``x, h, c [batch, dim]`` to the next ``h, c``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input = nn.Linear(dim, 4 * dim)
        self.hidden = nn.Linear(dim, 4 * dim, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.input(x) + self.hidden(h)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTM(nn.Module):
    """Token ids ``[batch, steps]`` (int64) to logits ``[batch, steps, vocab]``."""

    def __init__(self, c: LSTMConfig) -> None:
        super().__init__()
        self.steps = c.steps
        self.tokens = nn.Embedding(c.vocab, c.dim)
        self.cells = nn.ModuleList(Cell(c.dim) for _ in range(c.layers))
        self.head = nn.Linear(c.dim, c.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        steps = [x[:, t] for t in range(self.steps)]
        for cell in self.cells:
            h = c = torch.zeros_like(steps[0])
            outputs = []
            for step in steps:
                h, c = cell(step, h, c)
                outputs.append(h)
            steps = outputs
        return self.head(torch.stack(steps, dim=1))


def batch(c: LSTMConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    ids = torch.randint(c.vocab, (dims["batch"], c.steps + 1), generator=generator)
    return Inputs((ids[:, :-1].contiguous(),), ids[:, 1:].contiguous())


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.targets.flatten())


SPECS = (
    ModelSpec(
        name="lstm",
        module=LSTM,
        configs={
            "tiny": LSTMConfig(layers=1, dim=16, vocab=61, steps=4),
            "small": LSTMConfig(layers=2, dim=256, vocab=1024, steps=16),
            "full": LSTMConfig(layers=2, dim=1024, vocab=10000, steps=16),
        },
        dims={"tiny": {"batch": 3}, "small": {"batch": 32}, "full": {"batch": 256}},
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0),),
        variants=({"batch": 3}, {"batch": 5}, {"batch": 8}),
    ),
)
