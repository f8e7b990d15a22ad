"""Lanes a few elements apart: picked from whole registers, and no gathers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import torch_mlc

TYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.int8)


def groups(x: Tensor) -> list[Tensor]:
    """Each number of every group, and what two of them make."""
    return [*x.unbind(-1), x[..., 0] * x[..., -1]]


def steps(x: Tensor) -> list[Tensor]:
    """Every second, third, fourth and fifth element, from different first ones."""
    return [x[..., first::step].clone() for step, first in product((2, 3, 4, 5), (0, 1))]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_each_lane_is_its_element(dtype: torch.dtype) -> None:
    for make, shapes in ((groups, [(5, 64, n) for n in (2, 3, 4, 5)] + [(77, 3)]), (steps, [(3, 192), (2, 311)])):
        torch._dynamo.reset()
        run = torch.compile(make, backend="mlc")
        for shape in shapes:
            x = (torch.randn(shape) * 99).to(dtype)
            for got, wanted in zip(run(x), make(x), strict=True):
                assert torch.equal(got, wanted)


def test_sizes_that_are_symbols() -> None:
    torch._dynamo.reset()
    run = torch.compile(groups, backend="mlc", dynamic=True)
    for rows, n in product((7, 64, 130), (3, 4)):
        x = torch.randn(rows, n)
        for got, wanted in zip(run(x), groups(x), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_groups_are_loaded_once(n: int) -> None:
    """Of groups whose numbers are all read, each register is loaded once for all of them, and nothing is gathered."""
    (kernel,) = torch_mlc.explain(lambda x: sum(x.unbind(-1)), torch.randn(4096, n)).kernels
    assert "gather" not in kernel.source
    loads = [line for line in kernel.source.splitlines() if " = load <" in line and " x float>" in line]
    places = [line.split("ptr ")[1].split(",")[0] for line in loads]
    assert len(places) >= n and len(places) == len(set(places))
