"""A limit of memory: graphs below it run, those above are refused with what they hold, training saves less first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_mlc.dynamo_backend.entry import partition as partition_module
from torch_mlc.ir.errors import MemoryLimitError


def wide(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return torch.sin(h) @ w.t()


def test_a_graph_above_the_limit_is_refused_with_its_tensors_and_lines() -> None:
    x, w = torch.randn(64, 32), torch.randn(32, 2048)
    run = torch.compile(wide, backend="mlc", options={"memory_limit": "256KiB"}, dynamic=False)
    with pytest.raises(Exception) as e:
        run(x, w)
    text = str(e.value)
    assert "memory_limit" in text and "256 KiB" in text and "float32[64, 2048]" in text
    assert "test_memory_limit.py" in text and "512 KiB" in text
    torch._dynamo.reset()
    fits = torch.compile(wide, backend="mlc", options={"memory_limit": "2MiB"}, dynamic=False)
    torch.testing.assert_close(fits(x, w), wide(x, w), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("host", ["python", "native"])
def test_sizes_are_looked_at_before_each_call(host: str) -> None:
    run = torch.compile(wide, backend="mlc", options={"memory_limit": "1MiB", "host_program": host}, dynamic=True)
    w = torch.randn(32, 2048)
    for rows in (20, 60):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(run(x, w), wide(x, w), rtol=1e-4, atol=1e-3)
    with pytest.raises(MemoryLimitError, match=r"(?s)holds .*s\d+.* bytes.*Here it would be \d+ bytes"):
        run(torch.randn(500, 32), w)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x) + x
        return x.square().mean()


def test_training_saves_less_before_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    within = partition_module.within_limit

    def seen(*args):  # type: ignore[no-untyped-def]
        parts = within(*args)
        places = {n.name: n.meta["val"] for n in parts[1].graph.find_nodes(op="placeholder")}
        saved.append(sum(places[n].nbytes for n in partition_module.saved_inputs(parts[1])))
        return parts

    monkeypatch.setattr(partition_module, "within_limit", seen)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(512, 64)
    net(x).backward()
    wanted = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    for limit in ("64MiB", "2340KiB"):
        torch._dynamo.reset()
        net.zero_grad()
        torch.compile(net, backend="mlc", options={"memory_limit": limit}, dynamic=False)(x).backward()
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-3, atol=1e-5)
    assert saved[1] < saved[0]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="memory_limit"):
        torch.compile(net, backend="mlc", options={"memory_limit": "100KiB"}, dynamic=False)(x).backward()


def test_a_loss_is_told_as_the_culprit() -> None:
    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), t)

    x, w, t = torch.randn(64, 16), torch.randn(5000, 16), torch.randint(0, 5000, (64,))
    with pytest.raises(Exception, match=r"(?s)float32\[64, 5000\].*F.linear\(x, w\)"):
        torch.compile(loss, backend="mlc", options={"memory_limit": "256KiB", "loss_chunk": 0}, dynamic=False)(x, w, t)
