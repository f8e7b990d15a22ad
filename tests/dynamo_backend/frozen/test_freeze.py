"""Parameters that do not change: what is made of them is computed once, and a change is an error that names them."""

from __future__ import annotations

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from torch_mlc.runtime.frozen.kept import FrozenError

FREEZE = {"freeze": True}

pytestmark = pytest.mark.usefixtures("without_gradients")


class Scaled(nn.Module):
    """A weight that is normalised and transposed, a table, and a running sum that the model writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 17))
        self.register_buffer("table", torch.randn(24))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return x @ weight.t() * self.table.exp() + self.calls.sum().exp()


def frozen(model: nn.Module, **how: Any) -> Any:
    return torch.compile(model, backend="mlc", options=FREEZE, **how)


def test_what_depends_on_parameters_alone_is_computed_once() -> None:
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    compiled = frozen(model, dynamic=True)
    before = torch_mlc.memory_stats().frozen
    for rows in (3, 5, 1):
        x = torch.randn(rows, 17)
        torch.testing.assert_close(compiled(x), plain(x))
    assert torch_mlc.memory_stats().frozen - before >= (24 * 17 + 24) * 4
    torch._dynamo.reset()
    report = torch_mlc.explain(Scaled(), torch.randn(3, 17), options=FREEZE)
    told = " ".join(r.told for r in report.graphs[0].frozen)
    assert "aten.div" in told and "aten.exp" in told and "test_freeze.py" in told
    without = torch_mlc.explain(Scaled(), torch.randn(3, 17))
    assert not without.graphs[0].frozen and report.graphs[0].launches < without.graphs[0].launches


@pytest.mark.parametrize("how", ["in place", "state", "data"])
def test_a_changed_parameter_is_named(how: str) -> None:
    model, x = nn.Sequential(Scaled(), nn.ReLU()), torch.randn(2, 17)
    compiled = frozen(model)
    compiled(x)
    inner = model[0]
    if how == "in place":
        inner.weight.mul_(2)
    elif how == "state":
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    else:
        inner.weight.data = torch.randn(24, 17)
    with pytest.raises(FrozenError, match=r"0\.weight(, 0\.table)? changed.*torch\._dynamo\.reset"):
        compiled(x)
    torch._dynamo.reset()
    wanted = nn.Sequential(Scaled(), nn.ReLU())
    wanted.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(x), wanted(x))


def test_other_parameters_have_values_of_their_own() -> None:
    first, second = Scaled(), Scaled()
    x = torch.randn(2, 17)
    call = torch.compile(lambda m, x: m(x), backend="mlc", options=FREEZE)
    for model in (first, second, first, second):
        plain = Scaled()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(call(model, x), plain(x))
    first.weight = nn.Parameter(torch.randn(24, 17))
    plain = Scaled()
    plain.load_state_dict(first.state_dict())
    torch.testing.assert_close(call(first, x), plain(x))
    held = torch_mlc.memory_stats().frozen
    del first, second, model
    gc.collect()
    assert torch_mlc.memory_stats().frozen < held


def test_training_is_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Scaled(), torch.randn(2, 17)
    compiled = frozen(model)
    with torch.enable_grad():
        for _ in range(2):
            compiled(x).sum().backward()
            model.weight.data.mul_(2)
            model.weight.add_(1) if not torch.is_grad_enabled() else None
        wanted = nn.Parameter(model.weight.detach().clone())
        model.weight.grad = None
        compiled(x).sum().backward()
        ((x @ (wanted / wanted.norm(dim=1, keepdim=True)).t()) * model.table.exp()).sum().backward()
    torch.testing.assert_close(model.weight.grad, wanted.grad)
    told = [r.message for r in caplog.records if "freeze does nothing" in r.message]
    assert len(told) == 1 and re.search("no_grad", told[0])


def test_threads_share_the_values() -> None:
    model, x = nn.Sequential(nn.Linear(17, 24), nn.Softplus()), torch.randn(2, 17)
    model[0].weight.copy_(torch.randn(24, 17))

    def f(x: Tensor) -> Tensor:
        return x @ model[0].weight.softmax(1).t()

    compiled = torch.compile(f, backend="mlc", options=FREEZE)
    compiled(x)
    compiled_values = torch_mlc.memory_stats().frozen
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: compiled(x), range(16)))
    assert all(torch.equal(r, results[0]) for r in results)
    assert torch_mlc.memory_stats().frozen == compiled_values
