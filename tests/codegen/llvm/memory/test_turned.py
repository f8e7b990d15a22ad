"""Lanes that lie backward in memory: a vector that is turned round, and masked lanes one by one."""

from __future__ import annotations

import pytest
import torch

import torch_mlc

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_flips(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: (x.flip(-1), x.flip(0, 1)), backend="mlc")
    for columns in (64, 77):
        x = (torch.randn(6, columns) * 9).to(dtype)
        for got, wanted in zip(run(x), (x.flip(-1), x.flip(0, 1)), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_whole_vectors_are_no_gathers() -> None:
    (kernel,) = torch_mlc.explain(lambda x: x.flip(-1) * 2, torch.randn(6, 64)).kernels
    assert "gather" not in kernel.source
    assert "scatter" not in kernel.source
