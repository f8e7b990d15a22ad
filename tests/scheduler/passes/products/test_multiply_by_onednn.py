"""Which products are oneDNN's, and that they are the same products."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.graph.by_size import BY_SIZE, call_at, forms_of
from torch_mlc.ir.graph.effects import LINEAR, opaque_operand
from torch_mlc.ir.graph.facts import names_in
from torch_mlc.ir.graph.graph import Graph, Input, IRModule, Library, Node, Ref, TensorType
from torch_mlc.ir.target import Target, usual_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.cost.products.contraction_cpu import onednn_multiplies, onednn_rows
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


@pytest.mark.parametrize("fn", [product, linear, lambda x, w: x @ w.t()])
def test_the_pass_takes_weights_with_a_view_of_their_own_and_without(fn: Callable[..., Tensor]) -> None:
    """A weight whose transpose is there needs no node more."""
    with torch.no_grad():
        (traced,) = capture(fn, (torch.randn(64, 512), torch.randn(512, 512)))
    graph = import_graph(traced)
    made = module.multiply_by_onednn(graph, PassContext("fast", lambda device: WIDE))
    assert [n.target for n in calls(made)] == [LINEAR]
    assert module.multiply_by_onednn(made, PassContext("fast", lambda device: WIDE)) is made


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
    assert seen.count(LINEAR) + seen.count(BY_SIZE) >= 4


SIZE = sympy.Symbol("s0", integer=True, nonnegative=True)


def of_rows(size: Size, numerics: str = "fast", bias: bool = False) -> tuple[Node, ...]:
    """A product ``[s0, 512] @ [512, 256]`` for a size of rows, as what calls libraries."""
    one, inner, columns = sympy.S.One, sympy.Integer(512), sympy.Integer(256)
    x, w, y = (
        TensorType(shape, (shape[1], one), DType.FLOAT32)
        for shape in ((SIZE, inner), (inner, columns), (SIZE, columns))
    )
    added = (Input("c", TensorType((columns,), (one,), DType.FLOAT32)),) if bias else ()
    args = (*(Ref(i.name) for i in added), Ref("x"), Ref("w"))
    node = Library(("y",), (y,), f"aten::{'addmm' if bias else 'mm'}.default", args)
    graph = Graph("g", (Input("x", x), Input("w", w), *added), (node,), ("y",), SymbolTable((size,)))
    found = module.multiply_by_onednn(graph, PassContext(numerics, lambda device: WIDE))
    verify(IRModule({"g": found}, "g"))
    assert parse(show(IRModule({"g": found}, "g"))) == IRModule({"g": found}, "g")
    return found.nodes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hint", [1, 8, 64, 4096])
def test_rows_that_vary_are_either_librarys_whatever_is_typical(hint: int, bias: bool) -> None:
    least = onednn_rows(512, 256, WIDE.machine)
    assert least is not None and not onednn_multiplies(least - 1, 512, 256, WIDE.machine)
    assert onednn_multiplies(least, 512, 256, WIDE.machine)
    *_, call = of_rows(Size(SIZE, 1, None, 1, hint), bias=bias)
    forms = forms_of(call)
    assert forms is not None and (forms.size, forms.least) == (SIZE, least)
    assert (forms.fewer.target, forms.more.target) == (f"aten::{'addmm' if bias else 'mm'}.default", LINEAR)
    assert forms.fewer.args[-1] == Ref("w") and call_at(call, lambda e: least - 1) == forms.fewer


def test_rows_that_vary_on_one_side_are_one_librarys() -> None:
    least = onednn_rows(512, 256, WIDE.machine)
    assert least is not None
    targets = [
        of_rows(size)[-1].target
        for size in (Size(SIZE, least, None), Size(SIZE, 1, least - 1), Size(SIZE, 1, None, 1, 4, least - 1))
    ]
    assert targets == [LINEAR, "aten::mm.default", "aten::mm.default"]
    assert of_rows(Size(SIZE, 1, None, 1, 64), "eager")[-1].target == "aten::mm.default"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("layers", [1, 6])
def test_a_program_calls_either_by_the_number_of_rows(monkeypatch: pytest.MonkeyPatch, layers: int, host: str) -> None:
    """One graph for rows around the border, with values that are no numbers; layers that are alike are a loop."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    machine = replace(WIDE.machine, launch=WIDE.machine.launch / 8)
    monkeypatch.setattr("torch_mlc.ir.target._machine", lambda target: machine)
    weights = [torch.randn(192, 192) / 14 for _ in range(2 * layers)]
    bias = torch.randn(192)
    least = onednn_rows(192, 192, machine)
    assert least is not None and 4 <= least < 40

    def model(x: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = torch.sin(torch.nn.functional.linear(torch.sin(x) @ up, down, bias))
        return x

    x = torch.randn(least + 5, 192)
    torch._dynamo.mark_dynamic(x, 0)
    report = torch_mlc.explain(model, x, bias, *weights, options={"cache": False, "regions": 0})
    assert f"if {report.graphs[0].program.partition('if ')[2].split(' ')[0]} < {least}:" in report.graphs[0].program
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mlc", fullgraph=True, options={"cache": False, "host_program": host})
    for rows in (least + 5, 2, 3, least - 1, least, least + 1, 300, 2):
        x = torch.randn(rows, 192)
        torch._dynamo.mark_dynamic(x, 0)
        for one in (x, torch.where(x > 3.0, float("inf"), x), torch.where(x > 3.0, float("nan"), x)):
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = compiled(one, bias, *weights)
            wanted = model(one.double(), bias.double(), *map(Tensor.double, weights))
            assert found.stride() == (192, 1)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("host", ["python", "native"])
def test_large_results_of_either_lie_in_blocks(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    torch._dynamo.reset()
    machine = WIDE.machine
    monkeypatch.setattr("torch_mlc.ir.target._machine", lambda target: machine)
    w = torch.randn(64, 8 << 10)
    least = onednn_rows(64, 8 << 10, machine)
    assert least is not None and least < 280
    compiled = torch.compile(lambda x, w: x @ w, backend="mlc", options={"cache": False, "host_program": host})
    for rows in (300, least - 1, least, 1100, 20):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, w).double(), x.double() @ w.double(), rtol=1e-4, atol=1e-3)
