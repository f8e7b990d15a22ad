"""Compiled steps of optimizers equal eager's over a hundred steps, one compilation in all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEPS = 100
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, **how),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    shapes = ((7, 5), (5,), (3, 4, 2), (), (33,), (5, 7))
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made[-1].data = made[-1].data.t().contiguous().t()  # columns that are contiguous
    return made


def train(params: list[nn.Parameter], opt: torch.optim.Optimizer, step: Callable[[], Any], steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for k in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) + p.detach() * 0.1
        if k == steps // 2:  # a number that is part of the graph: it is compiled again
            opt.param_groups[0]["lr"] *= 0.5
        step()


# One of each kind always, the others with -m slow.
ALWAYS = (("sgd", False), ("adamw", True))
CASES = [
    pytest.param(name, foreach, marks=() if (name, foreach) in ALWAYS else pytest.mark.slow)
    for name in OPTIMIZERS
    for foreach in (False, True)
]


@pytest.mark.parametrize(("name", "foreach"), CASES)
def test_a_hundred_steps(name: str, foreach: bool) -> None:
    ours, eager = parameters(), parameters()
    mine, theirs = (OPTIMIZERS[name](p, foreach=foreach) for p in (ours, eager))
    before = counters.snapshot()
    train(ours, mine, torch.compile(mine.step, backend="mlc"), STEPS)
    train(eager, theirs, theirs.step, STEPS)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-6)
    for p, q in zip(ours, eager):
        assert mine.state[p].keys() == theirs.state[q].keys()
        torch.testing.assert_close(dict(mine.state[p]), dict(theirs.state[q]), rtol=2e-5, atol=2e-6)
    # The first step makes the state; the second sees it; then the rate changes.
    assert counters.since(before).get("graphs_compiled", 0) <= 3


@pytest.mark.slow
def test_a_whole_step_in_one_function() -> None:
    """Forward, backward and the optimizer as users compile them: a function that Dynamo breaks at ``backward``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    twin = copy.deepcopy(model)
    data = torch.randn(5, 8, 6)
    results = []
    for m, wrap in ((model, lambda f: torch.compile(f, backend="mlc")), (twin, lambda f: f)):
        opt = torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True)

        def step(x: Tensor, m: nn.Module = m, opt: torch.optim.Optimizer = opt) -> Tensor:
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            opt.step()
            return loss

        run = wrap(step)
        results.append(torch.stack([run(x).detach() for x in data]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop"])
def test_other_optimizers(how: str) -> None:
    ours, eager = parameters(), parameters()
    mine, theirs = (getattr(torch.optim, how)(p, foreach=True) for p in (ours, eager))
    train(ours, mine, torch.compile(mine.step, backend="mlc"), 20)
    train(eager, theirs, theirs.step, 20)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
