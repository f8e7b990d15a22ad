"""What is computed of numbers alone: a fill where it is one number, else kept where that spares work; never both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_mlc


def run(f: Callable[..., Any], *inputs: Any, **how: Any) -> Any:
    """The compiled function, called twice: the second call has values that were kept."""
    compiled = torch.compile(f, backend="mlc", **how)
    compiled(*inputs)
    return compiled(*inputs)


def table(x: Tensor) -> Tensor:
    """Rotary tables as models write them."""
    angles = torch.outer(torch.arange(33.0), 1 / 10000 ** (torch.arange(0, 10, 2).float() / 10))
    return x * torch.cat([angles.cos(), angles.sin()], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_reduction_of_numbers_is_a_fill(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.full((7, 5), 3, dtype=dtype)
        return x * ones.sum(), ones.amax(1), torch.full((4,), 3.0).exp().sum().to(dtype)

    x = torch.randn(5)
    for got, wanted in zip(run(f, x), f(x), strict=True):
        assert got.dtype is wanted.dtype and got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
    graph = torch_mlc.explain(f, x).graphs[0]
    assert not graph.frozen and not graph.libraries
    assert all(k.rule == "cpu_pointwise" for k in graph.kernels)


def test_special_numbers_stay_what_they_are() -> None:
    def f(x: Tensor) -> Tensor:
        numbers = [torch.full((3,), n).amax() for n in (float("nan"), float("inf"), float("-inf"), -0.0)]
        return torch.stack([1 / (x + n) for n in numbers])

    x = torch.tensor([-0.0, 1.0, float("inf")])
    assert torch.equal(run(f, x).nan_to_num(7.0), f(x).nan_to_num(7.0))


def test_tables_are_computed_once() -> None:
    x = torch.randn(2, 33, 10)
    torch.testing.assert_close(run(table, x), table(x))
    graph = torch_mlc.explain(table, x).graphs[0]
    (kept,) = graph.frozen
    assert (kept.size, kept.stride, kept.dtype, kept.calls > 4) == ((33, 10), (10, 1), torch.float32, True)
    assert graph.launches == 1 and "keeps 1.3 KiB between calls" in str(graph)
    assert torch_mlc.explain(table, x, target="cuda:sm_90").graphs[0].frozen == graph.frozen


def test_weights_and_places_of_many_steps_are_tables_on_cpus() -> None:
    def f(x: Tensor) -> Tensor:
        return F.interpolate(x, (20, 30), mode="bilinear", antialias=True)

    x = torch.randn(2, 3, 50, 70)
    torch.testing.assert_close(run(f, x), f(x))
    assert {t.dtype for t in torch_mlc.explain(f, x).graphs[0].frozen} == {torch.float32, torch.int64}
    graph = torch_mlc.explain(f, x, target="cuda:sm_90").graphs[0]
    assert {t.dtype for t in graph.frozen} == {torch.float32}


def test_whole_numbers_that_are_no_places_stay_computed() -> None:
    def f(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[-1])
        near = ((i[:, None] * 3 + 1) * 2 - (i * 3 + 1) * 2).clamp(-3, 3) + 5
        return torch.where((near * 2 - 7 > 0) & (near < 8), x, -torch.inf) * near

    x = torch.randn(4, 5, 9, 9)
    torch.testing.assert_close(run(f, x), f(x))
    assert not torch_mlc.explain(f, x).graphs[0].frozen


def test_what_a_kernel_counts_for_nothing_is_never_read() -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.full((9, 9), float("-inf")).triu(1)
        return x + mask + torch.arange(9.0) * 2 + torch.eye(9) + torch.ones(9, 9)

    x = torch.randn(9, 9)
    torch.testing.assert_close(run(f, x), f(x))
    graph = torch_mlc.explain(f, x).graphs[0]
    assert not graph.frozen and graph.launches == 1 and graph.moved == 2 * x.nbytes


def test_results_belong_to_the_caller() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        scan = torch.full((6,), 2.0).cumsum(0)
        return x * scan.sum(), scan[1:]

    compiled = torch.compile(f, backend="mlc")
    x = torch.randn(3)
    compiled(x)[1].add_(1)
    assert torch.equal(compiled(x)[1], f(x)[1])


def test_random_numbers_and_sizes_that_vary_are_computed_at_each_call() -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.rand(4).exp() + torch.arange(x.shape[0]).float().exp().sum()

    compiled = torch.compile(f, backend="mlc", dynamic=True)
    torch.manual_seed(0)
    first, second = compiled(torch.zeros(4)), compiled(torch.zeros(4))
    assert not torch.equal(first, second)
    big = compiled(torch.zeros(8, 1)).amax()
    assert big > torch.arange(8).float().exp().sum()


def test_gradients_pass_tables() -> None:
    x, y = (torch.ones(1, 33, 10, requires_grad=True) for _ in range(2))
    run(table, x).square().sum().backward()
    table(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_what_torch_refuses_to_compute_is_refused_by_the_call() -> None:
    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bicubic")

    def clamped(x: Tensor) -> Tensor:
        return x * x.new_ones(3, 3).clamp(0).sum()

    x = torch.randn(1, 2, 4, 4, dtype=torch.complex64)
    for f in (resized, clamped):
        for call in (f, torch.compile(f, backend="mlc")):
            with pytest.raises(NotImplementedError):
                call(x)
