"""Large products with what follows them: which kernels they are for a GPU with a tensor memory accelerator."""

from __future__ import annotations

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
