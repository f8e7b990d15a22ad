"""Images of half types between convolutions on GPUs: which calls get their channels innermost, for which machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import Compute, Graph, IRModule, Library
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.passes import convert_layouts, eliminate_common
from torch_mlc.scheduler.passes.convolution import convert_layouts as module
from torch_mlc.scheduler.passes.convolution.convert_layouts import channels_last

HALF, FULL = torch.bfloat16, torch.float32


def chain(count: int, channels: int = 64) -> nn.Module:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU())))


def changed(fn: Callable[..., Any], *inputs: Tensor, target: str = "cuda:sm_90") -> tuple[Graph, Graph]:
    """A graph, before and after."""
    with torch.no_grad():
        graphs = capture(fn, inputs)
    retarget(graphs, "cuda")
    before = eliminate_common(import_graph(graphs[0]))
    after = convert_layouts(before, context_of(Options(target=target)))
    verify(IRModule({after.name: after}, after.name))
    return before, after


def lasts(graph: Graph) -> list[bool]:
    """Of each convolution whether its result has its channels innermost."""
    kinds = [n.types[0] for n in graph.nodes if isinstance(n, Library) and n.target == "aten::convolution.default"]
    return [kind is not None and kind.strides == channels_last(kind.shape) for kind in kinds]


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
def test_a_chain_is_brought_into_the_layout_once_and_back_once(dtype: torch.dtype) -> None:
    """Of six images that cuDNN would copy there and back, the first and the last are copied, by kernels of ours."""
    before, after = changed(chain(3).to(dtype), torch.zeros(8, 64, 56, 56, dtype=dtype))
    assert lasts(after) == [True, True, True]
    assert sum(isinstance(n, Compute) for n in after.nodes) == sum(isinstance(n, Compute) for n in before.nodes) + 1
    assert isinstance(after.outputs[0], str)
    assert after.types()[after.outputs[0]].strides == before.types()[before.outputs[0]].strides  # type: ignore[index]


@pytest.mark.parametrize(
    ("count", "dtype", "target"),
    [(1, HALF, "cuda:sm_90"), (3, FULL, "cuda:sm_90"), (3, HALF, "hip:gfx942"), (3, HALF, "cuda:sm_75")],
)
def test_what_gains_nothing_stays(count: int, dtype: torch.dtype, target: str) -> None:
    """A lone convolution between images that stay; types that no tensor cores multiply; a library that has kernels for
    both layouts."""
    before, after = changed(chain(count).to(dtype), torch.zeros(8, 64, 56, 56, dtype=dtype), target=target)
    assert after is before


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("dtype", "tolerance"), [(FULL, 1e-4), (HALF, 4e-2)])
@torch.no_grad()
def test_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    """The same pass on a CPU, where every convolution is said to gain."""
    monkeypatch.setattr(module, "are_known", lambda *_: True)
    monkeypatch.setattr(module, "channels_last_time", lambda *_: -1e9)
    torch.manual_seed(0)
    first, second = (nn.Conv2d(5, 5, 3, padding=1).to(dtype) for _ in range(2))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(first(x))
        return second(y) + x, y.mean((2, 3))

    for shape in ((2, 5, 9, 7), (1, 5, 1, 3), (3, 5, 8, 8)):
        x = torch.randn(shape).to(dtype)
        x[0, 0, 0, 0] = float("inf")
        found = torch.compile(fn, backend="mlc", fullgraph=True)(x)
        for one, wanted in zip(found, fn(x), strict=True):
            assert one.stride() == wanted.stride()
            torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
