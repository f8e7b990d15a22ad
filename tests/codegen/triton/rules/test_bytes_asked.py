"""Kernels that memory ought to bind ask it for enough at a time: rows of which two are resident, tails that are peeled
and not avoided by tiles of few elements, and rows that begin anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.prediction import kernel_work
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.hints import RESIDENT
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.cost.rows import rows_together, warps_of_rows
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

pytest.importorskip("triton")
SM90 = gpu_target("cuda:sm_90")
WANTED = 25 << 10
FAKE = FakeTensorMode()


def kernels(fn: Callable[..., Any], *inputs: Tensor, training: bool = False, target: str = "cuda:sm_90"):
    options = {"cache": False, "compile_workers": 0}
    found = torch_mlc.explain(fn, *inputs, training=training, target=target, options=options).kernels
    return [k for k in found if k.traffic is not None and k.traffic.moved > 32 << 20]


def empty(*shape: int, gradients: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FAKE:
        return torch.empty(shape, dtype=dtype, requires_grad=gradients)


def flight(kernel: KernelReport) -> float:
    assert kernel.resources is not None and kernel.resources.spills == 0, kernel.show()
    assert kernel.bytes_in_flight is not None
    return kernel.bytes_in_flight


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_120"])
def test_two_rows_of_a_layer_norm_are_resident(target: str) -> None:
    """By itself the compiler takes 72 registers of 512 threads, so that a multiprocessor holds one row: 24 KiB."""
    x, w, b = empty(4096, 16384), empty(16384), empty(16384)
    (k,) = kernels(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), x, w, b, target=target)
    assert flight(k) >= 60 << 10 and k.resources is not None and k.resources.registers <= 128
    assert k.scheduled is not None and RESIDENT.of(k.scheduled) == 2 and k.kernel is not None
    assert k.kernel.option("maxnreg") == 128


def test_rows_of_which_a_multiprocessor_holds_several_by_itself_or_one_at_best() -> None:
    machine = SM90.machine
    assert [rows_together(machine, n) for n in (4096, 8192, 8193, 16384, 16385, 32768)] == [0, 0, 2, 2, 1, 1]
    assert [warps_of_rows(machine, n) for n in (1, 2)] == [16, 8]
    # Wavefronts have twice as many registers.
    assert rows_together(gpu_target("hip:gfx942").machine, 16384) == 0


def test_a_flat_tile_that_has_a_tail_is_as_wide_as_any() -> None:
    """The number of elements is a multiple of 256 and of no greater power of two: tiles of 256 would give a thread two
    elements, and 16 KiB in flight."""
    (k,) = kernels(lambda x, y: x + y, empty(256 * 150771), empty(256 * 150771))
    assert flight(k) >= 60 << 10 and k.resources is not None
    assert (k.resources.wide_loads, k.resources.wide_stores) == (1.0, 1.0)


def test_long_rows_of_two_tensors_are_found_again_in_the_cache() -> None:
    """Registers hold one such row, not two: a program of all threads, and 1.0 times the bytes where it was 1.67."""
    y, g = empty(4096, 32768), empty(4096, 32768)
    (k,) = kernels(lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, y.dtype), g, y)
    assert k.binary is not None and k.kernel is not None and k.scheduled is not None and k.target is not None
    work = kernel_work(k.binary, k.kernel, k.scheduled, k.target)
    assert work is not None and work.resident == 1 and work.memory < 1.01 * 3 * y.numel() * y.itemsize
    assert k.resources is not None and k.resources.spills == 0 and k.resources.wide_loads == 1


@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_100"])
def test_logits_of_a_vocabulary_of_an_odd_size(target: str) -> None:
    """Each element is a load with an address of its own. With 32 of them a lane, 24 KiB and 9.4 slots a byte forward;
    18 KiB backward in programs of four warps."""
    found = kernels(F.cross_entropy, empty(8192, 50257, gradients=True), empty(8192, dtype=torch.int64), training=True,
                    target=target)  # fmt: skip
    assert len(found) == 2
    for k in found:
        assert flight(k) >= WANTED, k.show()
        assert k.slots_a_byte is not None and k.slots_a_byte <= 7.2, k.show()


FLAT = """
@function
def f(in0: bfloat16[{n}], in1: bfloat16[{n}], out0: output(bfloat16[{n}])):
    i0 = row({n})
    t0 = compute(rows, cast(add(cast(in0[i0], float32), cast(in1[i0], float32)), bfloat16))
    out0[i0] = t0
"""
ROWS = """
@function
def f(in0: bfloat16[{m}, {n}], in1: float32[{m}], out0: output(bfloat16[{m}, {n}])):
    i0 = row({m})
    i1 = row({n})
    t0 = compute(rows, cast(mul(exp(sub(cast(in0[i0, i1], float32), in1[i0])), in1[i0]), bfloat16))
    out0[i0, i1] = t0
"""


def agrees_with(agrees, text: str) -> None:
    function = parse(text)
    assert isinstance(function, TensorFunction)
    agrees(default_schedule(lower_to_loops(function, SM90), SM90).nest, {})


@pytest.mark.parametrize("n", [1, 255, 256, 256 * 5, 1024 * 3 + 256, 4099])
def test_flat_tiles_agree_with_the_definition(agrees, n: int) -> None:
    agrees_with(agrees, FLAT.format(n=n))


# The second has enough elements for programs of twice as many.
@pytest.mark.parametrize(("m", "n"), [(3, 1001), (67, 2049)])
def test_rows_that_begin_anywhere_agree_with_the_definition(agrees, m: int, n: int) -> None:
    agrees_with(agrees, ROWS.format(m=m, n=n))
