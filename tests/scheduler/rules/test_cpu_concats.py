"""Loops over the parts of concats on CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.nest.loops import Loop, LoopKind, walk_nodes
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.rules import default_schedule

TARGET = Target("cpu", "znver3", 2)


def sums_of_joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1).relu().sum((2, 3))


@pytest.mark.parametrize("width", [16, 24, 32, 48])
def test_vectors_of_columns_are_in_one_part(width: int) -> None:
    last = [torch.zeros(2, width, 4, 4).contiguous(memory_format=torch.channels_last) for _ in range(40)]
    (traced,) = capture(sums_of_joined, last)
    (function,) = fuse(import_graph(traced)).functions.values()
    schedule = default_schedule(lower_to_loops(function), TARGET)
    lanes = [
        n.extent for n, _ in walk_nodes(schedule.nest.body) if isinstance(n, Loop) and n.kind is LoopKind.VECTORIZED
    ]
    assert schedule.rule == "cpu_column_reduction"
    assert lanes and all(width % int(n) == 0 for n in lanes)
