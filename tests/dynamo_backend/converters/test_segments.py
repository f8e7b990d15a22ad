"""Rows combined by segment, bags of embeddings, histograms: kernels alone, with eager's answers and errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.value import walk
from torch_mlc.ir.graph.graph import Graph
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.fusion.fuse import fuse

pytestmark = pytest.mark.usefixtures("fresh_compiler")
Check = Callable[..., Graph]

LENGTHS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "row": ((7,), 0, [2, 0, 4, 1]),
    "rows": ((7, 3), 0, [0, 0, 7]),
    "columns": ((2, 5, 3), 1, [[2, 3, 0], [0, 1, 4]]),
}


@pytest.mark.parametrize("how", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("name", LENGTHS)
def test_segments(check: Check, name: str, how: str) -> None:
    shape, axis, counts = LENGTHS[name]
    x, lengths = torch.randn(shape), torch.tensor(counts)
    x.view(-1)[3] = torch.nan
    ends = lengths.cumsum(axis)
    offsets = torch.cat((torch.zeros_like(ends.narrow(axis, 0, 1)), ends), axis)

    def f(x: Tensor, n: Tensor, o: Tensor) -> list[Tensor]:
        by = ({"lengths": n}, {"lengths": n, "unsafe": True}, {"offsets": o})
        return [torch.segment_reduce(x, how, axis=axis, initial=i, **k) for k in by for i in (None, 1.5)]

    check(f, x, lengths, offsets)


def test_searches_for_places(trace: Callable[..., Any]) -> None:
    """A search has as many steps as their number has bits, and is not written out where rows are scattered."""

    def f(x: Tensor, ends: Tensor) -> Tensor:
        place = torch.bucketize(torch.arange(400), ends, right=True)
        return torch.zeros(201, 2).index_add(0, place, x)

    given = torch.randn(400, 2), torch.arange(0, 400, 2)
    traced = trace(f, given)
    functions = fuse(import_graph(traced, given)).functions.values()
    scattered = [v for f in functions if f.scatters for s in f.stages for v in s.values]
    assert scattered and max(sum(1 for _ in walk(v)) for v in scattered) < 1000


def test_searches_make_each_step_once(trace: Callable[..., Any]) -> None:
    given = torch.randn(100), torch.linspace(-3, 3, 5000)
    traced = trace(lambda x, ends: torch.bucketize(x, ends), given)
    stages = compile_graph(traced, (), options=Options(strict=True), load=False, fresh=True).stages
    assert stages is not None
    (kernel,) = stages.kernels.values()
    assert kernel.source is not None
    steps = (5000).bit_length()
    assert kernel.source.text.count("fcmp") < 8 * steps, "a comparison for each step, in a few copies of the loop"


def test_lengths_that_do_not_fit() -> None:
    run = torch.compile(lambda x, n: torch.segment_reduce(x, "sum", lengths=n), backend="mlc")
    x = torch.arange(6.0)
    assert run(x, torch.tensor([2, 0, 4])).tolist() == [1, 0, 14]
    for wrong in ([2, 0, 3], [2, 0, 5], [7, -1, 0]):
        with pytest.raises(RuntimeError):
            torch.segment_reduce(x, "sum", lengths=torch.tensor(wrong))
        with pytest.raises(RuntimeError):
            run(x, torch.tensor(wrong))
    assert run(x, torch.tensor([6, 0, 0])).tolist() == [15, 0, 0]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("sum", torch.float64), ("mean", torch.float64), ("max", torch.float32), ("max", torch.bfloat16)],
)
def test_bags(check: Check, mode: str, dtype: torch.dtype) -> None:
    table = torch.randn(9, 5).to(dtype)
    indices, offsets = torch.tensor([0, 8, 3, 3, 1, 7]), torch.tensor([0, 0, 2, 6])
    bag = torch.nn.functional.embedding_bag

    def f(t: Tensor, i: Tensor, o: Tensor) -> list[Tensor]:
        ways: tuple[dict[str, Any], ...] = ({}, {"padding_idx": 3}, {"include_last_offset": True})
        return [bag(i, t, o, mode=mode, **k) for k in ways]

    check(f, table, indices, offsets)
    if mode == "sum":
        check(lambda t, i, o, w: bag(i, t, o, mode="sum", per_sample_weights=w), table, indices, offsets, table[:6, 0])


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["max", "sum", "mean"])
def test_bags_of_rows_that_are_no_numbers(check: Check, mode: str, padding: int | None) -> None:
    """Of a maximum, NaN counts where it is the first of a bag only."""
    nan, inf = math.nan, math.inf
    table = torch.tensor([[nan, 1.0], [2.0, nan], [3.0, 4.0], [nan, nan], [-inf, 5.0], [inf, -inf]])
    bags = torch.tensor(list(itertools.product(range(6), repeat=3)))
    check(lambda w, i: torch.nn.functional.embedding_bag(i, w, mode=mode, padding_idx=padding), table, bags)
    ends = torch.tensor([0, 0, 4, 5, 640])
    check(lambda w, i, e: torch.nn.functional.embedding_bag(i, w, e, mode=mode), table, bags.flatten(), ends)


def test_a_bag_of_what_is_not_there() -> None:
    bag = torch.nn.functional.embedding_bag
    run = torch.compile(lambda i, t: bag(i, t, mode="mean"), backend="mlc")
    table = torch.randn(9, 5)
    good = torch.tensor([[0, 8], [1, 1]])
    torch.testing.assert_close(run(good, table), bag(good, table, mode="mean"))
    with pytest.raises((IndexError, RuntimeError)):
        run(torch.tensor([[0, 9], [1, 1]]), table)


def test_histograms(check: Check) -> None:
    x, w = torch.randn(64), torch.rand(64)
    check(lambda x: torch.histogram(x, 7), x)
    check(lambda x: torch.histogram(x, 5, range=(-1.0, 1.5)), x.double())
    check(lambda x, w: torch.histogram(x, 6, weight=w, density=True), x, w)
    check(lambda x: torch.histogram(x, 3), torch.full((4, 2), 2.5))
    check(lambda x: torch.histogram(x, 2).bin_edges, torch.empty(0, 3))
    # Each edge of tenths, and what is one rounding beside it.
    tenths = torch.arange(11, dtype=torch.float32) / 10
    near = torch.cat((tenths, *(torch.nextafter(tenths, torch.tensor(e)) for e in (-1.0, 2.0))))
    check(lambda x: torch.histogram(x, 10, range=(0.0, 1.0)), near)


def test_histograms_of_points(check: Check) -> None:
    x, w = torch.randn(40, 2), torch.rand(40)
    check(lambda x: [torch.histogramdd(x, [3, 4]).hist, *torch.histogramdd(x, [3, 4]).bin_edges], x)
    check(lambda x, w: torch.histogramdd(x, [2, 5], weight=w, density=True).hist, x, w)
    check(lambda x: torch.histogramdd(x, [4], range=[-1.0, 1.0]).hist, x[:, :1])


def test_a_histogram_without_a_range() -> None:
    run = torch.compile(lambda x: torch.histogram(x, 4).hist, backend="mlc")
    assert run(torch.tensor([0.0, 1.0, 2.0, 4.0])).tolist() == [1, 1, 1, 1]
    for value in (torch.nan, torch.inf):
        with pytest.raises(RuntimeError):
            run(torch.tensor([0.0, 1.0, value, 4.0]))


def test_histograms_between_given_edges(check: Check) -> None:
    x, w = torch.randn(64), torch.rand(64)
    x[3], x[4], x[5] = torch.nan, torch.inf, -torch.inf
    edges = torch.tensor([-1.5, -0.25, -0.25, 0.5, 2.0])
    x[6:11] = edges  # on the edges: to the right, but for the last
    check(lambda x, e: list(torch.histogram(x, e)), x, edges)
    check(lambda x, e, w: list(torch.histogram(x, e, weight=w)), x.view(8, 8), edges, w.view(8, 8))
    check(lambda x, e, w: list(torch.histogram(x, e, weight=w, density=True)), x, edges[[0, 1, 3]], w)
    check(lambda x, e: list(torch.histogram(x, e)), x[:0], edges)

    def f(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.histogramdd(x, [a, b], density=d).hist for d in (False, True)]

    check(f, torch.randn(50, 2), edges[[0, 1, 3]], edges[[0, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_histograms_of_the_range_that_there_is(check: Check, dtype: torch.dtype) -> None:
    x = torch.randn(90).to(dtype)
    check(lambda x: [torch.histc(x, 7), torch.histc(x, 5, -1, 2), torch.histc(x, 4, 3, 3)], x)
    check(lambda x: torch.histc(x, 3), torch.full((5, 2), 2.5, dtype=dtype))
    check(lambda x: torch.histc(x, 3), x[:0])


def test_a_range_of_no_number() -> None:
    run = torch.compile(lambda x: torch.histc(x, 4), backend="mlc")
    assert run(torch.tensor([0.0, 1.0, 2.0, 4.0])).tolist() == [1, 1, 1, 1]
    with pytest.raises(RuntimeError):
        run(torch.tensor([0.0, 1.0, torch.inf, 4.0]))


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, torch.inf])
def test_rows_that_are_made_shorter(check: Check, p: float) -> None:
    def f(w: Tensor, i: Tensor) -> Tensor:
        return torch.ops.aten.embedding_renorm(w, i, 1.5, p)

    for w in (torch.randn(7, 5), torch.randn(5, 7).t(), torch.randn(4, 1), torch.rand(3, 4) / 9):
        check(f, w, torch.tensor([[0, 2], [2, 1]]))
    check(f, torch.randn(4, 6).half(), torch.tensor([3]))


def test_rows_are_made_shorter_where_they_are() -> None:
    def f(i: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.embedding(i, w, max_norm=1.0)

    i, w = torch.tensor([4, 1, 4]), torch.randn(6, 3) * 2
    ours, theirs = w.clone(), w.clone()
    torch.testing.assert_close(torch.compile(f, backend="mlc")(i, ours), f(i, theirs))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises((IndexError, RuntimeError)):
        torch.compile(f, backend="mlc")(torch.tensor([6]), ours)


def test_what_is_written_by_other_strides(check: Check) -> None:
    x, v = torch.randn(4, 6), torch.randn(3, 2)
    check(lambda x, v: torch.as_strided_scatter(x * 2, v, (3, 2), (6, 2), 1), x, v)
    check(lambda x, v: torch.as_strided_scatter(x * 2, v, (3, 2), (1, 4), 0), x.t(), v)
    check(lambda x, v: torch.as_strided_scatter((x * 2)[1:], v, (3, 2), (6, 1), 7), x, v)
    check(lambda x, v: torch.as_strided_scatter(x, v, (3, 2), (6, 2)), x, v)
    check(lambda x, v: torch.as_strided_scatter(x[:1].expand(4, 6), v, (3, 2), (6, 1), 7), x, v)


def test_what_is_written_into_expanded_operands(check: Check) -> None:
    """Eager first gives each element memory of its own."""
    x, v = torch.randn(1, 6), torch.randn(2, 6)
    check(lambda x, v: torch.slice_scatter(x.expand(4, 6), v, 0, 1, 3), x, v)
    check(lambda x, v: torch.select_scatter(x.expand(4, 6), v[0], 0, -2), x, v)
    check(lambda x, v: torch.diagonal_scatter(x.expand(4, 6), v[1, :4], 1), x, v)
    nothing = torch.empty(1, 0, 1), torch.empty(2, 0, 2)
    scatter = ["aten::slice_scatter.default"]
    check(lambda x, v: torch.slice_scatter(x.expand(4, 0, 2), v, 0, 1, 3), *nothing, library=scatter)

    def part(x: Tensor, i: Tensor) -> Tensor:
        t = torch.bincount(x, minlength=6).expand(2, -1)[::2]
        t[i] = 0
        return t

    args = torch.tensor([0, 3, 3]), torch.tensor([[True, False, True, False, False, False]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(part, backend="mlc", fullgraph=True)(*args)
    assert torch.equal(found, part(*args)) and found.tolist() == [[0, 0, 0, 2, 0, 0]]
