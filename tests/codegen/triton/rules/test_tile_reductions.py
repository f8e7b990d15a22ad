"""Reductions over the rows or the columns of a product's results, from tiles of those: one kernel beside the product,
and one that combines what the tiles gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.versions import heavy_with_triton_3_6
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor, Graph, Library
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion import tiles
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import decompose_contractions, eliminate_dead, rewrite_logsumexp, simplify_algebra
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")
BF16 = torch.bfloat16


def bias_gradient(dy: Tensor, w: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """What an activation sends back, and its sum over rows."""
    dx = torch.ops.aten.gelu_backward(dy @ w, up, approximate="tanh")
    return dx, dx.sum(0)


def bias_gradient_of_batches(dy: Tensor, w: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.where(up > 0, (dy.flatten(0, 1) @ w).view_as(up), 0)
    return dx, dx.sum((0, 1))


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the log-sum-exp of each row."""
    logits = x @ w.t()
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    return logits, (wide - top).exp().sum(-1, keepdim=True).log() + top


def moments(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ w
    return product.sum(0), (product * product).sum(0) * 0.5


def half(*shape: int) -> tuple[int, ...]:
    """A tensor of a half type, which is not there."""
    return shape


def imported(fn: Callable[..., object], shapes: Sequence[tuple[int, ...]], dynamic: bool = False) -> Graph:
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=BF16) for s in shapes]
    found = capture(fn, inputs, dynamic=dynamic)
    retarget(found, "cuda")
    return import_graph(found[0])


def opened(fn: Callable[..., object], shapes: Sequence[tuple[int, ...]], dynamic: bool = False) -> list[LoopNest]:
    """The kernels of a function whose products are opened, whatever they cost."""
    graph = rewrite_logsumexp(simplify_algebra(imported(fn, shapes, dynamic)), always=True)
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        nodes += [node] if p is None else decompose_product(p, Decision(True, "asked for"), graph, taken)
    fusion = fuse(eliminate_dead(replace(graph, nodes=tuple(nodes))))
    calls = [n for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    return [lower_to_loops(fusion.functions[c.function]) for c in calls]


CASES = {
    "rows": (bias_gradient, (half(128, 16), half(16, 96), half(128, 96))),
    "rows, tails": (bias_gradient, (half(100, 20), half(20, 65), half(100, 65))),
    "rows of batches": (bias_gradient_of_batches, (half(2, 64, 16), half(16, 64), half(2, 64, 64))),
    "columns, tails": (statistics, (half(65, 20), half(150, 20))),
    "several": (moments, (half(128, 16), half(16, 64))),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that the oracle soon has several."""
    for name in ("COMBINED_ROWS", "COLUMNS", "FEWER_COLUMNS"):
        monkeypatch.setattr(tiles, name, 64)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, agrees: Callable[..., KernelSource]) -> None:
    first, second = opened(*CASES[name])
    scheduled = default_schedule(first, SM90)
    assert scheduled.rule == "gpu_contraction"
    agrees(scheduled.nest, tolerance=3e-2)
    agrees(default_schedule(second, SM90).nest, tolerance=3e-2)


@pytest.mark.usefixtures("small_tiles")
def test_symbolic_rows(agrees: Callable[..., KernelSource]) -> None:
    first, second = opened(*CASES["rows"], dynamic=True)
    scheduled = default_schedule(first, SM90)
    assert scheduled.rule == "gpu_contraction" and first.symbols.symbols
    sizes = {s.symbol.name: max(s.hint, 2) + 3 for s in first.symbols.sizes}
    agrees(scheduled.nest, sizes, tolerance=3e-2)
    agrees(
        default_schedule(second, SM90).nest, {k: v for k, v in sizes.items() if k in map(str, second.symbols.symbols)}
    )


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (statistics, (half(2048, 256), half(4000, 256))),
        pytest.param(bias_gradient, (half(2048, 256), half(256, 3072), half(2048, 3072)), marks=heavy_with_triton_3_6),
    ],
    ids=["statistics", "bias gradient"],
)
def test_compiled(fn: Callable[..., object], shapes: Sequence[tuple[int, ...]]) -> None:
    schedule = default_schedule(opened(fn, shapes)[0], SM90)
    report = resource_report(compile_triton(emit_triton(schedule.nest, SM90), SM90))
    assert schedule.rule == "gpu_contraction"
    assert report.spills == 0 and report.group_products > 0


def test_opened_where_a_result_need_not_be_read_again() -> None:
    shapes = half(8192, 768), half(50257, 768)
    graph = decompose_contractions(eliminate_dead(rewrite_logsumexp(imported(statistics, shapes))))
    assert not [n for n in graph.nodes if isinstance(n, Library)]


def test_opened_though_a_loss_reads_one_element_of_each_row() -> None:
    """Log-probabilities are in the graph for that element, and are made nowhere else."""

    def loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w.t(), targets)

    with FakeTensorMode():
        x, w = (torch.empty(n, 768, dtype=BF16, requires_grad=True) for n in (8192, 50257))
        targets = torch.empty(8192, dtype=torch.int64)
    found = capture(loss, [x, w, targets], training=True, options=Options(target="cuda:sm_90"))
    retarget(found, "cuda")
    graph = decompose_contractions(eliminate_dead(rewrite_logsumexp(import_graph(found[0]))))
    assert not [n for n in graph.nodes if isinstance(n, Library)]
    calls = [n for n in fuse(graph).graph.nodes if isinstance(n, CallTensor)]
    logits = 8192 * 50257
    assert sum(t.numel == logits for c in calls for t in c.types) == 1, "nothing of their size but the logits is made"
    assert max(int(t.numel) for c in calls[1:] for t in c.types) < logits // 1000


def test_results_that_are_spread_again_stay_apart() -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return product / product.float().amax(-1, keepdim=True)

    first, *others = opened(normed, (half(256, 32), half(32, 512)))
    assert default_schedule(first, SM90).rule == "gpu_contraction"
    assert [default_schedule(n, SM90).rule for n in others] == ["gpu_row_persistent"]
