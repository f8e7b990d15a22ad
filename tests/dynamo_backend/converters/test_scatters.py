"""Scatters: imported by the oracle, compiled against eager and float64, in place, and with indices out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc
from torch_mlc.ir.errors import OutOfRangeError
from torch_mlc.ir.graph.graph import Graph
from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Any:
    return torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)


def agree(fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **tolerance: float) -> None:
    torch.testing.assert_close(compiled(fn, *inputs, dynamic=dynamic), fn(*inputs), equal_nan=True, **tolerance)


def kernels(fn: Callable[..., Any], *inputs: Any) -> list[Any]:
    (graph,) = torch_mlc.explain(fn, *inputs).graphs
    assert not graph.libraries, graph.libraries
    return list(graph.kernels)


def indices(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, below, shape, dtype=dtype)


def test_what_is_made_of_several_results_is_stored_before_it_is_scattered() -> None:
    """The gradient of an embedding before a norm: the kernel of the norm makes one tensor, and nothing else is kept."""

    def gradient(z: Tensor, x: Tensor, w: Tensor, i: Tensor, out: Tensor) -> Tensor:
        a = (z * 2).softmax(0)
        b = a * x
        dx = a + w * (b - x * (b * x).sum(-1, keepdim=True))
        return out.index_add(0, i, dx)

    z, x, i, out = torch.randn(32, 64), torch.randn(32, 64), indices(32, below=9), torch.zeros(9, 64)
    agree(gradient, z, x, torch.randn(64), i, out, rtol=1e-4, atol=1e-5)
    (scatter,) = [k.function for k in kernels(gradient, z, x, torch.randn(64), i, out) if k.function.scatters]
    assert {tuple(map(int, b.shape)) for b in scatter.inputs} == {(9, 64), (32,), (32, 64)} and len(scatter.inputs) == 3


# --- import -----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_meaning_of_each_op(check: Callable[..., Graph], dynamic: bool) -> None:
    x, v = torch.randn(5, 7), torch.randn(4, 7)
    rows, each = torch.tensor([3, 0, 3, 1]), indices(4, 6, below=5)
    check(lambda x, v, i: (x.index_add(0, i, v), x.index_add(0, i, v, alpha=-0.5)), x, v, rows, dynamic=dynamic)
    check(lambda x, v, i: x.index_copy(0, i[1:], v[1:]), x, v, rows.flip(0) % 4, dynamic=dynamic)
    check(lambda x, i: (x.index_fill(1, i, 2.0), x.index_fill(0, i - 4, x[0, 0])), x, rows, dynamic=dynamic)
    check(lambda x, v, i: (x.scatter_add(0, i, v), x.scatter_add(1, i, v)), x, v, each, dynamic=dynamic)
    check(lambda x, v, i: x.scatter(1, i[:, :2], v.flip(1)), x, v, torch.tensor([[0, 6], [1, 2], [3, 4], [6, 5]]))
    check(lambda x, v, i: (x.index_put((i,), v, True), x.index_put((i - 5,), v[0], True)), x, v, rows)
    check(lambda x, v, i: x.index_put((i, i), v[:, 0], accumulate=True), x, v, rows, dynamic=dynamic)
    check(lambda x, v, i: x.put(i, v[:, :6], accumulate=True), x, v, each * 7 - 1)
    check(lambda x, v, i: x.scatter(0, i, v, reduce="multiply"), x, v, each)


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_reductions_by_name(check: Callable[..., Graph], how: str, include: bool, dtype: torch.dtype) -> None:
    x, v, i = ((torch.randn(5, 3) * 4).to(dtype), (torch.randn(6, 3) * 4).to(dtype), indices(6, 2, below=5))
    loose = {"rtol": 0.1, "atol": 0.1} if dtype is torch.bfloat16 else {}
    check(lambda x, v, i: x.scatter_reduce(0, i, v, how, include_self=include), x, v, i, fast=True, **loose)
    if how != "sum":
        check(lambda x, v, i: x.index_reduce(0, i, v, how, include_self=include), x, v, i[:, 0], fast=True, **loose)


@pytest.mark.parametrize("how", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("include", [True, False])
def test_reductions_of_bools(check: Callable[..., Graph], how: str, include: bool) -> None:
    x, v, i = torch.rand(5, 3) < 0.5, torch.rand(9, 3) < 0.5, indices(9, 2, below=5)
    check(lambda x, v, i: x.scatter_reduce(0, i, v, how, include_self=include), x, v, i, fast=True)
    if how == "amin" and not include:
        agree(lambda x, v, i: [x.scatter_reduce(0, i, v, h) for h in ("sum", "prod", "amax", "amin")], x, v, i)


def test_put_in_the_order_of_two_shapes(check: Callable[..., Graph]) -> None:
    x, place = torch.randn(4, 5), torch.randperm(20)[:12] - 10
    for index, source in ((place.view(2, 6), (3, 4)), (place.view(3, 4), (12,)), (place.view(4, 1, 3), (2, 6))):
        v = torch.randn(source)
        check(lambda x, i, v: (x.put(i, v), x.t().put(i, v, accumulate=True)), x, index, v)
    check(lambda x, i, v: (x.put(i, v.t()), x.t().put(i, v)), x, place.view(3, 4), torch.randn(4, 3), dynamic=True)
    number, one = torch.tensor(2.0), torch.tensor([0, -1])
    check(lambda x, i, v: (x.put(i, v, True), x.put(i[1], v[0])), number, one, torch.tensor([3.0, 5.0]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_put_of_another_number_of_values_is_refused(dynamic: bool) -> None:
    for index, source in (((2, 3), (2,)), ((2, 3), (3, 3)), ((2,), (3, 3))):
        with pytest.raises(IndexError, match="same number of element"):
            at = torch.zeros(index, dtype=torch.int64)
            compiled(lambda x, i, v: x.put(i, v), torch.randn(4, 5), at, torch.randn(source), dynamic=dynamic)


def test_windows_and_histograms(check: Callable[..., Graph]) -> None:
    check(lambda g: torch.ops.aten.unfold_backward(g, [4, 11], 1, 3, 2), torch.randn(4, 5, 3))
    check(lambda g: torch.ops.aten.unfold_backward(g, [9, 4], 0, 2, 3), torch.randn(3, 4, 2).bfloat16())
    check(lambda g: torch.ops.aten.unfold_backward(g, [3, 11, 2], 1, 3, 2), torch.randn(1, 5, 1, 3))
    x = torch.tensor([-3.0, -2.0, -1.99, 0.0, 0.5, 1.0, 2.9999, 3.0, 3.001, float("nan"), float("inf")])
    check(lambda x: (x.histc(7, -2, 3), x.double().histc(5, 0, 1)), x)


def test_assignments_by_several_indices(check: Callable[..., Graph]) -> None:
    x, i = torch.randn(3, 4, 5, 2), torch.tensor([[0, 2], [1, 2]])

    def assigned(*where: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def fn(x: Tensor, i: Tensor) -> Tensor:
            y = x.clone()
            y[tuple(i if w == "i" else w for w in where)] = y.sum()
            return y

        return fn

    for where in (("i",), (slice(None), "i"), ("i", slice(None), "i"), (slice(None), "i", "i"), (1, "i", 2)):
        check(assigned(*where), x, i, fast=True)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int8]
)
def test_types_odd_sizes_and_strides(dtype: torch.dtype) -> None:
    def fn(x: Tensor, v: Tensor, i: Tensor) -> Any:
        return x.index_add(0, i, v), x.index_put((i,), v, accumulate=True), x.scatter_add(1, i[:, None] % 7, v[:, :1])

    x, v = ((torch.randn(*shape) * 8).to(dtype) for shape in ((37, 37), (29, 37)))
    i = indices(37, below=37)
    wide = {torch.bfloat16: 0.2, torch.float16: 0.03}.get(dtype)
    loose = {} if wide is None else {"rtol": 0.0, "atol": wide * 8}
    agree(fn, x, v.t()[:, :].t(), i[:29], **loose)
    agree(fn, x.t(), v, i[:29], **loose)
    if wide is not None:  # rounded once
        exact = x.double().index_add(0, i[:29], v.double())
        torch.testing.assert_close(compiled(fn, x, v, i[:29])[0], exact.to(dtype), rtol=0, atol=wide)


def gradients_agree(fn: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> None:
    x = x.requires_grad_()
    found, wanted = (torch.autograd.grad(f(x, *rest), x)[0] for f in (torch.compile(fn, backend="mlc"), fn))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("feature", "padding"), [(3, 2), (67, None), (200, -1)])
def test_gradients_of_embeddings(feature: int, padding: int | None) -> None:
    def fn(w: Tensor, i: Tensor) -> Tensor:
        return F.embedding(i, w, padding_idx=padding).sin().sum()

    gradients_agree(fn, torch.randn(11, feature), indices(4, 9, below=11).int())


def test_gradients_of_gathers() -> None:
    def fn(x: Tensor, rows: Tensor, each: Tensor) -> Tensor:
        y = (x.gather(1, each) ** 2).sum() + x.index_select(0, rows).cos().sum() + (x[rows - 5, rows] ** 3).sum()
        return y + x.take(each).exp().sum() + x.unfold(1, 3, 2).sin().sum()

    gradients_agree(fn, torch.randn(5, 6), indices(9, below=5), indices(5, 8, below=6))


def test_symbolic_sizes_and_nothing_at_all() -> None:
    def fn(x: Tensor, v: Tensor, i: Tensor) -> Any:
        return x.index_add(0, i, v * 2), x.scatter_reduce(0, i[:, None].expand_as(v), v, "amax")

    run = torch.compile(fn, backend="mlc", dynamic=True, fullgraph=True)
    for rows, count, width in ((5, 9, 33), (6, 2, 3), (4, 17, 65)):
        x, v, i = torch.randn(rows, width), torch.randn(count, width), indices(count, below=rows)
        torch.testing.assert_close(run(x, v, i), fn(x, v, i))
    for rows, count, width in ((5, 0, 3), (0, 0, 3), (5, 4, 0)):
        agree(fn, torch.randn(rows, width), torch.randn(count, width), indices(count, below=max(rows, 1)))
    agree(lambda x: F.unfold(x, 2), torch.zeros(0, 1, 5, 5))


def test_nan_and_infinities() -> None:
    x, v = torch.zeros(4, 3), torch.tensor([[1.0, float("nan"), float("inf")], [float("-inf"), 2.0, 3.0]])
    i = torch.tensor([[1, 1, 1], [1, 1, 2]])
    agree(lambda x, v, i: [x.scatter_reduce(0, i, v, how) for how in REDUCTIONS], x, v, i)


def test_threads_share_features_and_rows() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x, v = torch.randn(50, 600), torch.randn(700, 600)
        agree(lambda x, v, i: x.index_add(0, i, v), x, v, indices(700, below=50), rtol=1e-4, atol=1e-4)
        agree(lambda x, v, i: x.scatter_add(1, i, v), v, v, indices(700, 600, below=600), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_what_is_scattered_is_computed_on_the_way() -> None:
    def fn(v: Tensor, i: Tensor) -> Tensor:
        return torch.zeros(20, 32).index_add(0, (i * 3) % 20, (v * 2).sigmoid())

    v, i = torch.randn(40, 32), indices(40, below=20)
    agree(fn, v, i)
    assert len(kernels(fn, v, i)) == 1


def test_a_scatter_over_an_argument_touches_what_is_named() -> None:
    def update(cache: Tensor, at: Tensor, new: Tensor) -> None:
        cache.index_copy_(1, at, new)

    def put(cache: Tensor, at: Tensor, new: Tensor) -> None:
        cache[:, at] = new * 2

    for fn in (update, put):
        cache, at, new = torch.randn(2, 100, 8), torch.tensor([7, 93]), torch.randn(2, 2, 8)
        expected = cache.clone()
        fn(expected, at, new)
        before = counters.snapshot()
        compiled(fn, cache, at, new)
        torch.testing.assert_close(cache, expected)
        made = counters.since(before)
        assert made["kernel_calls"] == 1 and not made.get("library_calls"), "there is no copy of the cache"


def test_what_is_made_of_the_elements_that_it_replaces_is_stored_first() -> None:
    """Rows of a table, scaled: the table is neither copied nor read but for them; a row named twice is scaled once."""

    def scaled(x: Tensor, i: Tensor) -> None:
        x[i] = x[i] * 2 + x[0]

    def added(x: Tensor, i: Tensor) -> None:
        x.index_add_(0, i, x[i + 1].sin())

    def shortened(x: Tensor, i: Tensor) -> None:
        F.embedding(i, x, max_norm=1.0)

    for fn in (scaled, added, shortened):
        x, i = torch.randn(90, 5), torch.tensor([3, 0, 7, 3])
        expected = x.clone()
        fn(expected, i)
        before = counters.snapshot()
        compiled(fn, x, i)
        torch.testing.assert_close(x, expected)
        assert not counters.since(before).get("library_calls"), "there is no copy of the table"


def test_an_intermediate_is_written_over() -> None:
    def fn(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.scatter_reduce(0, i, v, "prod", include_self=False)

    x, i, v = torch.randn(30, 5), indices(40, 5, below=30), torch.randn(40, 5)
    agree(fn, x, i, v)
    first, second = kernels(fn, x, i, v)
    assert "in_place" not in first.nest.annotations and ("in_place", "in0") in second.nest.annotations


# --- out of range -----------------------------------------------------------------------------------------------------


ASSIGNED: dict[str, Callable[..., Tensor]] = {
    "index_put": lambda x, i, v: torch.index_put(x, (i,), v),
    "accumulated": lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
    "indices": lambda x, i, v: torch.index_put(x, (i, i[: v.shape[0]]), x.new_ones(()), accumulate=True),
    "index_add": lambda x, i, v: torch.index_add(x, 0, i, v),
    "index_copy": lambda x, i, v: torch.index_copy(x, 0, i, v),
    "index_reduce": lambda x, i, v: torch.index_reduce(x, 0, i, v, "amax"),
}


@pytest.mark.parametrize("dynamic", [False, None, True])
@pytest.mark.parametrize("name", ASSIGNED)
def test_values_of_other_sizes_than_where_they_go_are_an_error_as_in_eager(name: str, dynamic: bool | None) -> None:
    """Torch traces some of these ops without asking for it, and installs no guard: a kernel would read what is beside
    the values (seed 101589)."""
    fn = ASSIGNED[name]
    run = torch.compile(fn, backend="mlc", dynamic=dynamic)
    x, i = torch.zeros(8, 9), torch.tensor([1, 0, 7, 3])
    agreed = [(torch.zeros(5, 6), torch.tensor([1, 0, 3]), torch.randn(3, 6)), (x, i, torch.randn(4, 9))]
    for given in agreed:
        torch.testing.assert_close(run(*given), fn(*given))
    for shape in [(4, 7), (4, 12), (2, 9), (6, 9), (4, 1), (1, 9)]:
        values = torch.randn(shape)
        try:
            wanted = fn(x, i, values)
        except (RuntimeError, IndexError):
            with pytest.raises(Exception, match=r"shape|[Ss]ize|elements|broadcast"):
                run(x, i, values)
        else:
            torch.testing.assert_close(run(x, i, values), wanted)


@pytest.mark.parametrize("width", [1, 64])
def test_an_index_out_of_range_is_an_error_and_writes_nothing_else(width: int) -> None:
    def rows(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.index_add(0, i, v)

    def each(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.scatter_add(0, i[:, None].expand(v.shape) + 0, v)

    def in_place(x: Tensor, i: Tensor, v: Tensor) -> None:
        x.index_add_(0, i, v)

    memory = torch.zeros(40, width)
    for fn in (rows, each, in_place):
        run = torch.compile(fn, backend="mlc", fullgraph=True)
        for wrong in (9, -1, 1 << 40, -(1 << 62)):
            x, i, v = memory[10:19], torch.tensor([0, wrong, 8]), torch.ones(3, width)
            with pytest.raises(Exception, match=r"out of|index"):
                fn(x.clone(), i, v)
            with pytest.raises(OutOfRangeError, match=f"index {wrong} is out of bounds for dimension 0 with size 9"):
                run(x, i, v)
            assert not memory[:10].any() and not memory[19:].any()
    agree(rows, x, i % 9, v)


def test_indices_that_count_from_the_end_do_so_once() -> None:
    def fn(x: Tensor, i: Tensor) -> Tensor:
        return x.index_put((i,), torch.ones(()), accumulate=True)

    agree(fn, torch.zeros(6), torch.tensor([-6, 5, -1, 0]))
    for wrong in (-7, 6):
        with pytest.raises(IndexError):
            fn(torch.zeros(6), torch.tensor([wrong]))
        with pytest.raises(IndexError):
            compiled(fn, torch.zeros(6), torch.tensor([wrong]))


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_all_places_of_a_mask_are_assigned(check: Callable[..., Graph], accumulate: bool) -> None:
    def f(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return x.index_put((m,), v, accumulate=accumulate)

    x = torch.randn(5, 4, 3)
    for shape, values in (
        ((5,), (4, 3)),
        ((5,), (3,)),
        ((5,), (1, 1, 3)),
        ((5, 4), (3,)),
        ((5, 4), (1, 3)),
        ((5,), ()),
    ):
        check(f, x, torch.rand(shape) > 0.4, torch.randn(values))
    check(f, x, torch.rand(5, 4, 3) > 0.4, torch.randn(1))
    check(f, x[:0], torch.rand(0) > 0.4, torch.randn(3))
    # As many values as places: how many the mask names is for the library to find.
    mask = torch.tensor([True, False, True, False, False])
    check(f, x, mask, torch.randn(2, 4, 3), library=["aten::index_put.default"])


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, v: x.index_add(0, torch.arange(v.shape[0]), v),
    "added further on": lambda x, v: x.index_add(0, torch.arange(v.shape[0]) + 3, v),
    "every other": lambda x, v: x.index_add(0, 2 * torch.arange(v.shape[0]), v),
    "copied": lambda x, v: x.index_copy(0, torch.arange(v.shape[0]), v),
    "largest": lambda x, v: x.scatter_reduce(0, torch.arange(v.shape[0])[:, None].expand_as(v), v, "amax"),
    "in columns": lambda x, v: x.scatter_add(1, torch.arange(v.shape[1]).expand_as(v), v),
    "mean": lambda x, v: x.scatter_reduce(0, torch.arange(v.shape[0])[:, None].expand_as(v), v, "mean"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_places_that_are_known_are_held_within_memory(name: str, dynamic: bool) -> None:
    """Nothing has to be read to know them, and yet they may lie outside."""
    torch.manual_seed(0)
    fn, memory = KNOWN[name], torch.zeros(60, 24)
    run = torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x, v = (torch.randn(20, 24) * 9).to(dtype), (torch.randn(8, 24) * 9).to(dtype)
        torch.testing.assert_close(run(x, v), fn(x, v))
    x, v = memory[20:40], torch.ones((21, 24) if name != "in columns" else (20, 25))
    with pytest.raises(Exception, match=r"out of|index"):
        fn(x.clone(), v)
    with pytest.raises(Exception, match=r"index -?\d+ is out of bounds for dimension"):
        run(x, v)
    assert not memory.any()


@pytest.mark.parametrize("name", ["added", "added further on", "copied", "in columns"])
def test_places_that_are_known_on_a_gpu(name: str) -> None:
    report = torch_mlc.explain(KNOWN[name], torch.randn(50, 64), torch.randn(10, 64), target="cuda:sm_90")
    assert report.kernels and not any(k.error for k in report.kernels), str(report)
