"""Parts of a join are written by the kernels that make them, into slices of one memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from torch_mlc.codegen.host.build import build_host_program
from torch_mlc.codegen.host.memory.plan_memory import check_arena, plan_memory
from torch_mlc.codegen.host.steps.kernel_use import KernelUse
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import CallTensor, Graph, Library
from torch_mlc.ir.graph.slices import JOINED, MEMORY
from torch_mlc.ir.passes import run_passes
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.calls.memory_order import Held
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.passes.canonical.eliminate_dead import has_effect

Fn = Callable[..., Any]


def sums(x: Tensor, y: Tensor) -> Tensor:
    """One after the other."""
    return torch.cat([x.sum(1), y[..., : x.shape[-1]].sum(1)])


def side_by_side(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x.sum(0), y.sum(0)], -1)


def stacked(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.sum(0), y[..., : x.shape[-1]].sum(0)], 1)


def taken_apart(x: Tensor, y: Tensor) -> Tensor:
    """Heads behind rows become columns again."""
    a, b = (t.sum(0).view(t.shape[1], 2, -1).transpose(0, 1) for t in (x, y))
    return torch.cat([a.transpose(0, 1).flatten(1), b.transpose(0, 1).flatten(1)], 1)


def read_too(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A part that another kernel reads, and a sum of all of them."""
    a, b = x.sum(0), y.sum(0)
    c = torch.cat([a, b], 1)
    return c, c.sum(0), a.amax(1)


JOINS = (sums, side_by_side, stacked, taken_apart, read_too)

# Rows of the results are as long as the loops of kernels that sum columns.
WIDE = ((70, 4, 2080), (90, 4, 2112))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def wide(rows: int = 4) -> tuple[Tensor, Tensor]:
    return tuple(numbers(k, rows, columns) for k, _, columns in WIDE)  # type: ignore[return-value]


def operands(fn: Fn, rows: int) -> tuple[Tensor, Tensor]:
    return (numbers(70, 31 + rows, 48), numbers(90, 31 + rows, 64)) if fn is sums else wide(rows)


def fused(fn: Fn, *inputs: Tensor, dynamic: bool = False, without: str = "") -> Fusion:
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    passes = [p for p in CALL_PASSES if p.name != without]
    return run_passes(passes, fuse(graph), USUAL)


def apart(fn: Fn, *inputs: Tensor) -> Graph:
    """The graph without slices."""
    return fused(fn, *inputs, without="write_slices").graph


def joined(graph: Graph) -> int:
    targets = [n.target for n in graph.nodes if isinstance(n, Library)]
    assert targets.count(MEMORY) == targets.count(JOINED)
    return targets.count(JOINED)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
