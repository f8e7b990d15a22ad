"""Batch norm in training: running statistics are written where they are, by the kernel that computes them."""

from __future__ import annotations

import torch

from torch_mlc.runtime.counters import counters


def test_running_statistics_are_written_in_place() -> None:
    torch.manual_seed(0)
    model, again = (torch.nn.Sequential(torch.nn.BatchNorm2d(6), torch.nn.ReLU()) for _ in range(2))
    torch._dynamo.reset()
    compiled, before = torch.compile(model, backend="mlc", options={"cache": False}), counters.snapshot()
    for k in range(3):
        x = torch.randn(5, 6, 7, 3) + k
        given = [x.clone().requires_grad_() for _ in range(2)]
        for f, t in zip((compiled, again), given, strict=True):
            (f(t) * t).sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
    for found, wanted in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    made = counters.since(before)
    assert made["graphs_compiled"] == 2 and "library_calls" not in made
