"""Sums of rows by sorted segments on GPUs: interpreted against float64, whatever goes where, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.converters.index import scatter as scatters
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.reports.traffic import traffic_of
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor, Input, Library, Ref, SizeInput, TensorType, View
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.fusion.fusion import Fusion
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")


@pytest.fixture(autouse=True)
def sorted_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables, for which atomic operations would be cheaper, too."""
    monkeypatch.setattr(scatters, "is_cheaper", lambda *_: True)


def fused(fn: Callable[..., Any], inputs: tuple[Any, ...], dynamic: bool = False) -> Fusion:
    gms = capture(fn, inputs, dynamic=dynamic)
    retarget(gms, "cuda")
    context = context_of(Options(target="cuda:sm_90"))
    graph = run_passes(GRAPH_PASSES, import_graph(gms[0]), context)
    return run_passes(CALL_PASSES, fuse(graph, context), context)


def interpreted(interpreter: Any, fusion: Fusion, inputs: tuple[Tensor, ...]) -> Tensor:
    """The first output of a graph: kernels in Triton's interpreter, library calls by torch."""
    graph, made, sizes = fusion.graph, dict[str, Tensor](), dict[sympy.Basic, sympy.Basic]()
    left = list(inputs)
    for i in graph.inputs:
        if isinstance(i, Input):  # those of one type and rank come in their order
            made[i.name] = left.pop(next(k for k, t in enumerate(left) if is_of(t, i.type)))
            sizes |= {e: sympy.Integer(n) for e, n in zip(i.type.shape, made[i.name].shape) if e.is_Symbol}
    assert all(isinstance(i, (Input, SizeInput)) for i in graph.inputs)
    rules = []
    for node in graph.nodes:
        match node:
            case Library():
                packet, _, overload = node.target.removeprefix("aten::").partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload)
                given = [made[a.name] if isinstance(a, Ref) else a for a in node.args]
                results = op(*given, **dict(node.kwargs))
                made |= dict(zip(node.names, results if isinstance(results, tuple) else (results,), strict=True))
            case View():
                shape, strides = (
                    [int(e.xreplace(sizes)) for e in part] for part in (node.type.shape, node.type.strides)
                )
                made[node.name] = made[node.source].as_strided(shape, strides, int(node.offset))
            case CallTensor():
                schedule = default_schedule(lower_to_loops(fusion.functions[node.function]), SM90)
                rules.append(schedule.rule)
                source = emit_triton(schedule.nest, SM90)
                own = dict(zip(source.symbols, (int(e.xreplace(sizes)) for e in node.sizes), strict=True))
                buffers = schedule.nest.buffers
                given = {
                    b.name: array(made[a].reshape([size(n, own) for n in buffers[b.name].shape]))
                    for b, a in zip(fusion.functions[node.function].inputs, node.args, strict=True)
                }
                found = interpreter.run(source, schedule.nest.outputs, given, own)
                for name, kind, out in zip(node.names, node.types, schedule.nest.outputs, strict=True):
                    made[name] = torch.from_numpy(np.asarray(found[out]).astype(wide(kind.dtype.numpy))).to(
                        kind.dtype.torch
                    )
    assert "gpu_segments" in rules, rules
    assert not any("scatter" in r for r in rules)
    return made[graph.outputs[0]]  # type: ignore[index]


def is_of(t: Tensor, kind: TensorType) -> bool:
    shape = zip(kind.shape, t.shape, strict=False)
    return t.dtype is kind.dtype.torch and t.ndim == len(kind.shape) and all(e.is_Symbol or e == n for e, n in shape)


def size(extent: sympy.Expr, sizes: dict[str, int]) -> int:
    return int(extent.xreplace({s: sympy.Integer(sizes[s.name]) for s in extent.free_symbols}))


def array(t: Tensor) -> Any:
    import ml_dtypes

    if t.dtype is torch.bfloat16:
        return t.float().numpy().astype(ml_dtypes.bfloat16)
    return t.contiguous().numpy()


def wide(dtype: Any) -> Any:
    return np.float32 if np.dtype(dtype).itemsize == 2 else dtype


def gradient(rows: int, padding: int = -1) -> Callable[..., Tensor]:
    return lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, rows, padding, False)


