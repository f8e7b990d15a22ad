"""A table that is looked up in and multiplied by: its gradient is one tensor that two things add to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def logits(table: Tensor, ids: Tensor) -> Tensor:
    return torch.tanh(F.embedding(ids, table)) @ table.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_gradients(dtype: torch.dtype, dynamic: bool, numerics: str) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(logits, backend="mlc", dynamic=dynamic, options={"numerics": numerics})
    table = torch.randn(301, 24, dtype=dtype, requires_grad=True)
    for length in (5, 9) if dynamic else (5,):
        ids = torch.randint(7, (3, length))  # some rows often, most never
        (ours,) = torch.autograd.grad(compiled(table, ids).sin().sum(), [table])
        exact = table.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(logits(exact, ids).to(dtype).double().sin().sum(), [exact])
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.5}[dtype]
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", ["cuda:sm_90", None], ids=str)
def test_the_gradient_of_a_table_is_scattered_into_the_product(target: str | None) -> None:
    """No zeros of the table's size, and no sum: the last is a pass over three such tensors."""
    table, ids = torch.randn(4000, 64, requires_grad=True), torch.randint(4000, (4, 16))
    report = torch_mlc.explain(logits, table, ids, training=True, target=target)
    backward = report.graphs[1]
    whole = table.numel() * 4
    in_kernels = backward.traffic.kernels
    assert in_kernels < whole // 2, backward.program
