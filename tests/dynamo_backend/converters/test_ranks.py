"""Short rows in order by counting: sorts, medians and what is made of them, with eager's order of equals and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_mlc
from tests.versions import torch_mends_it
from torch_mlc.ir.graph.graph import Graph

pytestmark = pytest.mark.usefixtures("fresh_compiler")
Check = Callable[..., Graph]


def row(*shape: int) -> Tensor:
    """Numbers with equals among them, zeros of both signs, infinities and NaN."""
    x = torch.randn(shape).round(decimals=1)
    flat = x.view(-1)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, torch.nan, 1.0, 1.0])
    flat[: len(special)] = special[: flat.numel()]
    return flat[torch.randperm(flat.numel())].view(shape)


@pytest.mark.parametrize("descending", [False, True])
def test_sorted_rows(check: Check, descending: bool) -> None:
    def f(x: Tensor) -> list[Tensor]:
        pairs = [torch.sort(x, dim=d, descending=descending, stable=True) for d in (-1, 0, 1)]
        return [t for pair in pairs for t in pair] + [torch.sort(x, dim=1, descending=descending).values]

    for x in (row(3, 11, 2), row(2, 5, 7).transpose(0, 2), torch.randint(-3, 3, (4, 9, 1)), row(1, 17, 1).bfloat16()):
        check(f, x)
    check(lambda x: list(torch.sort(x, descending=descending, stable=True)), torch.randint(0, 2, (13,)).bool())
    check(lambda x: list(torch.sort(x, descending=descending, stable=True)), torch.tensor(2.5))


def test_the_order_of_zero_elements_and_of_one(check: Check) -> None:
    for shape in ((3, 0), (0, 4), (4, 1)):
        check(lambda x: list(torch.sort(x, stable=True)), torch.randn(shape))


@pytest.mark.parametrize("descending", [False, True])
def test_the_order_of_equals_is_eagers(check: Check, descending: bool) -> None:
    """What torch sorts in registers keeps none, unless it is asked to, and who reads positions sees it."""
    x = torch.randint(0, 9, (4, 90))
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.int8, torch.bool):
        check(lambda x: list(torch.sort(x, stable=True, descending=descending)), x.to(dtype))
        check(lambda x: list(torch.sort(x, descending=descending)), x.to(dtype), library=["aten::sort.default"])


def test_compiled_sorts_are_kernels() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.sort(x * 2, descending=True, stable=True)
        return values + 1, places

    x = row(5, 67)
    (graph,) = torch_mlc.explain(f, x).graphs
    assert graph.kernels and not graph.libraries
    for given in (x, row(5, 67)):
        torch.testing.assert_close(torch.compile(f, backend="mlc")(given), f(given), equal_nan=True)


def test_long_rows_are_the_librarys() -> None:
    (graph,) = torch_mlc.explain(lambda x: torch.sort(x)[0], torch.randn(4000)).graphs
    assert len(graph.libraries) == 1


def test_a_gradient_goes_back_to_where_an_element_stood() -> None:
    x = torch.randn(4, 9, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x.sort(-1).values * torch.arange(9.0)).sum()

    (wanted,) = torch.autograd.grad(f(x), x)
    (found,) = torch.autograd.grad(torch.compile(f, backend="mlc")(x), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_medians(check: Check, median: Any) -> None:
    plain = torch.randn(3, 8)
    for x in (plain, row(2, 9), torch.full((4,), torch.nan), torch.randn(1), torch.randn(2, 3, 4).half()):
        check(lambda x: median(x), x)
        check(lambda x: [median(x, 0).values, median(x, -1, keepdim=True).values], x)
    check(lambda x: [median(x), median(x, 1).values], torch.randint(-4, 4, (5, 6)))


def test_the_place_of_a_median_is_the_librarys(check: Check) -> None:
    """Of equals eager names any one."""
    check(lambda x: list(torch.median(x, 1)), torch.randn(3, 8), library=["aten::median.dim"])


@torch_mends_it
def test_quantiles(check: Check) -> None:
    for x in (torch.randn(3, 11), row(3, 11)):
        check(lambda x: [torch.quantile(x, 0.3, 1), torch.nanquantile(x, 0.8)], x)


@pytest.mark.parametrize("invert", [False, True])
def test_what_is_among_a_few(check: Check, invert: bool) -> None:
    a, b = torch.randint(0, 50, (7, 31)), torch.randint(0, 50, (3, 9))
    for x, among in ((a, b), (row(40), row(20)), (a, b.float()), (a, b[0, 0]), (a[0, 0], b), (a[:0], b), (a, b[:0])):
        check(lambda x, t: torch.isin(x, t, invert=invert), x, among)
        check(lambda x, t: torch.isin(x, t, invert=invert, assume_unique=False), x, among)
