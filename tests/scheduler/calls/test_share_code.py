"""One function for calls that differ in sizes and in how many parts they join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.dynamo_backend.growing import Dense, settled
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.calls.share_code import share_code
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.fusion.fuse import FUSE_PASSES
from torch_mlc.scheduler.fusion.fusion import Fusion
from torch_mlc.scheduler.passes import GRAPH_PASSES


def fused(fn: Callable[..., Any], *inputs: Tensor, device: str = "cpu") -> Fusion:
    with torch.no_grad():
        gms = capture(fn, inputs)
    retarget(gms, device)
    graph = run_passes(GRAPH_PASSES, import_graph(gms[0]), USUAL)
    return run_passes(FUSE_PASSES, Fusion(graph), USUAL)


def test_parts_behind_the_channels_are_given_and_never_read() -> None:
    fusion = fused(settled(Dense(9)), torch.randn(2, 32, 5, 7))
    shared = share_code(fusion, USUAL)
    verify(shared.module)
    assert len(shared.functions) < len(fusion.functions) - 5
    calls = [n for n in shared.graph.nodes if isinstance(n, CallTensor) and n.sizes]
    # The factors of the norms are one function, the layers another.
    factors, name = sorted({c.function for c in calls}, key=lambda f: len(shared.functions[f].inputs))
    assert sum(c.function == factors for c in calls) == 9
    calls = [c for c in calls if c.function == name]
    function = shared.functions[name]
    (size,) = function.symbols.sizes
    assert [int(c.sizes[0]) for c in calls] == list(range(size.lower, size.upper + 1))
    assert {len(c.args) for c in calls} == {len(function.inputs)}
    assert any(d.extent == 32 * size.symbol for d in function.rows)
    assert share_code(shared, USUAL) is shared


def test_few_functions_keep_their_constants() -> None:
    fusion = fused(settled(Dense(3)), torch.randn(2, 32, 5, 7))
    assert share_code(fusion, USUAL) is fusion


def test_vectors_that_would_end_within_channels_stay_constant() -> None:
    last = torch.randn(2, 12, 5, 7).contiguous(memory_format=torch.channels_last)
    fusion = fused(scales(12), last)
    assert share_code(fusion, USUAL) is fusion


def test_gpus_keep_their_constants() -> None:
    fusion = fused(settled(Dense(9)), torch.randn(2, 32, 5, 7), device="cuda")
    assert share_code(fusion, USUAL) is fusion


def scales(growth: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Images of more and more channels, each with a kernel of its own."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat([x] * k, 1).sin().sum((0, 2, 3)) for k in range(2, 8))

    return run
