"""Reductions of columns as machine code: whole lines, enough bytes under way, and no registers in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.cost.flight import bytes_wanted, steps_under_way

pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
IMAGES = (64, 256, 56, 56)


def sums(x: Tensor, g: Tensor) -> Tensor:
    return x.sum(0)


def gelu_backward(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.ops.aten.gelu_backward(g, x)
    return y, y.sum(0)


def batch_norm_backward(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.where(x > 0, g, 0)
    dims = [d for d in range(x.ndim) if d != 1]
    total, inner = y.sum(dims, keepdim=True), (y * x).sum(dims, keepdim=True)
    return y - total - x * inner, total


def made(fn: Callable[..., Any], shape: tuple[int, ...], layout: torch.memory_format) -> list[KernelReport]:
    """The kernels that move more than a few MiB."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16).to(memory_format=layout) for _ in range(2)]
    options = {"cache": False, "compile_workers": 0}
    report = torch_mlc.explain(fn, *inputs, target="cuda:sm_90", options=options)
    return [k for k in report.kernels if k.traffic is not None and k.traffic.moved > 32 << 20]


@pytest.mark.parametrize(
    ("fn", "shape", "layout"),
    [
        (sums, (16384, 4096), torch.contiguous_format),
        (gelu_backward, (16384, 4096), torch.contiguous_format),
        (batch_norm_backward, IMAGES, torch.contiguous_format),
        (batch_norm_backward, IMAGES, torch.channels_last),
    ],
    ids=["sums", "gelu", "images", "channels last"],
)
def test_memory_is_kept_busy(fn: Callable[..., Any], shape: tuple[int, ...], layout: torch.memory_format) -> None:
    kernels = made(fn, shape, layout)
    assert kernels
    for k in kernels:
        assert k.resources is not None and k.resources.spills == 0, k.show()
        assert k.bytes_in_flight is not None and k.bytes_in_flight >= 25 << 10, k.show()
        assert k.contiguous_bytes is not None and k.contiguous_bytes >= 128, k.show()
        assert k.traffic is not None and k.traffic.moved < 1.01 * k.traffic.least, "one visit of each array"


def test_steps_under_way_are_those_that_memory_wants_and_shared_memory_holds() -> None:
    machine = SM90.machine
    assert bytes_wanted(machine) == pytest.approx(25e3, rel=0.02)
    # One array of which a step is enough; several, of which the first is waited for before the next is used.
    assert steps_under_way(machine, 8192, 1, 528, 4) == 1
    assert steps_under_way(machine, 8192, 2, 528, 4) == 3
    # Few programs, and steps that shared memory holds two of, and none of.
    assert steps_under_way(machine, 4096, 1, 132, 4) == 4
    assert steps_under_way(machine, 80 << 10, 2, 132, 1) == 2
    assert steps_under_way(machine, 300 << 10, 2, 132, 1) == 1


@pytest.mark.parametrize("name", ["cuda:sm_75", "hip:gfx942"])
def test_steps_that_come_through_registers_are_not_read_ahead(name: str) -> None:
    assert steps_under_way(gpu_target(name).machine, 4096, 2, 132, 4) == 1


@pytest.mark.parametrize("width", [4, 16, 40])
def test_columns_of_what_a_block_makes_and_reads_itself(width: int) -> None:
    """The gradient of a scaled row before its norm is a column sum of a product that a block goes on from."""

    def fn(x: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
        return x + torch.nn.functional.layer_norm(x * scale, x.shape[-1:], gain)

    x, scale = torch.randn(2, width, requires_grad=True), torch.randn(width, requires_grad=True)
    report = torch_mlc.explain(fn, x, torch.randn(width), scale, training=True, target="cuda:sm_90")
    assert all(k.rule for g in report.graphs for k in g.kernels)