@pytest.mark.parametrize("fn", JOINS, ids=lambda f: f.__name__)
def test_no_copy_is_left(fn: Fn, dynamic: bool) -> None:
    fusion = fused(fn, *operands(fn, 4), dynamic=dynamic)
    assert joined(fusion.graph) == 1
    calls = [n for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    assert len(calls) == {read_too: 4}.get(fn, 2)
    assert sum(t is not None for c in calls for t in c.into) == 2


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
@pytest.mark.parametrize("fn", JOINS, ids=lambda f: f.__name__)
def test_compiled(fn: Fn, dynamic: bool) -> None:
    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    for rows in (4, 3):
        inputs = operands(fn, rows)
        got, expected = compiled(*inputs), fn(*(x.double() for x in inputs))
        got, expected = ((t if isinstance(t, tuple) else (t,)) for t in (got, expected))
        for a, b in zip(got, expected, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def inside(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Nothing but kernels sees the whole, which has too many parts to be made again by all who read it."""
    c = torch.cat([y[k::8].sum(0) for k in range(8)], 1)
    return c.cumsum(0).amax(1), c.logsumexp(1), x[0, 0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
def test_slices_of_an_arena(dynamic: bool) -> None:
    """Places that share none with what lives beside the slices are proved."""
    fusion = fused(inside, *wide(), dynamic=dynamic)
    called = {n.function for n in fusion.graph.nodes if isinstance(n, CallTensor)}
    program = build_host_program(fusion.graph, {f: KernelUse(f, (), True, fusion.functions[f].table) for f in called})
    planned = plan_memory(program)
    check_arena(planned)
    assert planned.arena is not None and any(name.endswith("_memory") for name in planned.arena.offsets)


@pytest.mark.parametrize("form", ["python", "native"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
def test_host_programs(form: str, dynamic: bool) -> None:
    compiled = torch.compile(inside, backend="mlc", dynamic=dynamic, options={"host_program": form})
    for rows in (4, 4, 3):
        inputs = wide(rows)
        for a, b in zip(compiled(*inputs), inside(*(x.double() for x in inputs)), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:torch-mlc")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
def test_slices_of_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    def failing(nest: object, target: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(kernels, "emit", failing)
    inputs = wide()
    compiled = torch.compile(read_too, backend="mlc", dynamic=dynamic, options={"strict": False, "cache": False})
    for a, b in zip(compiled(*inputs), read_too(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_kernels_that_are_equal_are_one_launch() -> None:
    """Slices of one memory wait for nobody."""
    fusion = fused(
        lambda x, y, z: torch.cat([x.sum(0), y.sum(0), z.sum(0)], 1), *(numbers(72, 4, 2048) + k for k in range(3))
    )
    (call,) = [n for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    assert call.count == 3 and joined(fusion.graph) == 1


def test_two_joins_that_one_function_copies() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        p, q = torch.cat([x.sum(0), y.sum(0)], 1), torch.cat([x.amax(0), y.amax(0)], 1)
        return p, q, p * q

    inputs = wide()
    assert joined(fused(fn, *inputs).graph) == 2
    inputs[0][3, 2, 5], inputs[1][0, 3] = torch.nan, torch.inf
    for a, b in zip(torch.compile(fn, backend="mlc")(*inputs), fn(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_memory_is_not_made_before_data_have_decided_its_size() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        part = x.sum(0)
        chosen = y[:, :, torch.nonzero(y[0, 0] > part[0, 0]).flatten()]
        return torch.cat([part, chosen.sum(0)], 1), chosen.amax((1, 2))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        inputs = wide()
        compiled = torch.compile(fn, backend="mlc", fullgraph=True)
        for a, b in zip(compiled(*inputs), fn(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_joins_that_would_raise_the_peak_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between the parts would be held beside the whole."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = x.sum(0)
        scale = torch.linalg.qr(y[:3] + first.sum()).R.amax()
        return torch.cat([first, (y * scale).sum(0)], 1), scale

    def most(graph: Graph) -> int:
        return max(Held.of(graph).bytes)

    inputs = numbers(70, 4, 2080), numbers(9, 4, 9000)
    least = most(apart(fn, *inputs))
    assert most(fused(fn, *inputs).graph) <= least
    monkeypatch.setattr("torch_mlc.scheduler.calls.memory_order.MORE", 10)
    far = fused(fn, *inputs).graph
    assert joined(far) == 1 and most(far) > least


def test_what_is_held_is_that_of_the_graph_with_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifetimes that joins change one by one are those that the new graph has."""
    found: list[Held] = []
    of = Held.of

    def kept(graph: Graph) -> Held:
        found.append(of(graph))
        return found[-1]

    monkeypatch.setattr(Held, "of", kept)
    for fn in (*JOINS, inside):
        graph = fused(fn, *operands(fn, 4)).graph
        assert joined(graph)
        assert max(found[-1].bytes) == max(of(graph).bytes), fn


def test_results_are_written_over_a_join_that_nobody_reads_again() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        c = torch.cat([x.sum(0), y.sum(0)], 1)
        return torch.relu(c - torch.linalg.qr(c[:, :3]).R.amax())

    inputs = wide()
    graph = fused(fn, *inputs).graph
    (name,) = [n.names[0] for n in graph.nodes if isinstance(n, Library) and n.target == JOINED]
    assert [n.into for n in graph.nodes if isinstance(n, CallTensor)][-1] == (name,)
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(*inputs), fn(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "sizes"])
@pytest.mark.parametrize("rows, columns", [(0, 2080), (4, 0), (0, 0), (1, 1)])
def test_few_elements_or_none(rows: int, columns: int, dynamic: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.cat([x.sum(0), y.sum(0)], 1)
        return c, c.cumsum(1)

    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    for shape in ((4, 2080), (rows, columns)):
        inputs = numbers(70, *shape).double(), numbers(90, shape[0], 2112).double()
        for a, b in zip(compiled(*inputs), fn(*inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_sizes_that_the_host_program_makes() -> None:
    """A part is as long as float arithmetic tells."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        part = y[:, :, : int(1.5 * x.shape[2])].sum(0)
        return torch.cat([x.sum(0), part], 1)

    compiled = torch.compile(fn, backend="mlc", dynamic=True)
    for columns in (1333, 2048, 1021):
        inputs = numbers(70, 4, columns), numbers(90, 4, 4000)
        torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=1e-5, atol=1e-5)
    report = torch_mlc.explain(fn, *inputs, dynamic=True)
    assert "_memory" in report.graphs[0].program


def test_a_join_that_is_a_result_and_saved() -> None:
    """Nobody sees slices: a caller may write over the result where eager lets it, and views of it are its views."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = torch.cat([x.sum(0), y.sum(0)], 1)
        return c, c[:, 3:40], (c * c.detach().cos()).sum(0)

    def run(call: Fn) -> list[Tensor]:
        x, y = (t.double().requires_grad_() for t in wide())
        c, view, more = call(x, y)
        assert view._base is not None and view.data_ptr() == c.data_ptr() + 24
        return [c, view, more, *torch.autograd.grad(more.square().sum() + view.sum(), (x, y))]

    for a, b in zip(run(torch.compile(fn, backend="mlc")), run(fn), strict=True):
        torch.testing.assert_close(a, b)


def test_graphs_with_slices_are_ordered_for_memory() -> None:
    """The calls that stand around slices have no effect of their own."""
    for node in fused(side_by_side, *wide()).graph.nodes:
        assert not has_effect(node)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (torch.cat([(a := x.sum(0)), y.sum(0)], 1), a),
        lambda x, y: torch.stack([x.sum(0), x.amax(0)], -1),
        lambda x, y: torch.cat([x.sum(0), y[0]], 1),
        lambda x, y: torch.cat([x.sum(0), torch.linalg.qr(y.sum(0)).R[:1].expand(x.shape[1], -1)], 1),
        lambda x, y: torch.cat([(a := x.sum(0)), a], 1),
        lambda x, y: torch.cat([t.sum(0).view(130, -1) for t in (x, y[:, :, :2080])], 1),
    ],
    ids=["a part leaves", "elements apart", "an input", "a library", "twice", "short loops"],
)
def test_others_are_copied(fn: Fn) -> None:
    assert joined(fused(fn, *wide()).graph) == 0


def test_orders_of_dimensions_that_differ_are_copied() -> None:
    """A kernel makes rows; in the join they would be columns, an element in each row."""
    fusion = fused(lambda x, y: torch.cat([x.sum(0).t(), y.sum(0)[:, :4]]), *wide())
    assert joined(fusion.graph) == 0


class Attention(nn.Module):
    """Queries, keys and values of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(2, -1, 4, 16).transpose(1, 2) for t in self.project(x).split(64, -1))
        scores = torch.tanh(q @ k.mT / 4) * 3
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("target", [None, "cuda:sm_90"])
def test_gradients_of_queries_keys_and_values_of_one_projection(target: str | None) -> None:
    x = numbers(2, 70, 64).requires_grad_()
    backward = torch_mlc.explain(Attention(), x, training=True, target=target).graphs[1]
    products = [k for k in backward.kernels if "attention" in k.rule]
    assert len(products) == 2
    for k in products:
        assert k.function is not None
        assert all(o.buffer.strides[0] == 70 * 192 for o in k.function.outputs if len(o.buffer.shape) == 4), str(
            backward
        )
    assert all("cat" not in k.name or "sum" in k.name for k in backward.kernels)


def test_gradients_through_slices() -> None:
    torch.manual_seed(0)
    model, x = Attention(), numbers(2, 37, 64)

    def gradients(call: Fn, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *parameters])]

    got = gradients(torch.compile(model, backend="mlc"), x, list(model.parameters()))
    wide = Attention().double()
    wide.load_state_dict(model.state_dict())
    for a, b in zip(got, gradients(wide, x.double(), list(wide.parameters())), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