def exact(table: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """In float64, what is out of range left out."""
    index, source = index.reshape(-1), source.double().reshape(index.numel(), -1)
    keep = (index >= 0) & (index < table.shape[0])
    return table.double().index_add(0, index[keep].long(), source[keep])


PLACES: dict[str, Callable[[int, int], Tensor]] = {
    "few of many": lambda n, rows: torch.randint(0, rows, (n,)),
    "all to one": lambda n, rows: torch.full((n,), rows - 1),
    "two halves": lambda n, rows: (torch.arange(n) * 2 // n) * (rows - 2),
    "one each": lambda n, rows: torch.randperm(n) % rows,
    "a frequent one": lambda n, rows: torch.where(torch.rand(n) < 0.4, 3, torch.randint(0, rows, (n,))),
}


@pytest.mark.parametrize(
    ("places", "count", "rows", "width"),
    [("few of many", 37, 11, 40), ("one each", 21, 90, 5), *((p, 300, 13, 33) for p in PLACES)],
)
def test_gradients_of_embeddings(interpreter: Any, places: str, count: int, rows: int, width: int) -> None:
    torch.manual_seed(count)
    g, i = torch.randn(count, width), PLACES[places](count, rows)
    found = interpreted(interpreter, fused(gradient(rows), (g, i)), (g, i))
    torch.testing.assert_close(found, exact(torch.zeros(rows, width), i, g).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_rounded_once(interpreter: Any, dtype: torch.dtype) -> None:
    g, i = torch.randn(260, 64).to(dtype), torch.randint(0, 9, (260,)).int()
    found = interpreted(interpreter, fused(gradient(9, padding=4), (g, i)), (g, i))
    wanted = exact(torch.zeros(9, 64), torch.where(i == 4, -1, i), g).float().to(dtype)
    torch.testing.assert_close(found, wanted, rtol=2**-8 if dtype is torch.bfloat16 else 2**-10, atol=1e-4)


def test_nan_and_infinities_stay_with_their_rows(interpreter: Any) -> None:
    g, i = torch.ones(300, 8), torch.arange(300) % 7
    g[5, 1], g[9, 2], g[13] = float("nan"), float("inf"), float("-inf")
    found = interpreted(interpreter, fused(gradient(8), (g, i)), (g, i))
    torch.testing.assert_close(found, exact(torch.zeros(8, 8), i, g).float(), equal_nan=True)


def test_places_out_of_range_are_left_out(interpreter: Any) -> None:
    g, i = torch.randn(200, 8), torch.randint(-3, 12, (200,))
    found = interpreted(interpreter, fused(gradient(9), (g, i)), (g, i))
    torch.testing.assert_close(found, exact(torch.zeros(9, 8), i, g).float(), rtol=1e-5, atol=1e-5)


def test_symbolic_sizes(interpreter: Any) -> None:
    def fn(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.index_add(0, i, v * 2)

    made = fused(fn, (torch.zeros(19, 36), torch.zeros(300, dtype=torch.int64), torch.zeros(300, 36)), dynamic=True)
    for rows, count, width in ((19, 300, 36), (7, 230, 5), (40, 3, 33)):
        inputs = torch.randn(rows, width), torch.randint(0, rows, (count,)), torch.randn(count, width)
        x, i, v = inputs
        found = interpreted(interpreter, made, inputs)
        torch.testing.assert_close(found, exact(x, i, v * 2).float(), rtol=1e-5, atol=1e-4)


def batched(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    """Places of two dimensions, the rows of a list of two, columns between them."""
    list_of = i.reshape(5, 60)
    return torch.ops.aten.index_put(x, [list_of, None, list_of % 3], v.reshape(5, 60, 12), True)


def middle(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    return x.index_add(1, i % 12, v[:19, :36].reshape(19, 12, 3).repeat(1, 25, 1), alpha=-0.5)


def whole_rows(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
    return x.reshape(19, 36).scatter_add(0, i[:, None].expand(300, 36), v[:, :36])


def test_single_elements(interpreter: Any) -> None:
    """Rows of one element, where a fixed order is asked for."""
    inputs = torch.randn(19).double(), torch.randint(0, 19, (300,)), torch.randn(300).double()
    x, i, v = inputs
    found = interpreted(interpreter, fused(lambda x, i, v: x.index_add(0, i, v), inputs), inputs)
    torch.testing.assert_close(found, x.index_add(0, i, v))


def test_other_sums_of_rows(interpreter: Any) -> None:
    for fn in (whole_rows, middle, batched):
        inputs = torch.randn(19, 12, 3), torch.randint(0, 19, (300,)), torch.randn(300, 36 if fn is not batched else 12)
        found = interpreted(interpreter, fused(fn, inputs), inputs)
        x, i, v = inputs
        torch.testing.assert_close(found, fn(x.double(), i, v.double()).float(), rtol=1e-5, atol=1e-4)


def test_no_table_no_list_no_features() -> None:
    for rows, count, width in ((5, 0, 3), (5, 4, 0)):
        fused(gradient(rows), (torch.zeros(count, width), torch.zeros(count, dtype=torch.int64)))


def test_the_order_of_a_sum_is_fixed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, for which atomic operations are cheaper: without a fixed order they are taken."""
    monkeypatch.undo()
    inputs = torch.zeros(64, 32), torch.zeros(64, dtype=torch.int64)
    names = [f.name for f in fused(gradient(50), inputs).functions.values()]
    assert any(n.startswith("scatter") for n in names)
    torch.use_deterministic_algorithms(True)
    try:
        made = fused(gradient(50), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(f.scatters for f in made.functions.values())
    assert [n.target for n in made.graph.nodes if isinstance(n, Library)] == ["aten::sort.stable"]


def test_each_row_of_a_table_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a half type, of a vocabulary: no copy in float32, no fill, four kernels beside the sort, and vectors
    of 16 bytes."""
    monkeypatch.undo()
    made = fused(
        gradient(50257), (torch.zeros(16384, 768, dtype=torch.bfloat16), torch.zeros(16384, dtype=torch.int64))
    )
    calls = [n for n in made.graph.nodes if isinstance(n, CallTensor)]
    assert len(calls) == 4 and sum(isinstance(n, Library) for n in made.graph.nodes) == 1
    last = made.functions[calls[-1].function]
    assert [(str(o.buffer.dtype), tuple(map(int, o.buffer.shape))) for o in last.outputs] == [
        ("DType.BFLOAT16", (50257, 768))
    ]
    schedule = default_schedule(lower_to_loops(last), SM90)
    assert schedule.rule == "gpu_segments"
    compiled = resource_report(compile_triton(emit_triton(schedule.nest, SM90), SM90))
    assert compiled.spills == 0 and compiled.registers <= 64, (compiled.spills, compiled.registers)


def tied(rows: int) -> Callable[..., Tensor]:
    """The gradient of a table that is looked up in and multiplied by."""
    return lambda a, b, g, i: a @ b + torch.ops.aten.embedding_dense_backward(g, i, rows, -1, False)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 13), (torch.bfloat16, 77)], ids=str)
def test_rows_that_nothing_goes_to_stay_as_they_are(interpreter: Any, dtype: torch.dtype, rows: int) -> None:
    """Sums are added to a product's result where it is: NaN, infinities and zeros of either sign in other rows too."""
    torch.manual_seed(0)
    a, b, g = torch.randn(rows, 7), torch.randn(7, 33), torch.randn(300, 33)
    i = torch.where(torch.rand(300) < 0.4, 3, torch.randint(-2, 9, (300,)) * 2)
    a[1], a[5], a[7], b[3, 4] = float("nan"), 0.0, -0.0, float("inf")
    inputs = (*(t.to(dtype) for t in (a, b, g)), i)
    made = fused(tied(rows), inputs)
    last = next(n for n in reversed(made.graph.nodes) if isinstance(n, CallTensor))
    assert last.into, "the result is in the place of the product"
    found = interpreted(interpreter, made, inputs)
    a, b, g = (t.double() for t in inputs[:3])
    wanted = exact((a @ b).to(dtype), i, g).to(dtype)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=2**-7 if dtype.itemsize == 2 else 1e-5, atol=1e-4)


def test_of_a_large_table_the_rows_that_are_named_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most as many as the list has, by stores of 16 bytes; and what is summed is read as it is in memory, rather
    than made of two tensors for each row that is named."""
    monkeypatch.undo()
    rows, count, width, kind = 50257, 8192, 768, torch.bfloat16

    def step(a: Tensor, b: Tensor, g: Tensor, x: Tensor, w: Tensor, m: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.ops.aten.native_layer_norm_backward(g, x, [width], m, m, w, w, [True, False, False])[0]
        e = norm + b
        return tied(rows)(a.t(), b, e, i), e.view(8, -1, width).sum(0)

    with FakeTensorMode():
        a, w, m = (torch.empty(s, dtype=kind) for s in ((count, rows), (width,), (count, 1)))
        b, g, x = (torch.empty(count, width, dtype=kind) for _ in range(3))
        made = fused(step, (a, b, g, x, w, m, torch.empty(count, dtype=torch.int64)))
    last = next(n for n in made.graph.nodes if isinstance(n, CallTensor) and n.types[0].shape == (rows, width))
    schedule = default_schedule(lower_to_loops(made.functions[last.function]), SM90)
    assert schedule.rule == "gpu_segments"
    traffic, row = traffic_of(schedule.nest), width * kind.itemsize
    table = traffic.arrays[schedule.nest.outputs[0]]
    assert table.read == table.written == count * row
    assert traffic.moved < 3.5 * count * row, "rows of the table, read and written, and of what is summed"
    compiled = resource_report(compile_triton(emit_triton(schedule.nest, SM90), SM90))
    assert compiled.spills == 0 and compiled.wide_stores == 1
