"""Which products are oneDNN's, and that they are the same products."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.effects import LINEAR, opaque_operand
from torch_mlc.ir.graph.facts import names_in
from torch_mlc.ir.graph.graph import Graph, IRModule, Library, Node
from torch_mlc.ir.target import Target, usual_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.products.contraction_cpu import onednn_multiplies
from torch_mlc.scheduler.passes.products import multiply_by_onednn as module
from torch_mlc.scheduler.passes.products.multiply_by_onednn import onednn_product

WIDE = Target("cpu", "znver5", 1, vector_bytes=64, warp=1, max_threads=1, onednn=True)


def chosen(fn: Callable[..., Tensor], *inputs: Tensor, target: Target = WIDE, numerics: str = "fast") -> Graph:
    with torch.no_grad():
        (traced,) = capture(fn, inputs)
    graph = import_graph(traced)
    context, taken, types = PassContext(numerics, lambda device: target), set(names_in(graph)), graph.types()
    written = (onednn_product(n, types, graph, taken, context) if isinstance(n, Library) else (n,) for n in graph.nodes)
    graph = replace(graph, nodes=tuple(n for group in written for n in group))
    verify(IRModule({graph.name: graph}, graph.name))
    return graph


def calls(graph: Graph) -> list[Library]:
    return [n for n in graph.nodes if isinstance(n, Library)]


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w, x.new_ones(w.shape[0]))


@pytest.mark.parametrize("fn", [product, linear])
def test_a_plain_product_is_onednns_where_blas_has_narrow_vectors(fn: Callable[..., Tensor]) -> None:
    (call,) = calls(chosen(fn, torch.randn(128, 256), torch.randn(256, 256)))
    assert call.target == LINEAR and opaque_operand(call) is None, "a weight with strides and an address"
    for target in (replace(WIDE, onednn=False), replace(WIDE, vector_bytes=32), replace(WIDE, arch="sapphirerapids"),
                   usual_target("cpu")):  # fmt: skip
        (call,) = calls(chosen(fn, torch.randn(128, 256), torch.randn(256, 256), target=target))
        assert call.target != LINEAR
    (call,) = calls(chosen(fn, torch.randn(128, 256), torch.randn(256, 256), numerics="eager"))
    assert call.target != LINEAR


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.empty(1, 512), torch.empty(512, 512)),  # BLAS reads the weight as it lies
        (torch.empty(16, 32), torch.empty(32, 32)),  # a call of oneDNN takes longer
        (torch.empty(128, 256, dtype=torch.float64), torch.empty(256, 256, dtype=torch.float64)),
        (torch.empty(128, 256).bfloat16(), torch.empty(256, 256).bfloat16()),
        (torch.empty(128, 512)[:, ::2], torch.empty(256, 256)),
        (torch.empty(128, 256), torch.empty(256, 512)[:, ::2]),
    ],
    ids=["row", "small", "double", "half", "strided", "strided weight"],
)
def test_others_stay_blas(x: Tensor, w: Tensor) -> None:
    assert all(c.target != LINEAR for c in calls(chosen(product, x, w)))


def test_a_gpus_products_stay() -> None:
    assert not onednn_multiplies(4096, 4096, 4096, usual_target("cuda:0").machine)
    with FakeTensorMode():
        assert not onednn_multiplies(2, 4096, 4096, WIDE.machine)
    assert onednn_multiplies(64, 1024, 1024, WIDE.machine)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_shapes_and_strides_are_those_of_blas(
    monkeypatch: pytest.MonkeyPatch, with_bias: bool, dynamic: bool
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    machine = WIDE.machine
    monkeypatch.setattr("torch_mlc.ir.target._machine", lambda target: machine)
    w, bias = torch.randn(133, 190, 1, 1) / 14, torch.randn(133) if with_bias else None
    compiled = torch.compile(torch.nn.functional.conv2d, backend="mlc", dynamic=dynamic, options={"cache": False})
    for shape in ((3, 190, 9, 7), (2, 190, 13, 5), (1, 190, 30, 4)):
        x = torch.randn(shape).to(memory_format=torch.channels_last)
        for one in (x, torch.where(x > 2.5, float("inf"), x), torch.where(x > 2.5, float("nan"), x)):
            found, eager = compiled(one, w, bias), torch.nn.functional.conv2d(one, w, bias)
            wanted = torch.nn.functional.conv2d(one.double(), w.double(), None if bias is None else bias.double())
            assert found.stride() == eager.stride()
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_multiplies_by_onednn(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """Weights, transposed weights and transposed activations: forward, both gradients, and rows that vary."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    machine, seen = WIDE.machine, list[str]()
    monkeypatch.setattr("torch_mlc.ir.target._machine", lambda target: machine)
    inner = module.onednn_product

    def watched(node: Library, *rest: Any) -> Collection[Node]:
        made = inner(node, *rest)
        seen.extend(n.target for n in made if isinstance(n, Library))
        return made

    monkeypatch.setattr(module, "onednn_product", watched)
    model = torch.nn.Sequential(torch.nn.Linear(192, 256), torch.nn.GELU(), torch.nn.Linear(256, 192, bias=False))
    compiled = torch.compile(model, backend="mlc", dynamic=dynamic, options={"cache": False})
    for rows in (130, 97, 160):
        x = torch.randn(rows, 192)
        found: list[list[Tensor]] = []
        for f in (compiled, model):
            y = f(leaf := x.clone().requires_grad_())
            y.square().sum().backward()
            grads = [leaf.grad, *(q.grad for q in model.parameters())]
            found.append([y.detach(), *(g.clone() for g in grads if g is not None)])
            model.zero_grad()
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert seen.count(LINEAR) >= 4
