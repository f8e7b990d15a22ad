"""DLRM-like recommender: summed embeddings, dot interaction, two MLPs. Source: Naumov et al. (arXiv 1906.00091)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .spec import DynamicDim, Inputs, ModelSpec


class DLRMConfig(NamedTuple):
    tables: int
    rows: int
    dim: int
    hot: int
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Dense features ``[batch, dense]`` and row ids ``[batch, tables, hot]`` (int64) to logits ``[batch]``."""

    def __init__(self, c: DLRMConfig) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(c.rows, c.dim) for _ in range(c.tables))
        self.bottom = mlp((c.dense, *c.bottom, c.dim))
        vectors = c.tables + 1
        self.top = mlp((c.dim + vectors * (vectors - 1) // 2, *c.top))
        self.out = nn.Linear(c.top[-1], 1)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(rows[:, i]).sum(1) for i, table in enumerate(self.embeddings))]
        stacked = torch.stack(vectors, dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        lower = [dots[:, i, :i] for i in range(1, len(vectors))]
        return self.out(self.top(torch.cat((x, *lower), dim=1))).squeeze(1)


def batch(c: DLRMConfig, dims: Mapping[str, int], generator: torch.Generator) -> Inputs:
    dense = torch.randn(dims["batch"], c.dense, generator=generator)
    rows = torch.randint(c.rows, (dims["batch"], c.tables, c.hot), generator=generator)
    return Inputs((dense, rows), torch.randint(2, (dims["batch"],), generator=generator).float())


def loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, inputs.targets)


SPECS = (
    ModelSpec(
        name="dlrm",
        module=DLRM,
        configs={
            "tiny": DLRMConfig(tables=4, rows=50, dim=8, hot=3, dense=5, bottom=(16,), top=(24, 12)),
            "small": DLRMConfig(tables=8, rows=10000, dim=32, hot=4, dense=13, bottom=(256, 128), top=(256, 128)),
            "full": DLRMConfig(tables=26, rows=100000, dim=128, hot=4, dense=13, bottom=(512, 256), top=(1024, 512)),
        },
        dims={"tiny": {"batch": 6}, "small": {"batch": 1024}, "full": {"batch": 8192}},
        batch=batch,
        loss_of=loss,
        dynamic=(DynamicDim("batch", 0, 0), DynamicDim("batch", 1, 0)),
        variants=({"batch": 6}, {"batch": 9}, {"batch": 17}),
    ),
)
