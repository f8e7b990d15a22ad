"""Large products with what follows them: which kernels they are for a GPU with a tensor memory accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc

pytest.importorskip("triton")


def fake(*shapes: tuple[int, ...]) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@pytest.mark.parametrize(("m", "n", "k"), [(8192, 4096, 512), (8000, 3000, 512)])
def test_gate_and_up_are_one_kernel_that_reads_x_once(m: int, n: int, k: int) -> None:
    report = torch_mlc.explain(gated, *fake((m, k), (n, k), (n, k)), target="cuda:sm_90")
    (kernel,) = report.kernels
    text = str(kernel.source)
    assert kernel.rule == "gpu_contraction" and not report.graphs[0].libraries
    assert text.count("tl.dot(") == 2 and text.count("in0_map0.load(") == 1
    assert "flatten=True" in text and text.count("tl.store(") == 2, "programs last, and results go by halves"
    assert kernel.resources.spills == 0 and kernel.resources.group_products > 0


def test_gate_and_up_of_one_row_are_one_kernel() -> None:
    report = torch_mlc.explain(gated, *fake((1, 4096), (14336, 4096), (14336, 4096)), target="cuda:sm_90")
    (kernel,) = report.kernels
    assert not report.graphs[0].libraries and "row" in kernel.rule


def test_a_library_multiplies_where_little_is_saved() -> None:
    """Gate and up of a large model: what the kernel behind them moves is a sixteenth of their time."""
    report = torch_mlc.explain(gated, *fake((4096, 4096), (14336, 4096), (14336, 4096)), target="cuda:sm_90")
    assert [c.op for c in report.graphs[0].libraries] == ["aten::mm.default"] * len(report.graphs[0].libraries)
    assert all("cuBLAS in" in c.reason for c in report.graphs[0].libraries)
    assert [k.rule for k in report.kernels] == ["gpu_pointwise"]


def gelu_first(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x) @ w


def rms_first(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) @ w


@pytest.mark.parametrize(
    ("fn", "m", "k", "n", "launches"),
    [(gelu_first, 65536, 256, 256, 1), (rms_first, 65536, 256, 256, 2)],
)
def test_a_product_bound_by_memory_makes_its_operand(fn: Any, m: int, k: int, n: int, launches: int) -> None:
    """What is in front of it is element-wise, or is told of each row: the operand is not written and read again."""
    report = torch_mlc.explain(fn, *fake((m, k), (k, n)), target="cuda:sm_90")
    kernel = report.kernels[-1]
    assert report.graphs[0].launches == launches and not report.graphs[0].libraries
    assert kernel.rule == "gpu_contraction" and kernel.resources.spills == 0 and kernel.resources.group_products > 0


@pytest.mark.parametrize(("m", "k", "n"), [(8192, 4096, 4096), (64, 4096, 4096)])
def test_a_product_of_many_steps_makes_none(m: int, k: int, n: int) -> None:
    """Many columns make each element again and again, and every step of a deep one waits for what it makes."""
    report = torch_mlc.explain(gelu_first, *fake((m, k), (k, n)), target="cuda:sm_90")
    assert [k.rule for k in report.kernels] == ["gpu_pointwise"] and len(report.graphs[0].libraries) == 1
