"""torch.ao's quantizing ops become kernels with eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor

import torch_mlc

ops = torch.ops.quantized_decomposed
S8, U8 = (-128, 127, torch.int8), (0, 255, torch.uint8)


def tensor_wide(x: Tensor) -> tuple[Tensor, Tensor]:
    q = ops.quantize_per_tensor(x, 0.05, 3, *S8)
    return q, ops.dequantize_per_tensor(q, 0.05, 3, *S8)


def by_tensors(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    q = ops.quantize_per_tensor.tensor(x, scale, zero, *U8)
    return q, ops.dequantize_per_tensor.tensor(q, scale, zero, *U8)


def by_channels(x: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = ops.quantize_per_channel(x, scales, zeros, 1, *S8)
    return q, ops.dequantize_per_channel(q, scales, zeros, 1, *S8), ops.dequantize_per_channel(q, scales, None, 1, *S8)


def halves(q: Tensor) -> Tensor:
    return ops.dequantize_per_tensor(q, 0.03, 7, *S8, out_dtype=torch.bfloat16)


def special(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = (torch.randn(shape) * 5).to(dtype)
    x.view(-1)[:3] = torch.tensor([float("inf"), -float("inf"), 1e30]).to(dtype)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(17, 65), (2, 5, 31)])
def test_results_are_those_of_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scale, zero = torch.tensor([0.0371], dtype=torch.float64), torch.tensor([7])
    scales, zeros = torch.rand(shape[1]) * 0.1 + 0.01, torch.randint(-5, 5, (shape[1],))
    cases: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (tensor_wide, ()), (by_tensors, (scale, zero)), (by_channels, (scales, zeros)),
    ]  # fmt: skip
    for fn, given in cases:
        torch._dynamo.reset()
        x = special(shape, dtype)
        for got, want in zip(torch.compile(fn, backend="mlc")(x, *given), fn(x, *given), strict=True):
            assert torch.equal(got, want) and got.dtype is want.dtype and got.stride() == want.stride(), fn.__name__


def test_to_a_half_type() -> None:
    q = torch.randint(-128, 128, (33, 7), dtype=torch.int8)
    error = (torch.compile(halves, backend="mlc")(q).double() - (q.double() - 7) * 0.03).abs().max()
    assert error <= 2.0**-6  # half of the last place of 4


def test_they_share_a_kernel_with_what_is_around() -> None:
    report = torch_mlc.explain(lambda x: torch.relu(tensor_wide(x * 2)[1]), torch.randn(64, 64))
    assert len(report.kernels) == 1 and not report.graphs[0].libraries
