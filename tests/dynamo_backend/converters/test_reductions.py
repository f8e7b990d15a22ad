"""Reductions, softmax and norms equal eager, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_mlc

NAN, INF = float("nan"), float("inf")

REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True)),
    "sum_dtype": lambda x: x.sum(0, dtype=torch.float64),
    "mean": lambda x: (x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True)),
    "prod": lambda x: (x.prod(), x.prod(1, keepdim=True)),
    "amax": lambda x: (x.amax(1), x.amin((0, 2), keepdim=True), x.max(), x.min()),
    "max_dim": lambda x: (*x.max(1), *x.min(-1, keepdim=True)),
    "max_values": lambda x: x.max(1).values,
    "argmax": lambda x: (x.argmax(), x.argmax(1), x.argmin(2, keepdim=True)),
    "any": lambda x: ((x > 1).any(), (x > 1).any(1), (x > -1).all(2, keepdim=True), x.any(0)),
    "var": lambda x: (x.var(), x.var(1), x.std((0, 2), correction=0, keepdim=True)),
    "var_mean": lambda x: torch.var_mean(x, 1, correction=0),
    "norm": lambda x: (x.norm(), x.norm(1, 1), x.norm(2, -1, keepdim=True), x.norm(INF, 0), x.norm(0, 1), x.norm(3, 1)),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)),
    "softmax": lambda x: (x.softmax(1), x.softmax(-1), x.log_softmax(0)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(check: Callable[..., Any], name: str, dynamic: bool) -> None:
    check(REDUCTIONS[name], torch.randn(3, 5, 7), dynamic=dynamic)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_halves(check: Callable[..., Any], name: str) -> None:
    if name == "sum_dtype":
        pytest.skip("the result is no half")
    check(REDUCTIONS[name], torch.randn(3, 5, 2).to(torch.bfloat16), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "max_dim", "argmax", "softmax", "any", "var"])
def test_special_values(check: Callable[..., Any], name: str) -> None:
    x = torch.tensor([1.0, -INF, NAN, 2.0, INF, 2.0, -1.0, 0.0, 5.0, 5.0, -INF, -INF]).reshape(2, 3, 2)
    check(REDUCTIONS[name], x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_reductions_of_integers(check: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2, 3], [3, 3, 1, 0], [200, 100, 7, 5]]).to(dtype)
    check(lambda x: (x.sum(), x.sum(1), x.prod(1), x.amax(0), x.any(1), x.all(0), x.max(), x.min()), x)
    check(lambda x: (x.max(1).indices, x.max(1).values), x)


def test_zero_size_and_zero_dim(check: Callable[..., Any]) -> None:
    check(lambda x: (x.sum(), x.sum(1), x.prod(1), x.mean(1), x.any(1), x.all(1)), torch.randn(3, 0))
    check(lambda x: (x.sum(1), x.amax(1), x.mean(0)), torch.randn(0, 3))
    check(lambda x: (x.sum(0), x.argmax(0), *x.max(0), x.softmax(0), x.var(2)), torch.randn(2, 0, 3))
    check(lambda x: (x.sum(), x.mean(0), x.amax(), x.argmax(), x.softmax(0), *x.max(0)), torch.tensor(2.5))
    check(lambda x: (x.sum(1, keepdim=True), x.var(0, correction=0), x.argmax(1)), torch.randn(3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_equal_elements_do_not_deviate(check: Callable[..., Any], dtype: torch.dtype) -> None:
    """Exactly, whatever their mean is rounded to; nor is there one where there are too few, or none that is finite."""
    rows = torch.tensor([0.1, 3.3, -1e20, 1e-30, 7.0, INF, -INF, NAN, 0.0], dtype=dtype)
    for n in (1, 2, 31, 100):
        x = rows[:, None].repeat(1, n)
        check(lambda x: (x.std(1), x.T.std(0), x.std(1, correction=0), x.std(1, correction=3)), x, fast=True)
        x = torch.randn(5, n).to(dtype) + 100
        check(lambda x: (x.std(1, correction=0), x.std(0)), x, fast=True, rtol=2e-2, atol=1e-6)


def weights(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randn(*shape)


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The form that AOTAutograd traces; called as F.batch_norm the statistics would be mutated.
    return torch.ops.aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0]


NORMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], int]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (2, 4, 6), 6),
    "layer_norm_plain": (lambda x, w, b: F.layer_norm(x, (4, 6)), (2, 4, 6), 6),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (6,), w), (2, 4, 6), 6),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 6, 3, 2), 6),
    "group_norm_plain": (lambda x, w, b: F.group_norm(x, 3), (2, 6, 5), 6),
    "group_norm_of_channels": (lambda x, w, b: F.group_norm(x, 6, w, b), (2, 6, 5), 6),
    "group_norm_of_vectors": (lambda x, w, b: F.group_norm(x, 1, w, b), (2, 6), 6),
    "batch_norm": (batch_norm, (4, 6, 3, 2), 6),
    "batch_norm_1d": (batch_norm, (5, 6), 6),
    "softmax": (lambda x, w, b: x.softmax(1) * w, (2, 4, 6), 6),
    "log_softmax": (lambda x, w, b: x.log_softmax(-1) * w, (2, 4, 6), 6),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms(check: Callable[..., Any], name: str, dynamic: bool) -> None:
    fn, shape, channels = NORMS[name]
    check(fn, torch.randn(shape), *weights(channels), dynamic=dynamic, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norm_backward_visits_its_inputs_twice(
    memory_format: torch.memory_format,
) -> None:
    x = torch.randn(4, 32, 33, 31).to(memory_format=memory_format).requires_grad_()
    parts = [torch.randn(32, requires_grad=True) for _ in range(2)]
    report = torch_mlc.explain(lambda x, w, b: F.group_norm(x, 8, w, b), x, *parts, training=True)
    backward = report.graphs[1].traffic
    assert backward is not None and backward.moved < 5.1 * x.numel() * 4


@pytest.mark.parametrize("name", NORMS)
def test_norms_backward(check: Callable[..., Any], name: str) -> None:
    fn, shape, channels = NORMS[name]

    def gradient(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        return [t for t in torch.autograd.grad(fn(*leaves), leaves, g, allow_unused=True) if t is not None]

    check(gradient, torch.randn(shape), *weights(channels), torch.randn(shape), rtol=1e-4, atol=1e-5)


def test_norms_of_halves(check: Callable[..., Any]) -> None:
    x, w, b = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16(), torch.randn(8).bfloat16()
    check(lambda x, w, b: (F.layer_norm(x, (8,), w, b), x.softmax(-1)), x, w, b, rtol=2e-2, atol=2e-2)


def test_batch_norm_in_evaluation_and_running_statistics(check: Callable[..., Any]) -> None:
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3) + 0.5
    w, b = weights(3)
    evaluate = torch.ops.aten._native_batch_norm_legit_no_training.default
    check(lambda x, m, v, w, b: evaluate(x, w, b, m, v, 0.1, 1e-5)[0], x, mean, var, w, b, rtol=1e-4, atol=1e-5)
    op = torch.ops.aten._native_batch_norm_legit_functional.default
    check(lambda x, m, v, w, b: op(x, w, b, m, v, True, 0.1, 1e-5), x, mean, var, w, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["amax", "max", "norm", "least", "threshold", "product"])
def test_values_are_compared_as_they_are_rounded(how: str, dtype: torch.dtype) -> None:
    """Backwards compute a row again to see which of its elements are the largest, which was rounded; and so may the
    program itself."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 1.7
        match how:
            case "amax":
                return y.amax(-1).sum()
            case "max":
                return F.gelu(y).max()
            case "norm":
                return torch.linalg.vector_norm(y, INF, dim=0).sum()
            case "least":
                return torch.erf(y)[:, 1:].amin(0).sum()
            case "product":  # which loops of ours compute
                return (y[:, :1] @ y[:1] * 0.5 @ y[:1].t()).amax(-1).sum() + (y[:, :1] @ y[:1]).amax(-1).sum()
        kept = y.view(-1, 9) >= y.topk(3, -1).values[:, -1:]
        return torch.where(kept, y, 0.0).sum()

    x = torch.randn(12, 9, generator=torch.Generator().manual_seed(3)).to(dtype)
    mine, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(loss, backend="mlc")(mine).backward()
    loss(eager).backward()
    torch.testing.assert_close(mine.grad, eager.grad, rtol=2e-2, atol=1e-2)
    assert torch.equal(mine.grad == 0, eager.grad == 0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_hashes_are_bit_for_bit_eagers(check: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    """And kernels: of numbers, NaN and infinities, zeros of both signs, and no rows."""
    torch._dynamo.reset()

    def hashes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.hash_tensor(x), torch.hash_tensor(x, 1), torch.hash_tensor(x, (0, 2), keepdim=True)

    x = torch.randn(3, 7, 35) * 50
    x.view(-1)[:5] = torch.tensor([NAN, INF, -INF, 0.0, -0.0])
    x = x.nan_to_num(1, 2, 3).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    for given in (x, x.transpose(0, 2), x[:, :, 1:3]):
        for a, b in zip(torch.compile(hashes, backend="mlc", dynamic=dynamic)(given), hashes(given), strict=True):
            assert a.dtype is torch.uint64 and torch.equal(a.view(torch.int64), b.view(torch.int64))
    assert torch.compile(lambda x: torch.hash_tensor(x, 1), backend="mlc")(x[:0]).shape == (0, 35)
    check(lambda x: torch.hash_tensor(x, 1), x[:, :3, :2])
    assert not torch_mlc.explain(hashes, x).graphs[0].libraries
