"""Windows, borders, distances, samples and searches equal eager, backward too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

aten = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("size", [(3, 4), (7, 2), (1, 1), (6, 9)])
def test_adaptive_pooling(check: Callable[..., Any], size: tuple[int, int]) -> None:
    x, grad = numbers(2, 6, 9), numbers(2, *size)

    def fn(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        best, where = aten.adaptive_max_pool2d(x, size)
        return [
            aten._adaptive_avg_pool2d(x, size), aten._adaptive_avg_pool2d_backward(grad, x), best, where,
            aten.adaptive_max_pool2d_backward(grad, x, where),
        ]  # fmt: skip

    check(fn, x, grad, fast=True)


def test_pooling_of_volumes(check: Callable[..., Any]) -> None:
    x, size = numbers(2, 5, 6, 7), (2, 3, 4)
    grad, fewer = numbers(2, *size), numbers(2, 3, 4, 4)

    def fn(x: torch.Tensor, grad: torch.Tensor, fewer: torch.Tensor) -> list[torch.Tensor]:
        best, where = aten.adaptive_max_pool3d(x, size)
        _, place = aten.max_pool3d_with_indices(x, 2, 2, 1)
        args = ([2, 2, 2], [2, 2, 2], [1, 1, 1])
        return [
            aten._adaptive_avg_pool3d(x, size), aten._adaptive_avg_pool3d_backward(grad, x), best,
            aten.adaptive_max_pool3d_backward(grad, x, where),
            aten.max_pool3d_with_indices_backward(fewer, x, *args, [1, 1, 1], False, place),
            aten.avg_pool3d_backward(fewer, x, *args, False, False, None),
        ]  # fmt: skip

    check(fn, x, grad, fewer, fast=True)


def test_fractional_pooling(check: Callable[..., Any]) -> None:
    x, samples = numbers(2, 3, 9, 8), torch.tensor([0.1, 0.5, 0.9, 0.3]).repeat(3).reshape(2, 3, 2)
    check(lambda x, s: aten.fractional_max_pool2d(x, [2, 3], [4, 5], s), x, samples, fast=True)
    volume, samples = numbers(1, 2, 5, 6, 7), torch.tensor([0.1, 0.5, 0.9, 0.3, 0.7, 0.0]).reshape(1, 2, 3)
    check(lambda x, s: aten.fractional_max_pool3d(x, [2, 2, 3], [3, 1, 4], s), volume, samples, fast=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fractional_windows_lie_where_the_elements_type_rounds_them_to(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.fractional_max_pool2d(x, [3, 3], [11, 9], s)  # type: ignore[no-any-return]

    x, samples = numbers(4, 9, 40, 23).to(dtype), torch.rand(4, 9, 2, generator=torch.Generator().manual_seed(1))
    samples = samples.to(dtype)
    for ours, eagers in zip(torch.compile(fn, backend="mlc")(x, samples), fn(x, samples), strict=True):
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "stride"),
    [((2, 3), (1, 1), (0, 0), (1, 1)), ((3, 2), (2, 1), (1, 2), (2, 3)), ((2, 2), (3, 2), (2, 0), (3, 2))],
)
def test_columns(check: Callable[..., Any], kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    x = numbers(2, 3, 7, 8)
    columns = aten.im2col(x, kernel, dilation, padding, stride)
    check(lambda x: aten.im2col(x, kernel, dilation, padding, stride), x, fast=True)
    check(lambda c: aten.col2im(c, (7, 8), kernel, dilation, padding, stride), columns, fast=True)
    check(lambda c: aten.col2im(c, (7, 8), kernel, dilation, padding, stride), columns[1], fast=True)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_backward_of_borders(check: Callable[..., Any], kind: str) -> None:
    x, volume = numbers(2, 5, 4), numbers(1, 3, 3, 4)
    pad, deep = [3, 1, 0, 4], [2, 1, 0, 2, 1, 1]
    grad, of_volume = numbers(2, 9, 8), numbers(1, 5, 5, 7)
    check(lambda g, x: getattr(aten, f"{kind}_pad2d_backward")(g, x, pad), grad, x, fast=True)
    check(lambda g, x: getattr(aten, f"{kind}_pad3d_backward")(g, x, deep), of_volume, volume, fast=True)
    check(lambda g, x: getattr(aten, f"{kind}_pad1d_backward")(g, x, [3, 2]), numbers(2, 5, 9), x, fast=True)
    if kind == "replication":
        check(lambda g, x: aten.replication_pad2d_backward(g, x, [-1, 2, 1, -2]), numbers(2, 4, 5), x, fast=True)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(check: Callable[..., Any], p: float) -> None:
    a, b = numbers(2, 4, 3), numbers(2, 5, 3)
    b[0, 1] = a[0, 2]  # a distance of zero

    def between(a: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = aten._cdist_forward(a, b, p, None)
        return distance, aten._cdist_backward(g, a, b, p, distance)

    def within(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = aten._pdist_forward(x, p)
        return distance, aten._pdist_backward(g, x, p, distance)

    check(between, a, b, numbers(2, 4, 5), fast=True)
    check(within, torch.cat([a[0], b[0]]), numbers(36), fast=True)


LINEAR = [(0, 0, True), (0, 1, False), (0, 2, True), (0, 2, False), (1, 1, False)]


@pytest.mark.parametrize(
    ("mode", "padding", "align"), [*LINEAR, (1, 0, True), (1, 2, False), (2, 0, True), (2, 2, False)]
)
def test_grid_sampler(check: Callable[..., Any], mode: int, padding: int, align: bool) -> None:
    x, grid = numbers(2, 3, 4, 5), 1.3 * numbers(2, 3, 2, 2)
    check(lambda x, g: aten.grid_sampler_2d(x, g, mode, padding, align), x, grid, fast=True, rtol=1e-5, atol=1e-5)
    if mode != 2:
        x, grid = numbers(2, 2, 3, 4, 5), 1.3 * numbers(2, 2, 1, 3, 3)
        check(lambda x, g: aten.grid_sampler_3d(x, g, mode, padding, align), x, grid, fast=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("mode", "padding", "align"), LINEAR)
def test_backward_of_grid_sampler(check: Callable[..., Any], mode: int, padding: int, align: bool) -> None:
    x, grid, grad = numbers(2, 3, 4, 5), 1.3 * numbers(2, 3, 2, 2), numbers(2, 3, 3, 2)
    settings = (mode, padding, align, [True, True])
    check(lambda *t: aten.grid_sampler_2d_backward(*t, *settings), grad, x, grid, fast=True, rtol=1e-5, atol=1e-5)
    x, grid, grad = numbers(1, 1, 3, 4, 2), 1.3 * numbers(1, 2, 1, 3, 3), numbers(1, 1, 2, 1, 3)
    check(lambda *t: aten.grid_sampler_3d_backward(*t, *settings), grad, x, grid, fast=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_search(check: Callable[..., Any], right: bool, length: int) -> None:
    rows = (numbers(3, length).mul(2).round() / 2).sort(-1).values
    values = torch.cat([rows, numbers(3, 4), torch.tensor([[float("nan"), float("inf")]] * 3)], -1)
    check(lambda r, v: torch.searchsorted(r, v, right=right), rows, values, fast=True)
    check(lambda r, v: torch.bucketize(v, r, right=right, out_int32=True), rows[0].contiguous(), values, fast=True)
    shuffled, order = rows.flip(-1).contiguous(), torch.arange(length).flip(0).repeat(3, 1)
    check(lambda r, v, s: torch.searchsorted(r, v, sorter=s), shuffled, values, order, fast=True)


def test_masked_scatter(check: Callable[..., Any]) -> None:
    x, source = numbers(3, 4), numbers(5, 3)
    mask = torch.tensor([True, False, True, True])
    check(lambda x, m, s: x.masked_scatter(m, s), x, mask, source, fast=True)
    several = numbers(3, 4) > 0
    check(lambda g, m: aten.masked_scatter_backward(g, m, [5, 3]), x, several, fast=True)


def test_nonzero_static(check: Callable[..., Any]) -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [float("nan"), 0.0, -1.0]])
    check(lambda x: [torch.nonzero_static(x, size=n, fill_value=-7) for n in (0, 1, 3, 5)], x, fast=True)
    check(lambda x: [torch.nonzero_static(x, size=2), torch.nonzero_static(x[0, 0], size=2)], x[:, :0].new_zeros(2, 3))
    check(lambda x: [torch.nonzero_static(x, size=2), x.roll(1, 0)], torch.empty(3, 0))


def test_as_strided(check: Callable[..., Any]) -> None:
    x = numbers(4, 6).t()
    check(lambda x: [(x * 2).as_strided((3, 2), (5, 3), 1), x.as_strided((5, 4), (1, 2)), x.as_strided((), ())], x)
    # Where an argument is in its storage is known when it is called.
    check(lambda x: x.as_strided((3, 2), (5, 3), 1), x, library=["aten::as_strided.default"])


def test_powers_of_integers(check: Callable[..., Any]) -> None:
    x = torch.tensor([-3, -2, -1, 0, 1, 2, 3, 17, 0, 2, 3, -3])
    # Exponents of more than 32 bits, whose low bits may all be zero.
    n = torch.tensor([0, 1, 2, 5, 20, 63, 64, 3, 1 << 32, 1 << 40, (1 << 32) + 1, (3 << 33) + 1])
    check(lambda x, n: [x**n, x**20, x.to(torch.int8) ** 3, x.to(torch.uint8) ** n.to(torch.uint8), 3**n], x, n)


def test_parts_and_places(check: Callable[..., Any]) -> None:
    x, part = numbers(3, 4), numbers(3)
    check(lambda x, p: [x.roll(5), x.roll(-1), x.diagonal_scatter(p, 1), x.t().diagonal_scatter(p[:2], -2)], x, part)
    check(lambda x: [x.unfold(0, 1, 1), x.signbit(), x.angle()], torch.tensor(-0.0))
    check(lambda: [torch.tril_indices(4, 3, -1), torch.triu_indices(3, 5, 1)])
    values = torch.tensor([-1.25, 2.345, float("nan"), float("inf"), -0.0, 1234.5])
    check(lambda v: [v.round(decimals=d) for d in (-2, 0, 1, 2)] + [v.signbit(), v.angle(), v.copysign(-2.0)], values)
    check(lambda v: [v.signbit(), v.angle(), v.ldexp(torch.tensor(3))], torch.tensor([-2, 0, 5]))


def test_scatter_into_a_number(check: Callable[..., Any]) -> None:
    x, place, value = torch.tensor(2.5), torch.tensor(0), torch.tensor(4.0)

    def fn(x: torch.Tensor, place: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.scatter_add(0, place, value), x.scatter(0, place, 9.0), x.index_add(0, place, value, alpha=2),
            x.index_fill(0, place[None] - 1, 7.0), x.scatter_reduce(0, place, value, "mean"),
            x.index_reduce(0, place[None], value, "amin", include_self=False),
        ]  # fmt: skip

    check(fn, x, place, value)


def _of_image(mode: int, grad: torch.Tensor, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return aten.grid_sampler_2d_backward(grad, x, grid, mode, 0, False, [True, False])[0]


def test_gradients_of_what_lies_beside_the_image_go_nowhere(check: Callable[..., Any]) -> None:
    """Also where they are no numbers: none of them reaches a pixel."""
    x, grid, grad = numbers(2, 3, 4, 5), numbers(2, 3, 5, 2).clamp(-0.7, 0.7), numbers(2, 3, 3, 5)
    grid[0, 1, 2], grid[1, 0, 0] = torch.tensor([-9.0, 0.1]), torch.tensor([0.2, 7.0])
    grad[0, :, 1, 2], grad[1, :, 0, 0] = float("inf"), float("nan")
    for mode in (0, 1):
        fn = partial(_of_image, mode)
        check(fn, grad, x, grid, fast=True, rtol=1e-5, atol=1e-5)
