"""Cross-entropy in training: gradients of float64, logits read once each way, log-probabilities never in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture

WEIGHT = torch.linspace(0.5, 2, 9)
LOSSES = {
    "mean": lambda x, t: F.cross_entropy(x, t),
    "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "ignore": lambda x, t: F.cross_entropy(x, t, ignore_index=3),
    "weighted": lambda x, t: F.cross_entropy(x, t, WEIGHT.to(x.dtype)),
    "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "log_softmax too": lambda x, t: F.cross_entropy(x, t) + (x.log_softmax(1) * 0.5).exp().mean(),
}


@pytest.mark.parametrize(("loss", "shape", "dtype"), [
    *((loss, (7, 9), torch.float32) for loss in LOSSES),
    *((loss, (7, 9), torch.bfloat16) for loss in ("mean", "weighted")),
    *((loss, (2, 9, 3, 5), torch.float32) for loss in ("mean", "weighted", "smoothed")),
], ids=str)  # fmt: skip
def test_loss_and_gradient(loss: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function = LOSSES[loss]
    x = torch.randn(shape).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    t = torch.randint(9, (shape[0], *shape[2:]))
    torch._dynamo.reset()
    found, wanted = torch.compile(function, backend="mlc")(x, t), function(exact, t)
    found.float().sum().backward()
    wanted.sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    assert x.grad is not None and exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, **tolerance)


@pytest.mark.parametrize("target", [None, "cuda:sm_90"], ids=["cpu", "gpu"])
def test_logits_are_read_once_each_way(target: str | None) -> None:
    head = torch.nn.Linear(16, 50257, bias=False)

    def step(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), t)

    x, t = torch.randn(256, 16, requires_grad=True), torch.randint(50257, (256,))
    report = torch_mlc.explain(step, x, t, training=True, target=target, options={"loss_chunk": 0})
    logits = 256 * 50257 * 4
    forward, backward = (
        [v for k in g.kernels if k.traffic for v in k.traffic.arrays.values() if v.touched > 0.99 * logits]
        for g in report.graphs
    )
    # A row stays in the cache of a CPU, and is visited there twice. Who multiplies, writes them: in blocks of rows,
    # which are read from a cache alone.
    assert forward and sum(v.read for v in forward) < logits * (1.01 if target else 2.01)
    assert 0 < sum(v.read for v in backward) < 1.01 * logits
    assert 0 < sum(v.written for v in backward) < 1.01 * logits


def test_log_probabilities_that_are_results_stay_whole() -> None:
    x = torch.randn(6, 9, requires_grad=True)
    forward, _ = capture(lambda x: x.log_softmax(1), [x], training=True)
    assert "aten._log_softmax.default" in [str(n.target) for n in forward.graph.nodes]
