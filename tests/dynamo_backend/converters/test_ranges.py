"""Ranges of numbers, exactly as eager rounds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32], ids=str)
def test_linspace_counts_from_the_nearer_end(dtype: torch.dtype) -> None:
    """Whole numbers are cut at both ends before anything is divided."""
    ends = [(4.3, 3.0), (0, 7), (7, 0), (0, 50), (4.3, 250), (5, 5)]

    def fn() -> list[Tensor]:
        return [torch.linspace(*pair, steps, dtype=dtype) for pair in ends for steps in (0, 1, 2, 7, 50)]

    for ours, wanted in zip(torch.compile(fn, backend="mlc")(), fn(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6 if dtype.is_floating_point else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("of", [torch.int64, torch.float32], ids=str)
def test_tensors_bound_a_linspace(dtype: torch.dtype, of: torch.dtype) -> None:
    """As plain numbers do: tensors are cut as well before anything is divided."""

    def fn(a: Tensor, b: Tensor) -> list[Tensor]:
        ends = [(a, b), (b, a), (a, 50.7), (200, b)]
        return [torch.linspace(*pair, steps, dtype=dtype) for pair in ends for steps in (0, 1, 2, 7, 50)]

    a, b = torch.tensor(4.3).to(of), torch.tensor(33.9).to(of)
    for ours, wanted in zip(torch.compile(fn, backend="mlc")(a, b), fn(a, b), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6 if dtype.is_floating_point else 0, atol=0)


def test_truth_values_bound_a_range() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [torch.arange(True, True), torch.arange(False, True), torch.arange(True, 5) * x]

    torch.testing.assert_close(torch.compile(fn, backend="mlc")(torch.ones(4)), fn(torch.ones(4)))
