"""Kernels of layers that read more and more channels: how many are compiled, and that they are right."""

from __future__ import annotations

import pytest
import torch

from tests.dynamo_backend.growing import Dense, settled
from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("shape", [(2, 32, 5, 7), (3, 32, 2, 1)])
@pytest.mark.parametrize("training", [False, True])
def test_values_and_how_many_kernels_are_compiled(shape: tuple[int, ...], training: bool) -> None:
    torch.manual_seed(0)
    model, x = settled(Dense(8)).train(training), torch.randn(shape)
    expected = Dense(8).double()
    expected.load_state_dict(model.state_dict())
    expected.train(training)
    before = counters.snapshot().get("kernels_generated", 0)
    with torch.set_grad_enabled(training):
        found, wanted = torch.compile(model, backend="mlc", fullgraph=True)(x), expected(x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    if training:
        found.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-3)
    else:
        assert counters.snapshot()["kernels_generated"] - before <= 4
