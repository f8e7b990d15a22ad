"""Values of half types of which whole numbers are made, or that are compared, are rounded first, as eager's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "round": lambda x, s: (x / s).round(),
    "decimals": lambda x, s: (x / s).float().round(decimals=1),
    "floor": lambda x, s: (x * s).floor(),
    "fraction": lambda x, s: (x / s).frac(),
    "remainder": lambda x, s: (x * s) % 3,
    "floored quotient": lambda x, s: (x * s) // 2,
    "truncated quotient": lambda x, s: torch.div(x * s, 3, rounding_mode="trunc"),
    "integers": lambda x, s: (x / s).long(),
    "bytes": lambda x, s: torch.round(x / s).clamp(-128, 127).to(torch.int8),
    "buckets": lambda x, s: torch.bucketize(x / s, torch.arange(-50, 50, dtype=x.dtype)),
    "comparison": lambda x, s: (x / s).t() > 1,
    "in a wider type": lambda x, s: (x.float() * s.float()).to(x.dtype).double().ceil(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_steps(step: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, s = torch.randn(60, 70).to(dtype) * 40, torch.rand(70).to(dtype) + 0.3
    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, backend="mlc")(x, s), step(x, s))
