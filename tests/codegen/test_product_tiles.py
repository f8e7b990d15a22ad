"""Sums of a product's tile are in registers: their slots are named by numbers, which LLVM promotes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.products import contraction_cpu
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@pytest.mark.parametrize(("vector_bytes", "tile"), [(64, 24), (32, 10)])
@pytest.mark.parametrize("rows", [4, 16])
def test_slots_of_two_unrolled_loops_are_named_by_numbers(
    monkeypatch: pytest.MonkeyPatch, rows: int, vector_bytes: int, tile: int
) -> None:
    monkeypatch.setattr(contraction_cpu, "_few_rows", lambda p, machine: (0.0, 1.0))
    target = Target("cpu", "znver3", 1, vector_bytes, 32 << 10, 512 << 10, warp=1, max_threads=1)
    (traced,) = capture(product, (torch.empty(rows, 256), torch.empty(240, 256)))
    graph = run_passes(GRAPH_PASSES, import_graph(traced), PassContext("fast", lambda device: target))
    (function,) = fuse(graph).functions.values()
    text = emit_llvm(default_schedule(lower_to_loops(function), target).nest, target).text
    assert f"alloca [{tile} x <{vector_bytes // 4} x float>]" in text
    assert not re.search(r"getelementptr inbounds <\d+ x float>, ptr %stack\.\d+, i64 %", text)
