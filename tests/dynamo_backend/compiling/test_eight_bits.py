"""Graphs with floats of eight bits make kernels for every GPU, whether Triton has the types for it or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import torch_mlc

pytest.importorskip("triton")
GRAPHS = (
    "cast", "back", "quantised", "linear of 1 row", "linear of 16 rows", "blocks of 1 row", "blocks of 16 rows",
)  # fmt: skip
HALF = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 2).to(dtype)


def widened(q: Tensor) -> Tensor:
    return torch.where(q.to(HALF) > 1, q.to(HALF), 0) + 1


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row by its largest number."""
    scale = x.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def blocks(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """A scale for each block of the weight."""
    (n, k), (a, b) = w.shape, scale.shape
    wide = w.float().reshape(a, n // a, b, k // b) * scale[:, None, :, None]
    return F.linear(x, wide.to(x.dtype).reshape(n, k))


def graph(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    w = torch.empty(768, 512, dtype=dtype)
    few, some = (torch.empty(rows, 512, dtype=HALF) for rows in (1, 16))
    return {
        "cast": (scaled, (torch.empty(300, 70), dtype)),
        "back": (widened, (torch.empty(300, 70, dtype=dtype),)),
        "quantised": (quantised, (torch.empty(64, 1000, dtype=HALF), dtype)),
        "linear of 1 row": (linear, (few, w, torch.empty((), dtype=HALF))),
        "linear of 16 rows": (linear, (some, w, torch.empty((), dtype=HALF))),
        "blocks of 1 row": (blocks, (few, w, torch.empty(6, 4))),
        "blocks of 16 rows": (blocks, (some, w, torch.empty(6, 4))),
    }[name]


CASES = [
    *((name, E4M3, target) for name in GRAPHS for target in ("cuda:sm_80", "cuda:sm_86", "hip:gfx942")),
    *((name, E5M2, target) for name in GRAPHS[:4] for target in ("cuda:sm_80", "cuda:sm_90")),
    *(("linear of 1 row", dtype, "cuda:sm_89") for dtype in (E4M3, E5M2)),
]


@pytest.mark.parametrize(("name", "dtype", "target"), CASES)
def test_all_of_a_graph_is_one_kernel(name: str, dtype: torch.dtype, target: str) -> None:
    with FakeTensorMode():
        fn, args = graph(name, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch-mlc")
        report = torch_mlc.explain(fn, *args, target=target)
    (kernel,) = report.kernels
    assert kernel.binary is not None and not any(g.libraries or g.fallbacks for g in report.graphs)


SLOTS = [(m, target) for m in (1, 16) for target in ("cuda:sm_80", "cuda:sm_86", "cuda:sm_90", "cuda:sm_120")]


@pytest.mark.parametrize(("name", "most"), [("linear", 5.1), ("blocks", 7.8)])
@pytest.mark.parametrize(("m", "target"), SLOTS)
def test_few_rows_are_bound_by_memory(name: str, most: float, m: int, target: str) -> None:
    """In slots a byte, of which a copy of an H200 takes 7.8; weights go from their copies to the tensor cores in
    registers, and what is a number for each block goes with them."""
    with FakeTensorMode():
        x, w = torch.empty(m, 4096, dtype=HALF), torch.empty(4096, 4096, dtype=E4M3)
        scale = torch.empty((), dtype=HALF) if name == "linear" else torch.empty(32, 32)
    (kernel,) = torch_mlc.explain(linear if name == "linear" else blocks, x, w, scale, target=target).kernels
    assert kernel.slots_a_byte is not None and kernel.slots_a_byte <= most
    assert kernel.resources is not None and kernel.resources.spills == 0
    if target != "cuda:sm_90" or m == 1:  # where groups of warps multiply, they wait for all of it
        assert kernel.resources.group_products == 0 < kernel.resources.warp_products
        assert kernel.binary is not None
        between = kernel.binary.assembly.split("mma.sync")[1:-1]
        assert not any("st.shared.v4" in part for part in between)
