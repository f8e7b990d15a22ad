"""What readers take of what others make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.ir.expr.dtypes import DType

ROWS, WIDTH, CLASSES = 8192, 768, 50257


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.mT, target)


def log_probabilities(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(x @ w.mT, -1).gather(-1, target[:, None])


def chosen(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    scores = x @ w.mT
    return scores.gather(-1, target[:, None])[:, 0] - scores.float().exp().sum(-1).log()


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("function", [loss, log_probabilities, chosen])
def test_products_are_gathered_from_as_they_are_rounded(function: Callable[..., Tensor], numerics: str) -> None:
    with FakeTensorMode():
        x, w = (torch.empty(n, WIDTH, dtype=torch.bfloat16) for n in (ROWS, CLASSES))
        target = torch.empty(ROWS, dtype=torch.int64)
    report = torch_mlc.explain(
        function, x, w, target, target="cuda:sm_90", options={"cache": False, "numerics": numerics}
    )
    large = [
        o.buffer for k in report.kernels if k.function for o in k.function.outputs
        if o.buffer.shape == (ROWS, CLASSES)
    ]  # fmt: skip
    assert all(b.dtype is DType.BFLOAT16 for b in large)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_gathered_from_as_they_are_rounded(dtype: torch.dtype) -> None:
    def function(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        sums = x.sum(0)
        return sums[at] * 2, (sums + 1)[at.flip(0)]

    torch.manual_seed(0)
    x, at = torch.randn(33, 70).to(dtype) * 40, torch.randint(-70, 70, (19,))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="mlc")
    for ours, theirs in zip(compiled(x, at), function(x, at), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_places_that_count_from_no_end_are_used_as_they_are() -> None:
    def function(x: Tensor) -> Tensor:
        return F.interpolate(x, (5, 70), mode="nearest")

    x = torch.randn(2, 3, 9, 40)
    (kernel,) = torch_mlc.explain(function, x, options={"cache": False}).kernels
    assert "select" not in str(kernel.loops)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="mlc")(x), function(x))
