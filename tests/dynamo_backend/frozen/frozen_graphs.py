"""Models explained with parameters that do not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_mlc


def graph_of(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The report of the only graph."""
    report = torch_mlc.explain(model, *inputs, options={"freeze": True} | options)
    torch._dynamo.reset()
    (graph,) = report.graphs
    return graph
