"""Gathers, losses, pooling, resizing and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Library, Scatter


def labels(*shape: int, classes: int = 5) -> torch.Tensor:
    return torch.randint(0, classes, shape)


def gradient_of(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The gradient of ``fn`` in its first argument, for a fixed gradient of the result."""

    def gradient(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = fn(x, *rest)
        return torch.autograd.grad((y * y.detach().cos()).sum(), x)

    return gradient


@pytest.mark.parametrize("dynamic", [False, True])
def test_gathers(check: Callable[..., Any], dynamic: bool) -> None:
    w, i = torch.randn(5, 3), labels(2, 4)
    check(lambda w, i: F.embedding(i, w), w, i, dynamic=dynamic)
    check(lambda w, i: (w[i], w[i - 5], w[i, 1], w[:, i % 3], w[i[0] % 3, i[1] % 3]), w, i, dynamic=dynamic)
    check(
        lambda w, i: (w.index_select(0, i[0]), w.gather(0, i[:, :3]), w.gather(1, i[:, :2] % 3)), w, i, dynamic=dynamic
    )
    check(lambda w, i: w.take_along_dim(i[:, :3], 0), w, i, dynamic=dynamic)
    x = torch.randn(2, 3, 4, 5)
    check(lambda x, i: (x[:, i % 3, :, i % 5], x[:, :, i % 4], x[i % 2, None, 1]), x, i[0], dynamic=dynamic)


def test_integer_types_of_indices(check: Callable[..., Any]) -> None:
    check(lambda w, i: (F.embedding(i, w), w[i]), torch.randn(5, 3).bfloat16(), labels(2, 4).int())


def test_scatters_of_one_element_a_row(check: Callable[..., Any]) -> None:
    x, i = torch.randn(4, 5), labels(4, 1)
    check(lambda x, i: (x.scatter(1, i, 2.0), x.scatter(1, i, x[:, :1]), x.scatter_add(1, i, x[:, 1:2])), x, i)
    graph = check(lambda x, i: (x.scatter(1, i, 2.0), x.scatter(1, i[:, :1], 2.0)), x, labels(4, 2))
    assert sum(isinstance(n, Scatter) for n in graph.nodes) == 1


def test_masked_assignment(check: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y > 0] = -1.0
        return y

    check(fn, torch.randn(4, 5))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(check: Callable[..., Any], reduction: str, weighted: bool) -> None:
    def fn(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t, w if weighted else None, ignore_index=2, reduction=reduction)

    for x, t in ((torch.randn(6, 5), labels(6)), (torch.randn(2, 5, 3, 2), labels(2, 3, 2))):
        w = torch.rand(5)
        check(fn, x, t, w)
        check(gradient_of(fn), x, t, w)


def test_other_losses(check: Callable[..., Any]) -> None:
    x, y = torch.randn(4, 3), torch.rand(4, 3)
    losses = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
    check(lambda x, y: [f(x, y) for f in losses], x, y)
    for f in losses:
        check(gradient_of(f), x, y)


POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_3_2_1": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_2": lambda x: F.max_pool2d(x, 2),
    "max_overlap_dilated": lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2),
    "max_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "avg_2": lambda x: F.avg_pool2d(x, 2),
    "avg_3_2_1": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_no_pad_count": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive_1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_3": lambda x: F.adaptive_avg_pool2d(x, (7, 2)),
    "nearest_2": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_23": lambda x: F.interpolate(x, scale_factor=(2.0, 3.0)),
    "nearest_size": lambda x: F.interpolate(x, size=(10, 4)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}
NO_BACKWARD = ("nearest_size", "bilinear")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_pooling(check: Callable[..., Any], name: str, dynamic: bool) -> None:
    if dynamic and name.startswith(("adaptive_3", "bilinear")):
        pytest.skip("symbolic sizes")
    check(POOLS[name], torch.randn(2, 3, 7, 6), dynamic=dynamic, fast=True)


@pytest.mark.parametrize("name", [n for n in POOLS if n not in NO_BACKWARD])
def test_pooling_backward(check: Callable[..., Any], name: str) -> None:
    check(gradient_of(POOLS[name]), torch.randn(2, 3, 7, 6), fast=True)


def test_max_pool_indices(check: Callable[..., Any]) -> None:
    x = torch.tensor([1.0, 1.0, float("nan"), 0.0, 2.0, 2.0, -float("inf"), -1.0, 1.0]).reshape(1, 1, 3, 3)
    check(lambda x: F.max_pool2d(x, 2, 1, return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), torch.randn(2, 3, 7, 6))


# --- random numbers
# -----------------------------------------------------------------------------------------------------


def test_random_numbers_have_the_right_distribution(reference: Any, trace: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        return torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x, 0.25), torch.randint(2, 9, (2000,))

    x = torch.empty(2000)
    graph = import_graph(trace(fn, (x,)), (x,))
    seeds = [n for n in graph.nodes if isinstance(n, Library)]
    assert [n.target for n in seeds] == ["mlc::seeds"] and seeds[0].args[0] == 4 and graph.nodes[0] is seeds[0]
    uniform, normal, coin, whole = reference.run_fast(graph, (x,))
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert abs(normal.mean()) < 0.06 and abs(normal.std() - 1) < 0.06
    assert abs(coin.mean() - 0.25) < 0.03 and set(coin.tolist()) == {0.0, 1.0}
    assert set(whole.tolist()) == set(range(2, 9))
    assert (uniform != normal).any()


def test_dropout_keeps_and_scales(reference: Any, trace: Any) -> None:
    x = torch.rand(1000) + 0.5
    graph = import_graph(trace(lambda x: torch.native_dropout(x, 0.25, True), (x,)), (x,))
    y, mask = reference.run_fast(graph, (x,))
    assert abs(mask.float().mean() - 0.75) < 0.05
    torch.testing.assert_close(y, x * mask / 0.75)


def test_fallback_random_leaves_the_op_to_aten(trace: Any) -> None:
    x = torch.empty(4)
    graph = import_graph(trace(torch.rand_like, (x,)), (x,), fallback_random=True)
    assert [n.target for n in graph.nodes if isinstance(n, Library)] == ["aten::rand_like.default"]


def test_a_single_place_is_taken(check: Callable[..., Any]) -> None:
    check(
        lambda x, i, k: [torch.take(x, i), torch.take(x, k)],
        torch.randn(3, 4),
        torch.tensor(7),
        torch.tensor([[-1, 0]]),
    )
