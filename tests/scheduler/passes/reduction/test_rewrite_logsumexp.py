"""Sums of exponentials that wait for their row's maximum become one log-sum-exp, however they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, IRModule, Reduction
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import eliminate_dead, rewrite_logsumexp


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def plain(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def scaled_after(x: Tensor) -> Tensor:
    """The maximum is of other values than the exponentials."""
    e = (0.125 * (x - x.amax(-1, keepdim=True))).exp()
    return e / e.sum(-1, keepdim=True)


def expectation(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return (e * x).sum(-1) / e.sum(-1)


def entropy(x: Tensor) -> Tensor:
    """The maximum and the logarithm of the sum are taken off."""
    log_p = x - x.amax(-1, keepdim=True)
    log_p = log_p - log_p.exp().sum(-1, keepdim=True).log()
    return (log_p.exp() * x).sum(-1)


def over_two_axes(x: Tensor) -> Tensor:
    e = (x - x.amax((1, 2), keepdim=True)).exp()
    return e / e.sum((1, 2), keepdim=True)


def negative(x: Tensor) -> Tensor:
    e = (-(x.amin(-1, keepdim=True).neg() + x)).exp()
    return e.sum(-1)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "softmax": (softmax, 1),
    "softmax over columns": (lambda x: x.softmax(0), 1),
    "log softmax": (lambda x: x.log_softmax(-1), 1),
    "logsumexp": (lambda x: x.logsumexp(-1), 1),
    "plain": (plain, 1),
    "scaled after": (scaled_after, 1),
    "expectation": (expectation, 2),
    "entropy": (entropy, 2),
    "over two axes": (over_two_axes, 1),
    "negative": (negative, 1),
    "of a function": (lambda x: (x.tanh() * 3 + x[:, :1]).softmax(-1), 1),
    "of a half type": (lambda x: x.bfloat16().softmax(-1).float(), 1),
}


def imported(function: Callable[[Tensor], Tensor], x: Tensor) -> Graph:
    (gm,) = capture(function, [x])
    return import_graph(gm)


def monoids(graph: Graph) -> list[str]:
    return [n.monoid.name for n in graph.nodes if isinstance(n, Reduction)]


def run(graph: Graph, x: Tensor) -> np.ndarray:
    (name,) = (i.name for i in graph.inputs)
    with np.errstate(all="ignore"):
        (result,) = run_graph(graph, {name: x.numpy()}, {}).values()
    return result


@pytest.mark.parametrize("form", FORMS)
def test_keeps_the_meaning(form: str) -> None:
    torch.manual_seed(0)
    function, count = FORMS[form]
    x = torch.randn((9, 7, 3) if "two" in form else (9, 7))
    graph = imported(function, x)
    changed = eliminate_dead(rewrite_logsumexp(graph, always=True))
    verify(IRModule({"main": changed}))
    assert monoids(changed).count("logsumexp") == count and "sum" not in monoids(changed)
    for k, special in enumerate((0.0, float("inf"), -float("inf"), float("nan"))):
        x[2 * k, 2] = special
        x[2 * k + 1] = special
        tolerance = 1e-2 if "half" in form else 1e-5
        np.testing.assert_allclose(run(changed, x), run(graph, x), rtol=tolerance, atol=1e-6)


def test_a_maximum_of_the_same_values_is_part_of_the_state() -> None:
    changed = eliminate_dead(rewrite_logsumexp(imported(plain, torch.randn(5, 7)), always=True))
    assert monoids(changed) == ["logsumexp"]
    one_row = eliminate_dead(rewrite_logsumexp(imported(plain, torch.randn(1, 7)), always=True))
    assert monoids(one_row) == ["logsumexp"]


def test_a_sum_that_waits_for_nothing_stays() -> None:
    for function in (
        lambda x: x.exp().sum(-1),
        lambda x: (x - x[:, :1]).exp().sum(-1),
        lambda x: (x - x.amax()).sum(-1),
    ):
        graph = imported(function, torch.randn(5, 7))
        assert rewrite_logsumexp(graph, always=True) is graph


def far_below(x: Tensor) -> Tensor:
    """All that has a weight is far below the greatest score."""
    return ((x - x.mean(-1, keepdim=True)).exp() * (x < -20)).sum(-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((x - x.amax(-1, keepdim=True)) * 50.3).exp().sum(-1),
        lambda x: ((x - x.mean(-1, keepdim=True)) * x.var(-1, keepdim=True).rsqrt()).exp().sum(-1),
        lambda x: ((x - x.amax(-1, keepdim=True)) + x.sin()).exp().sum(-1),
        far_below,
        lambda x: ((x - x.amax(-1, keepdim=True) / 2).exp() * x).sum(-1),
        lambda x: ((x + x.amax(-1, keepdim=True)).exp() * x).sum(-1),
    ],
    ids=["scaled", "normalized", "added", "far below", "half of the maximum", "the maximum added"],
)
def test_sums_that_would_lose_digits_stay(function: Callable[[Tensor], Tensor]) -> None:
    """Scores that something was taken off first are small; as they were, their digits end too early."""
    graph = imported(function, torch.randn(5, 7))
    assert rewrite_logsumexp(graph, always=True) is graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((x - x.amax(-1, keepdim=True)) * 50.3).softmax(-1),
        lambda x: ((x - x.mean(-1, keepdim=True)) * (x.amax(-1, keepdim=True) - 9990).rsqrt()).softmax(-1),
        lambda x: ((x - x.mean(-1, keepdim=True)) - x.std(-1, keepdim=True) / 3).exp().sum(-1, keepdim=True) + x * 0,
        softmax,
        scaled_after,
    ],
    ids=["scaled", "normalized", "twice", "softmax", "scaled after"],
)
def test_long_rows_far_from_zero_are_as_precise_as_eager(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 140_000) + 1e4
    got, wanted = torch.compile(function, backend="mlc", options={"cache": False})(x), function(x.double())
    eager = ((function(x) - wanted) / wanted).abs().max()
    assert ((got - wanted) / wanted).abs().max() <= 4 * eager + 1e-6


def test_weights_of_what_is_far_below_the_rest_count() -> None:
    x = torch.randn(2, 140_000)
    x[:, :1000], x[:, 1000:2000] = 60.0, -60.0

    def function(x: Tensor) -> Tensor:
        return far_below(x)[:, None] + x * 0

    result = torch.compile(function, backend="mlc", options={"cache": False})(x)
    torch.testing.assert_close(result, function(x), rtol=1e-4, atol=0)


def on_gpu(graph: Graph) -> Graph:
    """The same graph for a GPU."""

    def moved(t: object) -> object:
        return replace(t, device="cuda:0")  # type: ignore[type-var]

    nodes = [
        replace(n, types=tuple(map(moved, n.types))) if isinstance(n, Reduction) else replace(n, type=moved(n.types[0]))
        for n in graph.nodes
    ]
    inputs = [replace(i, type=moved(i.type)) for i in graph.inputs]
    return replace(graph, nodes=tuple(nodes), inputs=tuple(inputs))


@pytest.mark.parametrize(("shape", "cpu", "gpu"), [
    ((512, 4096), False, False), ((512, 50257), False, True), ((512, 200_000), True, True), ((1, 32768), False, True),
])  # fmt: skip
def test_rows_that_stay_near_are_visited_again(shape: tuple[int, ...], cpu: bool, gpu: bool) -> None:
    graph = imported(softmax, torch.empty(shape))
    assert ("logsumexp" in monoids(rewrite_logsumexp(graph))) == cpu
    assert ("logsumexp" in monoids(rewrite_logsumexp(on_gpu(graph)))) == gpu
