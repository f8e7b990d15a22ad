"""Depthwise convolutions on GPUs, forward and backward: interpreted against the oracle, and compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.machine import Machine
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.cost.convolution import Direction, decide
from torch_mlc.scheduler.facts.contraction import Decision
from torch_mlc.scheduler.facts.convolution import Convolution
from torch_mlc.scheduler.passes import decompose_convolutions
from torch_mlc.scheduler.rules.gpu import stencil as gpu_stencil


@pytest.fixture(autouse=True)
def _no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images count like large ones: a kernel that adds pieces costs nothing."""

    def without_launches(c: Convolution, part: Direction, table: SymbolTable, machine: Machine) -> Decision:
        return decide(c, part, table, replace(machine, launch=0.0))

    monkeypatch.setattr(importlib.import_module(decompose_convolutions.__module__), "decide", without_launches)
    monkeypatch.setattr(gpu_stencil, "_programs", lambda *_: 1 << 20)


CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
HALF, FLOAT = torch.bfloat16, torch.float32
# Shape of the image, kernel, stride, padding, dilation, outputs of each channel, channels innermost, type.
CASES: dict[str, tuple[tuple[int, ...], int, int, int, int, int, bool, torch.dtype]] = {
    "odd": ((1, 5, 13, 11), 3, 1, 1, 1, 1, False, FLOAT),
    "even": ((2, 6, 8, 16), 3, 1, 1, 1, 1, False, HALF),
    "channels innermost": ((2, 16, 9, 8), 3, 1, 1, 1, 1, True, HALF),
    "odd channels innermost": ((3, 37, 7, 8), 3, 1, 1, 1, 1, True, FLOAT),
    "stride": ((4, 3, 13, 12), 3, 2, 1, 1, 1, False, HALF),
    "stride, channels innermost": ((4, 24, 13, 12), 3, 2, 1, 1, 1, True, HALF),
    "stride 3, no padding": ((1, 3, 11, 10), 5, 3, 0, 1, 1, False, FLOAT),
    "dilation": ((2, 4, 11, 9), 3, 1, 2, 2, 1, False, FLOAT),
    "large": ((2, 4, 10, 9), 7, 1, 3, 1, 1, False, HALF),
    "large, channels innermost": ((2, 16, 9, 10), 7, 1, 3, 1, 1, True, HALF),
    "multiplier": ((3, 3, 7, 8), 3, 1, 1, 1, 2, False, FLOAT),
    "1d": ((4, 6, 37), 4, 1, 3, 1, 1, False, HALF),
    "3d": ((2, 3, 4, 5, 6), 3, 1, 1, 1, 1, False, FLOAT),
}


# Those that always run, of all that differ; the interpreter takes half a minute for another.
QUICK = ("odd", "stride 3, no padding", "1d", "3d")


def reported(name: str, **options: Any) -> Report:
    """What a training step of a depthwise convolution becomes."""
    shape, k, stride, padding, dilation, many, innermost, dtype = CASES[name]
    return depthwise(shape, k, stride, padding, dilation, many, innermost, dtype, **options)


def depthwise(
    shape: tuple[int, ...], k: int, stride: int, padding: int, dilation: int, many: int, innermost: bool,
    dtype: torch.dtype, **options: Any,
) -> Report:  # fmt: skip
    channels, rank = shape[1], len(shape) - 2
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype)
        x = (x.to(memory_format=torch.channels_last) if innermost else x).requires_grad_()
        for d in (0, *range(2, rank + 2)) if "dynamic" in options else ():
            torch._dynamo.mark_dynamic(x, d)
        w = torch.empty(channels * many, 1, *[k] * rank, dtype=dtype, requires_grad=True)
        b = torch.empty(channels * many, dtype=dtype, requires_grad=True)

        def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.relu(CONVOLVE[rank](x, w, b, stride, padding, dilation, channels))

        made = {"cache": False, "compile_workers": 0}
        return torch_mlc.explain(fn, x, w, b, training=True, target="cuda:sm_90", options=made, **options)


def scheduled(kernel: KernelReport) -> LoopNest:
    assert kernel.scheduled is not None and not kernel.error, kernel.error
    return kernel.scheduled


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_training_step_in_loops(name: str, agrees: Callable[..., Any]) -> None:
    report = reported(name)
    assert not any(g.libraries for g in report.graphs)
    rules = [k.rule for k in report.kernels]
    # Few windows are taps themselves.
    assert rules.count("gpu_stencil") == (3 if name == "stride 3, no padding" else 2)
    assert rules.count("gpu_stencil") + rules.count("gpu_filters") == 3
    for kernel in report.kernels:
        assert kernel.resources is not None and kernel.resources.spills == 0
        if kernel.rule in ("gpu_stencil", "gpu_filters"):
            agrees(scheduled(kernel), tolerance=2e-2 if CASES[name][-1] is HALF else 1e-4)


@pytest.mark.slow
def test_sizes_that_vary(agrees: Callable[..., Any]) -> None:
    report = reported("odd", dynamic=None)
    found = [k for k in report.kernels if k.rule in ("gpu_stencil", "gpu_filters")]
    assert len(found) == 3
    for kernel in found:
        nest = scheduled(kernel)
        for size in (2, 5, 9):
            sizes = {s.symbol.name: size + k for k, s in enumerate(nest.symbols.sizes)}
            agrees(nest, sizes, tolerance=1e-4)


def test_what_windows_share_is_loaded_once() -> None:
    report = reported("even")
    kernel = next(k for k in report.kernels if k.rule == "gpu_stencil")
    copies = kernel.source.count("tl.store(out0_ptr")
    assert copies > 1
    assert kernel.source.count("tl.load(in0_ptr") == 3 * copies  # rows outside are proved to be there never
    # Only windows at the border are masked: the middle tap of the first copy is always there.
    assert "tl.int64" not in kernel.source


def test_channels_are_read_sixteen_bytes_at_a_time_and_images_once() -> None:
    report = depthwise((32, 96, 56, 56), 3, 1, 1, 1, 1, True, HALF)
    forward, backward = report.graphs
    assert forward.traffic.moved == forward.traffic.compulsory and forward.launches == 1
    for kernel in report.kernels:
        assert kernel.resources is not None and kernel.resources.spills == 0
    (stencil,) = (k for k in forward.kernels)
    loads = [line for line in stencil.source.splitlines() if "tl.load(in0_ptr" in line]
    assert stencil.resources is not None and stencil.resources.wide_stores == 1.0 and len(loads) == 3 * 6
    (filters,) = (k for k in backward.kernels if k.rule == "gpu_filters")
    assert filters.resources is not None and filters.resources.wide_loads == 1.0
    assert filters.traffic is not None and filters.traffic.moved < 1.05 * 2 * 32 * 96 * 56 * 56 * HALF.itemsize


def test_why_is_told() -> None:
    (note,) = {n for k in reported("even").graphs[0].kernels for n in k.notes}
    assert "a stencil of 9 taps in" in note and "rather than" in note


def test_large_windows_leave_a_loop() -> None:
    for name, inside in (("odd", False), ("large", True)):
        kernel = next(k for k in reported(name).kernels if k.rule == "gpu_stencil")
        assert ("for k0 in tl.range(0, 7)" in kernel.source) == inside
        assert emit_triton(scheduled(kernel), kernel.target).text == kernel.source  # type: ignore[arg-type]
