"""Where the best element is: ties, infinities, NaN and rows of nothing but the worst value, as eager has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

KINDS = ("plain", "ties", "worst", "best", "nan", "mixed")


def positions(x: Tensor) -> tuple[Tensor, ...]:
    return (x.argmax(-1), x.argmin(-1), *x.max(0), *x.min(1), x.argmax(), (-x).argmin(0))


def sample(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 3
    other = torch.rand(shape, generator=torch.Generator().manual_seed(shape[1]))
    if kind in ("ties", "mixed"):
        x = (x * 2).round()
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype) if kind == "worst" else x.to(dtype)
    match kind:
        case "worst" | "best":
            x = torch.full(shape, math.inf if kind == "best" else -math.inf)
        case "nan":
            x[other < 0.1] = math.nan
        case "mixed":
            x[other < 0.3] = -math.inf
            x[other > 0.98] = math.nan
    return x.to(dtype)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64])
def test_positions_are_eagers(dtype: torch.dtype, dynamic: bool) -> None:
    """One row, one column, odd and long rows, pieces of a reduction to one number."""
    for shape in ((1, 1), (17, 64), (5, 1003), (300, 33), (1, 20_003))[:: 1 if not dynamic else 2]:
        torch._dynamo.reset()
        compiled = torch.compile(positions, backend="mlc", dynamic=dynamic)
        for kind in KINDS:
            x = sample(shape, dtype, kind)
            for want, got in zip(positions(x), compiled(x), strict=True):
                assert got.dtype == want.dtype
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=f"{shape} {kind}")
