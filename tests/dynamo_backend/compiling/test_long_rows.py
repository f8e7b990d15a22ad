"""Rows too long to stay near the arithmetic units: softmax and its kin visit them once for maximum and sum together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc


def plain(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


FORMS = {"softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "plain": plain}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "dynamic"), [((3, 140_001), False), ((17, 135_168), True)])
def test_on_a_cpu(form: str, shape: tuple[int, int], dynamic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[1, 70_000] = float("inf")
    x[2] = -float("inf")
    x[0, :2048] = -float("inf")
    torch._dynamo.reset()
    y = torch.compile(FORMS[form], backend="mlc", dynamic=dynamic)(x)
    torch.testing.assert_close(y.double(), FORMS[form](x.double()), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_steps_of_a_cpu_are_tiles() -> None:
    report = torch_mlc.explain(FORMS["log_softmax"], torch.empty(64, 140_001))
    (kernel,) = report.kernels
    assert any(step.primitive == "decompose_online" for step in kernel.trace.steps)


@pytest.mark.parametrize("shape", [(512, 50257), (1, 1 << 20)], ids=["rows", "one row"])
def test_a_gpu_reads_them_twice(shape: tuple[int, int]) -> None:
    def step(x: Tensor) -> Tensor:
        return F.log_softmax(x, -1)

    (graph,) = torch_mlc.explain(step, torch.empty(shape), target="cuda:sm_90").graphs
    assert graph.traffic is not None and max(graph.traffic.reads.values()) == 2
    assert not graph.libraries and all(not k.error for k in graph.kernels)
