"""``options={"cuda_graphs": True}``: compiled models that are captured, on a device that the CPU plays, and on a GPU.

The CPU's kernels are ATen ops here (``AtenKernel``), since those are what the device can record.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.recording_device import RecordingDevice
from torch_mlc.codegen.host.capture import CapturePlan, capture_plan
from torch_mlc.codegen.kernel import EmitError
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.gpu.capture import GRAPH_DEVICES
from torch_mlc.runtime.host.cuda_graphs import warn_once
from torch_mlc.runtime.settings.options import Options

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:torch-mlc. a kernel does not compile"),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    """The CPU as a device whose work can be captured."""
    found = RecordingDevice()

    def refuse(*_: Any) -> None:
        raise EmitError("kernels are to be ATen ops")

    monkeypatch.setattr(kernels, "compile_source", refuse)
    monkeypatch.setenv("MLC_STRICT", "0")
    monkeypatch.setenv("MLC_CACHE", "0")
    monkeypatch.setitem(GRAPH_DEVICES, "cpu", lambda index: found)
    return found


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="mlc", options={"cuda_graphs": True, **options})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def test_training_with_weights_statistics_and_random_numbers(device):
    torch.manual_seed(0)
    net = Net()
    peer, runs = copy.deepcopy(net), []
    for model, step in ((net, compiled(net)), (peer, torch.compile(peer, backend="mlc"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(5)
        for turn in range(6):
            x = torch.full((4, 6), 0.1 * turn) + torch.arange(24.0).view(4, 6).sin()
            loss = step(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append(losses)
    torch.testing.assert_close(runs[0], runs[1])
    torch.testing.assert_close(net.state_dict(), peer.state_dict())
    assert device.captures == 2 and device.replays >= 8


def test_inputs_that_are_written_to(device):
    def step(x, cache):
        cache[2] = x * 2 + cache[3]
        cache[3:].add_(1)
        x.add_(1)
        return cache.sum() + x.sum()

    fn, cache, peer = compiled(step), torch.zeros(5, 3), torch.zeros(5, 3)
    for turn in range(4):
        x, y = torch.full((3,), float(turn)), torch.full((3,), float(turn))
        torch.testing.assert_close(fn(x, cache), step(y, peer))
        torch.testing.assert_close((x, cache), (y, peer))
    assert device.captures == 1


def test_symbolic_sizes_have_a_capture_each(device):
    fn = torch.compile(lambda x: (x * 2).sum(0), backend="mlc", dynamic=True, options={"cuda_graphs": True})
    for n in (3, 4, 3, 4, 3, 4):
        x = torch.randn(n, 5)
        torch.testing.assert_close(fn(x), (x * 2).sum(0))
    assert device.captures == 2 and device.replays == 4


def test_results_that_are_not_copied_survive_the_next_call(device):
    fn = compiled(lambda x: x.exp(), cuda_graph_copies=False)
    results = [(x := torch.randn(4), fn(x)) for _ in range(6)]
    for x, y in results:
        torch.testing.assert_close(y, x.exp())


def test_an_argument_that_nothing_reads_may_be_none(device, trace):
    """As torch gives it; or a tensor, of which no capture keeps anything alive."""
    gm, x = trace(lambda x, y: (x * 2,), [torch.ones(3), torch.ones(3)]), torch.randn(3)
    options = Options(cuda_graphs=True, cache=False, strict=False)
    call = compile_graph(gm, [x, x], options=options).call
    for other in (None, torch.ones(3), None, torch.ones(5), None):
        (result,) = call([x, other])
        torch.testing.assert_close(result, x * 2)
    assert device.captures == 1


def test_the_cpu_itself_is_not_captured(caplog):
    warn_once.cache_clear()  # an earlier test of this process may have been told
    before = counters.snapshot()
    fn = torch.compile(lambda x: x + 1, backend="mlc", mode="reduce-overhead")
    for _ in range(4):
        fn(torch.ones(3))
    told = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert len(told) == 1 and "is on the device cpu" in told[0]
    assert counters.since(before)["cuda_graph_refusals"] == 1


# --- what cannot be captured ------------------------------------------------------------------------------------------


def plan_of(trace: Any, fn: Any, *inputs: torch.Tensor) -> CapturePlan:
    return capture_plan(import_graph(trace(fn, inputs)), ("cpu",))


X = torch.ones(4, 3)


@pytest.mark.parametrize(("fn", "told"), [
    (lambda x: x[x > 0], "decides a size or a number by data"),
    (lambda x: torch.unique(x.long()), "decides a size or a number by data"),
    (lambda x: torch.multinomial(x.repeat(1, 9), 20), "aten::multinomial.default"),
    (lambda x: torch.multinomial(x, 1), "aten::_assert_async.msg decides"),
    (lambda x: x.sort().values, ""),
    (lambda x: x @ x.t(), ""),
])  # fmt: skip
def test_reasons(trace, fn, told):
    reason = plan_of(trace, fn, X).reason
    assert told in reason and bool(told) == bool(reason)


def test_a_reason_names_the_device(trace):
    graph = import_graph(trace(lambda x: x + 1, (X,)))
    assert capture_plan(graph, ("cuda",)).reason.endswith("is on the device cpu")


def test_what_is_written_is_known(trace):
    assert plan_of(trace, lambda x, y: x + y, X, X).written == ()


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [True, False])
def test_training_on_a_gpu(copies):
    torch.manual_seed(0)
    net = Net().cuda()
    peer = copy.deepcopy(net)
    fn, other = compiled(net, cuda_graph_copies=copies), torch.compile(peer, backend="mlc")
    before = counters.snapshot()
    for model, step in ((net, fn), (peer, other)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        for _ in range(6):
            step(torch.ones(4, 6, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(net.state_dict(), peer.state_dict())
    assert counters.since(before).get("cuda_graphs") == 2


@pytest.mark.gpu
def test_many_parameters_in_one_launch_on_a_gpu():
    parameters = [torch.randn(n, device="cuda") for n in (3, 1000, 70_000, 5) for _ in range(8)]
    peers = [p.clone() for p in parameters]
    gradients = [torch.randn_like(p) for p in parameters]

    def step(ps, gs):
        for p, g in zip(ps, gs):
            p.sub_(0.1 * g.sign() * g.abs().sqrt())

    fn = compiled(step)
    for _ in range(4):
        fn(parameters, gradients)
        step(peers, gradients)
    torch.testing.assert_close(parameters, peers)
