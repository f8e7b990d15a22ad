"""Softmaxes that models write out, with a sink or without, in inference and in training: one kernel forward, and
gradients as in float64, that of the sink among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_mlc
from torch_mlc.runtime.counters import counters

Fn = Callable[..., Tensor]


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def joined(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """As gpt-oss writes it: a column for the sink, the largest subtracted, and the column dropped."""
    m, n = _positions(q, k)
    scores = q @ k.mT * 0.25
    scores = scores + torch.where(n > m, float("-inf"), 0.0).to(scores.dtype)
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    logits = torch.cat([scores, column], -1)
    logits = logits - logits.max(-1, keepdim=True).values
    return torch.softmax(logits, -1, dtype=logits.dtype)[..., :-1].to(v.dtype) @ v


def in_front(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """One of a batch, before the scores, in float32; a window empties rows."""
    m, n = _positions(q, k)
    scores = (q @ k.mT / 4).masked_fill((n - m).abs() > 6, float("-inf"))
    logits = torch.cat([sink[None, :, None, None].expand(*scores.shape[:-1], 1), scores], -1)
    return torch.softmax(logits.float(), -1)[..., 1:].to(v.dtype) @ v


def added(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Without a column: its exponential is added to the sum."""
    scores, sink = q @ k.mT / 4, sink[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top)) @ v


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax off by one: a sink of zero."""
    scores = q @ k.mT * 0.25
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = torch.exp(scores - top)
    return weights / (torch.exp(-top) + weights.sum(-1, keepdim=True)) @ v


def one_more_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = _positions(q, k)
    scores = (q @ k.mT / 4).masked_fill(n > m, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return weights * (torch.exp(-top) + weights.sum(-1, keepdim=True)).reciprocal() @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, n = _positions(q, k)
    scores = (q @ k.mT * 0.25).masked_fill(n > m, float("-inf"))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ v


def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT / 8) * 4
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values.detach())
    return (weights / weights.sum(-1, keepdim=True)) @ v


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of keys and values for four of queries."""
    k, v = (x[:, :2, None].expand(-1, 2, 2, -1, -1).reshape(x.shape[0], 4, -1, x.shape[-1]) for x in (k, v))
    return plain(q, k, v)


SINKS, ALONE = (joined, in_front, added), (one_more, one_more_below, plain, detached, repeated)


def inputs_of(fn: Fn, m: int = 37, n: int = 37, d: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = [torch.randn(2, 4, rows, d).to(dtype) for rows in (m, n, n)]
    return [*made, torch.randn(4).to(dtype)] if fn in SINKS else made


def gradients(fn: Fn, inputs: list[Tensor], flow: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    out.backward(flow.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(fn: Fn, inputs: list[Tensor], compiled: Fn, tolerance: float) -> None:
    flow = torch.randn(fn(*inputs).shape).to(inputs[0].dtype)
    expected = gradients(fn, [x.double() for x in inputs], flow.double())
    for a, b in zip(gradients(compiled, inputs, flow), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(*inputs).double(), expected[0], rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("fn", [*SINKS, *ALONE], ids=lambda f: f.__name__)
def test_as_in_float64(fn: Fn) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.reset()
    check(fn, inputs_of(fn), torch.compile(fn, backend="mlc", dynamic=False), 1e-5)
    assert counters["library_calls"] == 0


@pytest.mark.parametrize("fn", [joined, one_more, pytest.param(plain, marks=pytest.mark.slow)])
def test_lengths_that_vary(fn: Fn) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.reset()
    compiled = torch.compile(fn, backend="mlc")

    def of_any_length(*inputs: Tensor) -> Tensor:
        for x in inputs[:3]:
            torch._dynamo.maybe_mark_dynamic(x, 2)
        return compiled(*inputs)

    check(fn, inputs_of(fn, 37, 70), of_any_length, 1e-5)
    check(fn, inputs_of(fn, 50, 41), of_any_length, 1e-5)
    assert counters["library_calls"] == 0


@pytest.mark.parametrize("fn", [joined, added, plain], ids=lambda f: f.__name__)
def test_half_types(fn: Fn) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    check(fn, inputs_of(fn, dtype=torch.bfloat16), torch.compile(fn, backend="mlc"), 4e-2)


@pytest.mark.parametrize("sink", [0.0, 300.0, -300.0, float("inf"), float("-inf"), float("nan")], ids=str)
def test_sinks_beside_all_measure(sink: float) -> None:
    """Rows that see nothing are zeros while the sink is finite, and NaN where all is minus infinity."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = inputs_of(in_front, m=50)
    inputs[3][1] = sink
    compiled = torch.compile(in_front, backend="mlc")
    with torch.no_grad():
        expected = in_front(*(x.double() for x in inputs))
        torch.testing.assert_close(compiled(*inputs).double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if abs(sink) < 1000:
        check(in_front, inputs, compiled, 1e-5)


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), -1e30, 1e30], ids=str)
@pytest.mark.parametrize("fn", [joined, one_more], ids=lambda f: f.__name__)
def test_odd_scores(fn: Fn, odd: float) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = inputs_of(fn)
    inputs[0][0, 1, 7] = odd
    with torch.no_grad():
        got = torch.compile(fn, backend="mlc")(*inputs)
        torch.testing.assert_close(got, fn(*inputs), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("fn", [*SINKS, *ALONE], ids=lambda f: f.__name__)
def test_launches_on_a_gpu(fn: Fn) -> None:
    """One forward and two backward; one more sums the gradient of a sink over the rows. No matrix of scores is read
    or written, and so each moves no more than its operands and its results."""
    made = inputs_of(fn, 256, 256, 64, torch.bfloat16)
    report = torch_mlc.explain(fn, *(x.requires_grad_() for x in made), training=True, target="cuda:sm_90")
    forward, backward = report.graphs
    assert [k.rule for k in forward.kernels] == ["gpu_attention"], str(report)
    assert [k.rule for k in backward.kernels].count("gpu_attention_gradients") == 2, str(report)
    more = 1 if fn in SINKS else 2 if fn is repeated else 0
    assert backward.launches == 2 + more and not forward.libraries and not backward.libraries, str(report)


def stopped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No gradient through the sum: not a softmax's."""
    weights = torch.exp(q @ k.mT / 4)
    return weights / weights.sum(-1, keepdim=True).detach() @ v


def one_beside_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is added does not move with what is subtracted, so that a gradient flows through the largest score."""
    scores = q @ k.mT / 4
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


def half_of_it_stopped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(-top.detach())) @ v


def sink_is_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.cat([q @ k.mT / 4, torch.zeros(2, 4, q.shape[-2], 1)], -1)
    weights = torch.softmax(logits, -1)
    return weights[..., :-1] @ v * (1 + weights[..., -1:])


def rows_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.cat([q @ k.mT / 4, v[..., :1] * 0.5], -1)
    return torch.softmax(logits, -1)[..., 1:] @ v


@pytest.mark.parametrize(
    "fn", [stopped, one_beside_the_largest, half_of_it_stopped, sink_is_read, rows_apart], ids=lambda f: f.__name__
)
def test_what_is_alike_and_no_softmax_with_a_sink(fn: Fn) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    check(fn, inputs_of(fn), torch.compile(fn, backend="mlc"), 1e-5)
