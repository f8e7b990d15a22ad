"""MLC_VERIFY=2: right graphs pass, random, mutating and dynamic ones too; of a wrong one the first op is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_mlc.dynamo_backend.converters import CONVERTERS
from torch_mlc.dynamo_backend.verify.verify_graph import WrongResultError, difference, settled

CHECKED = {"verify": 2}


def wrong_tanh(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """tanh is taken for sin from now on: kernels are what their definitions say, and those are wrong."""
    monkeypatch.setenv("MLC_CACHE_DIR", str(folder))
    monkeypatch.setitem(CONVERTERS, "aten.tanh.default", CONVERTERS["aten.sin.default"])


def program(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(x @ w, (16,))
    return torch.tanh(y).relu() @ w


def test_the_first_wrong_op_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong_tanh(monkeypatch, tmp_path)
    run = torch.compile(program, backend="mlc", options=CHECKED)
    with pytest.raises(
        WrongResultError, match=r"(?s)differs from its ATen ops: output 0 at \[\d+, \d+\].*aten.tanh.default"
    ) as e:
        run(torch.randn(7, 16) * 3, torch.randn(16, 16))
    assert "test_verify_graph.py" in str(e.value) and "compiled" in str(e.value)


def test_a_wrong_backward_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong_tanh(monkeypatch, tmp_path)
    x = (torch.randn(9, 16) * 3).requires_grad_()
    with pytest.raises(WrongResultError):
        torch.compile(lambda x: torch.tanh(x).sum(), backend="mlc", options=CHECKED)(x).backward()


def test_right_graphs_pass() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 5)
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.body(x), -1)

    net = Net()
    run = torch.compile(net, backend="mlc", options=CHECKED, dynamic=True)
    for rows in (6, 11):
        run(torch.randn(rows, 8)).sum().backward()
    net.eval()
    torch.testing.assert_close(run(torch.randn(4, 8)).exp().sum(-1), torch.ones(4))


def test_random_numbers_go_on_as_without_the_check() -> None:
    run = torch.compile(lambda x: F.dropout(x, 0.5), backend="mlc", options=CHECKED)
    torch.manual_seed(3)
    first, second = run(torch.ones(200)), run(torch.ones(200))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(run(torch.ones(200)), first)


def test_written_inputs_are_compared() -> None:
    def update(x: Tensor, g: Tensor) -> Tensor:
        x.mul_(0.5).add_(g)
        return x.sum()

    x, g = torch.ones(5), torch.ones(5)
    assert torch.compile(update, backend="mlc", options=CHECKED)(x, g) == 7.5
    assert torch.equal(x, torch.full((5,), 1.5))


def test_what_a_rounding_makes_infinite_is_not_compared() -> None:
    inf, nan = float("inf"), float("nan")
    want, got = torch.tensor([1.0, 16.6, inf, 2.0]), torch.tensor([1.0, inf, 16.6, inf])
    others = [torch.tensor([1.0, inf, inf, 2.0]), torch.tensor([1.1, 16.0, nan, 2.0])]
    torch.testing.assert_close(settled(got, want, others), torch.tensor([1.0, 16.6, inf, inf]))
    assert settled(3, want, others) == 3


def test_what_counts_as_a_difference() -> None:
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert difference("x", nan, nan.clone(), 1e-3) is None
    found = difference("x", torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, float("nan")]]), 1e-3)
    assert found is not None and found.index == (0, 1) and found.got == 2.0
    assert difference("x", torch.tensor([100.0, 0.05]), torch.tensor([100.0, 0.0]), 1e-3) is None
    assert difference("x", torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0) is not None
    assert difference("x", torch.ones(2), torch.ones(3), 1.0) is not None
    assert difference("x", torch.ones(0), torch.ones(0), 1e-3) is None
