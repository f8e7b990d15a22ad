"""Branches, loops and nested regions: eager's answers, forward and backward, with the bodies in kernels of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def agree(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> None:
    """Results, and gradients of what requires them."""
    expected = fn(*inputs)
    got = torch.compile(fn, backend="mlc", fullgraph=True, dynamic=dynamic)(*inputs)
    torch.testing.assert_close(got, expected)
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if leaves:
        gradients = []
        for results in (expected, got):
            sums = [(t * t).sum() for t in tree_leaves(results) if t.requires_grad]
            gradients.append(torch.autograd.grad(sums, leaves))
        torch.testing.assert_close(gradients[1], gradients[0])


def bodies(fn: Callable[..., Any], *inputs: Any) -> dict[str, int]:
    """The kernels of each graph; every op of a body is in one."""
    report = torch_mlc.explain(fn, *inputs)
    for graph in report.graphs[1:]:
        assert not [lib.op for lib in graph.libraries if "mm" not in lib.op], graph
    return {graph.name: len(graph.kernels) for graph in report.graphs}


# --- branches ---------------------------------------------------------------------------------------------------------


def branch(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x, y: x.sin() * y + 1, lambda x, y: (x.cos() - y).relu(), (x, y))


@pytest.mark.parametrize("dynamic", [False, True])
def test_both_branches(dynamic: bool) -> None:
    for sign in (1, -1):
        x, y = (sign * torch.rand(4, 9)).requires_grad_(not dynamic), torch.randn(4, 9, requires_grad=not dynamic)
        agree(branch, x, y, dynamic=dynamic)
    assert dynamic or bodies(branch, x.detach(), y.detach()) == {
        "graph": 1,
        "graph.true_graph_0": 1,
        "graph.false_graph_0": 1,
    }


def test_branches_in_branches_and_in_loops() -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0.5, lambda x: x * 0.5, lambda x: x.exp(), (x,))

    def fn(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, inner, lambda x: inner(x - 1) * 2, (x,))
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, inner(x)), (torch.tensor(0), y))[1]

    for x in (torch.rand(3, 5), -torch.rand(3, 5)):
        agree(fn, x)


def test_a_branch_on_a_size() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 4, lambda x: x.sum(0), lambda x: x.amax(0), (x,))

    for n in (3, 6):
        agree(fn, torch.randn(n, 7), dynamic=True)


# --- loops ------------------------------------------------------------------------------------------------------------


def turns(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    w = x.cos()
    return while_loop(
        lambda i, y: i < n, lambda i, y: (i + 1, (y * w).sin() + y), (torch.zeros((), dtype=torch.int64), x)
    )


def test_loops() -> None:
    x = torch.randn(3, 10)
    run = torch.compile(turns, backend="mlc", fullgraph=True)
    for count in (0, 1, 4):
        for v in (x, x.t()):
            torch.testing.assert_close(run(torch.tensor(count), v), turns(torch.tensor(count), v))
    run(torch.tensor(0), x)[1].zero_()
    assert x.abs().sum() > 0, "a loop without a turn gives copies"


def test_gradients_of_loops() -> None:
    def fn(x: Tensor) -> Tensor:
        return while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, y.sin() * 1.5), (torch.tensor(0), x))[1]

    agree(fn, torch.randn(3, 10, requires_grad=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_scans_step_by_step(dynamic: bool) -> None:
    def fn(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda h, x: (torch.tanh(h * 0.5 + x), h * x), h, x, dim=1)

    h, x = torch.randn(4, 6), torch.randn(4, 5, 6)
    agree(fn, torch.randn(6, 4).t(), torch.randn(5, 6, 4).permute(2, 0, 1), dynamic=dynamic)
    if not dynamic:
        agree(fn, h.clone().requires_grad_(), x.clone().requires_grad_())
        assert bodies(fn, h, x)["graph.scan_combine_graph_0"] == 1


# --- nested regions ---------------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.one(layer, x)
        return x

    @staticmethod
    @torch.compiler.nested_compile_region
    def one(layer: torch.nn.Module, x: Tensor) -> Tensor:
        return torch.relu(layer(x)).softmax(-1) + x


def test_regions_are_compiled_once() -> None:
    model, x = Layers(), torch.randn(4, 9)
    with torch.no_grad():
        found = bodies(model, x)
        agree(model, x)
    outside, inside = found.values()
    assert outside == 0 and inside > 0


def test_gradients_of_regions() -> None:
    model, x = Layers(), torch.randn(4, 9, requires_grad=True)
    model(x).sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    # The gradient of the sum arrives expanded, which is not how the backward's body was traced.
    torch.compile(model, backend="mlc", fullgraph=True)(x).sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], expected)


def test_gradients_of_regions_of_any_size() -> None:
    """Bodies give the sizes that their backwards need back to who gave them."""

    @torch.compiler.nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ w)

    @torch.compiler.nested_compile_region
    def layers(x: Tensor, w: Tensor) -> Tensor:
        return layer(x, w) * layer(x * 2, w.t())

    def model(x: Tensor, w: Tensor) -> Tensor:
        return layers(x, w).sum(0) + layers(x, w).flip(0)

    run = torch.compile(model, backend="mlc", fullgraph=True, dynamic=True)
    for rows in (5, 2, 7):
        given = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (rows, 4)]
        found, wanted = ((y := f(*given), *torch.autograd.grad(y.square().sum(), given)) for f in (run, model))
        torch.testing.assert_close(found, wanted)


def test_random_numbers_in_a_region() -> None:
    @torch.compiler.nested_compile_region
    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) * 2

    run = torch.compile(lambda x: (noisy(x), noisy(x)), backend="mlc")
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    a, b = run(x)
    torch.manual_seed(3)
    again = run(x)
    assert torch.equal(a, again[0]) and torch.equal(b, again[1]) and not torch.equal(a, b)
    assert 0.4 < (a == 0).float().mean() < 0.6


# --- elsewhere --------------------------------------------------------------------------------------------------------


def test_bodies_come_from_the_cache_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    x, y = torch.rand(4, 9), torch.randn(4, 9)
    agree(branch, x, y)
    torch._dynamo.reset()
    before = counters.snapshot()
    agree(branch, x, y)
    agree(branch, -x, y)
    made = counters.since(before)
    assert made["graph_cache_hits"] >= 3 and "graphs_compiled" not in made


def test_bodies_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    graphs = capture(branch, (torch.randn(4, 9), torch.randn(4, 9)))
    retarget(graphs, "cuda")
    options = Options.resolve(None, {"target": "cuda:sm_90", "strict": True}, {})
    compiled = compile_graph(graphs[0], (), options=options, load=False, fresh=True)
    assert len(compiled.regions) == 2
    for region in compiled.regions:
        assert region.stages is not None
        (kernel,) = region.stages.kernels.values()
        assert kernel.source is not None and kernel.source.language == "triton"
