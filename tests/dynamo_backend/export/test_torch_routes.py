"""Programs of ``torch.export`` compiled in the process, as any module is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.softmax(self.linear(x), -1) + self.calls


@pytest.mark.parametrize("grad", [False, True])
def test_the_module_of_a_program(grad: bool) -> None:
    model = Counter()
    eager = copy.deepcopy(model)
    program = export(model, (torch.randn(3, 6),), dynamic_shapes=({0: Dim("batch", max=100)},))
    module = program.module()
    compiled = torch.compile(module, backend="mlc", fullgraph=True)
    with torch.set_grad_enabled(grad):
        for batch in (3, 3, 17, 50):
            x = torch.randn(batch, 6)
            found, wanted = compiled(x), eager(x)
            torch.testing.assert_close(found, wanted)
            if grad:
                found.square().sum().backward()
                wanted.square().sum().backward()
                torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
