"""Compile time grows with the graph, not with its square: lines of our own Python, counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.python.text import print_host
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.codegen.host.steps.resolve import resolve
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.passes import run_passes
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

FEW, MANY = 6, 24


def blocks(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """A residual stream of norms, products and gates: each layer reads what all before it have added up."""

    def function(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            h = F.layer_norm(x, (16,)) @ w
            x = x + F.gelu(h) * mask
        return x

    return function, [torch.randn(8, 16), torch.randn(8, 16), *(torch.randn(16, 16) for _ in range(count))]


def chain(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Element-wise operations and softmaxes with nothing between them, all of which read one tensor."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2 * count):
            x = (x.sin() * y).softmax(-1) + y
        return x

    return function, [torch.randn(8, 16), torch.randn(8, 16)]


def step(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Many small tensors, each brought up to date by itself."""

    def function(lr: Tensor, *tensors: Tensor) -> list[Tensor]:
        ps, gs = tensors[: 2 * count], tensors[2 * count :]
        return [p - lr * g / (g * g).sqrt() for p, g in zip(ps, gs, strict=True)]

    return function, [torch.tensor(0.1), *(torch.randn(8, 3 + k % 5) for _ in (0, 1) for k in range(2 * count))]


def joins(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Many pairs of sums, each put side by side."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return [torch.cat([x.sum(0), y.sum(0)], 1) for x, y in zip(tensors[::2], tensors[1::2], strict=True)]

    return function, [torch.randn(65, 2, 1024) for _ in range(2 * count)]


def scans(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Running sums, each read at the element before, in a row that was padded and cut."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = (F.pad(x.flip(-1).cumsum(-1), (1, 0))[:, :-1] * x) @ w
        return x

    return function, [torch.randn(64, 64), *(torch.randn(64, 64) for _ in range(2 * count))]


def saved(count: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """What is kept from way to way back, all of it at one time, in one arena."""

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        kept = []
        for w in weights:
            kept.append(x.sin())
            x = x.cumsum(0) @ w
        for w, k in zip(weights, reversed(kept), strict=True):
            x = (x * k).softmax(0) @ w
        return x

    return function, [torch.randn(64, 64), *(torch.randn(64, 64) for _ in range(2 * count))]


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python run, in every module but torch's and sympy's: their caches would blur the count."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return line if "torch_mlc" in str(frame.f_globals.get("__name__")) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def compiled(gm: Any, inputs: list[Tensor]) -> int:
    """All that is ours but the kernels themselves; how many functions the kernels are."""
    context = context_of(Options())
    graph = run_passes(GRAPH_PASSES, import_graph(gm, inputs), context)
    fusion = run_passes(CALL_PASSES, fuse(graph), context)
    called = {n.function for n in fusion.graph.nodes if isinstance(n, CallTensor)}
    print_host(
        resolve(
            build_host_program(fusion.graph, {f: KernelUse(f, (), True, fusion.functions[f].table) for f in called})
        )
    )
    return len(called)


SLOW = [pytest.param(f, marks=pytest.mark.slow) for f in (step, scans, chain)]


@pytest.mark.parametrize("make", [blocks, joins, saved, *SLOW], ids=lambda f: f.__name__)
def test_work_grows_with_the_graph(make: Callable[[int], tuple[Callable[..., Any], list[Tensor]]]) -> None:
    counts = []
    for size in (FEW, FEW, MANY):  # once to fill caches
        function, inputs = make(size)
        (gm,) = capture(function, inputs)
        counts.append(lines_of(lambda gm=gm, inputs=inputs: compiled(gm, inputs)))
    assert counts[-1] < counts[-2] * (MANY / FEW) * 1.2, counts


def adam(count: int) -> Callable[[], object]:
    """An optimizer's step that writes three tensors for each parameter, as compiled."""
    tensors = [[torch.rand(4, 5) for _ in range(count)] for _ in range(4)]

    def function(ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor]) -> None:
        for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.99).addcmul_(g, g, value=0.01)
            p.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.01)

    step = torch.compile(function, backend="mlc")
    return lambda: step(*tensors)


def long_join(count: int) -> Callable[[], object]:
    """Training through one concatenation of many parts, as compiled."""
    parts = [torch.rand(4, 5, requires_grad=True) for _ in range(2 * count)]
    function = torch.compile(lambda *parts: torch.cat([x * 2 for x in parts]).sin().sum(), backend="mlc")
    return lambda: function(*parts).backward()


@pytest.mark.parametrize("make", [pytest.param(adam, marks=pytest.mark.slow), long_join], ids=lambda f: f.__name__)
def test_the_whole_way_grows_with_the_graph(
    make: Callable[[int], Callable[[], object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys, kernels and the native program too; and, where all of it is in the cache, it is a small part of that."""
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    make(2)()  # what is done once a process
    cold, warm = [], []
    for size in (FEW, MANY):
        for found in (cold, warm):
            torch._dynamo.reset()
            found.append(lines_of(make(size)))
    assert cold[1] < cold[0] * (MANY / FEW) * 1.2, cold
    assert warm[1] < warm[0] * (MANY / FEW) * 1.2, warm
    assert warm[1] < cold[1] / 4, (cold, warm)
