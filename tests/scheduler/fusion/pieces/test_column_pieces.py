"""Columns in pieces of their rows: two functions that give what the whole gives, where a GPU gains by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.cost.columns import columns_of, pieces_of_columns, segment_share
from torch_mlc.scheduler.functions.lower import collapse, lower_to_loops
from torch_mlc.scheduler.functions.visits import in_visits
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.fusion.pieces.column_pieces import cut_columns
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

Function = Callable[..., Any]
SM90 = gpu_target("cuda:sm_90")


def sums(x: Tensor) -> Tensor:
    return x.sum(0)


def sums_of_what_leaves(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.where(x > 0, g, g * 0.1)
    return y, y.sum(0)


def variances(x: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, 0)
    return torch.rsqrt(var + 1e-5), mean


def scaled(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """What belongs to columns is read by elements and by what is made of the sums, and leaves."""
    scale = torch.exp(s)
    return (x * scale).sum(0) * scale, scale


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(0), x.argmax(0)


def over_two(x: Tensor) -> Tensor:
    return (x * x).sum((0, 1))


def exponentials(x: Tensor) -> Tensor:
    return torch.logsumexp(x, 0)


def centred(x: Tensor, s: Tensor) -> Tensor:
    return torch.relu(x * torch.exp(s) - x.mean(0)) * s


def batch_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Elements leave before and behind the sums, and sums do."""
    y = g * (x > 0)
    total, inner = y.sum(0), (y * x).sum(0)
    return y * w, (y - total / 24 - x * (inner / 24)) * w, inner


def over_channels(x: Tensor) -> Tensor:
    return x.square().sum((0, 2))


def channels_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = g * (x > 0)
    total = y.sum((0, 2), keepdim=True)
    return (y - total / 30 - x * ((y * x).sum((0, 2), keepdim=True) / 30)) * w, total


X, G = (torch.randn(24, 11) for _ in range(2))
PRIME = torch.randn(23, 11)
CASES = {
    "sums": (sums, (X,)),
    "of a prime": (sums, (PRIME,)),
    "of what leaves": (sums_of_what_leaves, (X, G)),
    "variances": (variances, (X,)),
    "variances of a prime": (variances, (PRIME,)),
    "scaled": (scaled, (X, torch.randn(11))),
    "scaled, of a prime": (scaled, (PRIME, torch.randn(11))),
    "extremes": (extremes, (X,)),
    "over two": (over_two, (torch.randn(6, 5, 11),)),
    "centred": (centred, (X, torch.randn(11))),
    "centred, of a prime": (centred, (PRIME, torch.randn(11))),
    "batch norm": (batch_norm_backward, (X, G, torch.randn(11))),
    "of a channel": (over_channels, (torch.randn(6, 3, 5),)),
    "batch norm of images": (channels_backward, (torch.randn(6, 3, 5), torch.randn(6, 3, 5), torch.randn(3, 1))),
    "normed": (lambda x: (x - x.mean(0)) / (x - x.mean(0)).square().sum(0).sqrt(), (X,)),
    "exponentials": (exponentials, (PRIME,)),
}


def functions(fn: Function, inputs: tuple[Tensor, ...], dynamic: bool = False) -> list[TensorFunction]:
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    return list(fuse(run_passes(GRAPH_PASSES, import_graph(gm), USUAL)).functions.values())


def numbers(function: TensorFunction, given: list[np.ndarray], sizes: dict[str, int]) -> list[np.ndarray]:
    nest = lower_to_loops(function)
    verify(nest)
    return list(run_nest(nest, [a.reshape(-1) for a in given], sizes).values())


def numbers_by_parts(
    function: TensorFunction, given: list[np.ndarray], sizes: dict[str, int], pieces: int
) -> list[np.ndarray]:
    """The same of visits one after the other, and of columns in pieces."""
    found: dict[int, np.ndarray] = {}
    if (visits := in_visits(function)) is not None:
        first = numbers_by_parts(visits.first, given, sizes, pieces)
        again = [*(given[k] for k in visits.taken), *(first[k] for k in visits.results)]
        found |= dict(zip(visits.leading, first))
        late = [k for k in range(len(function.outputs)) if k not in visits.leading]
        found |= dict(zip(late, numbers_by_parts(visits.rest, again, sizes, pieces), strict=True))
    elif any(s.monoid is not None for s in function.stages):
        halves = cut_columns(function, pieces)
        assert halves is not None
        parts = numbers(halves.first, given, sizes)
        cut = len(parts) - halves.partial
        found |= dict(zip((k for k in range(len(function.outputs)) if k not in halves.last), parts[:cut], strict=True))
        last = numbers(halves.second, [*parts[cut:], *(given[k] for k in halves.taken)], sizes)
        found |= dict(zip(halves.last, last, strict=True))
    else:
        return numbers(function, given, sizes)
    return [found[k] for k in range(len(function.outputs))]


def agree(whole: TensorFunction, pieces: int, rows: int, special: float | None = None) -> None:
    whole = collapse(whole)
    sizes = {s.name: rows + 3 * k for k, s in enumerate(whole.symbols.symbols)}
    rng = np.random.default_rng(0)

    def made(shape: Any) -> np.ndarray:
        return rng.standard_normal([int(e.subs({s: sizes[s.name] for s in e.free_symbols})) for e in shape])

    given = [made(b.shape).astype(np.float32) for b in whole.inputs]
    if special is not None:
        given[0].flat[given[0].size // 2] = special
    wanted, found = numbers(whole, given, sizes), numbers_by_parts(whole, given, sizes, pieces)
    for ours, array in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            ours.astype(np.float64).ravel(), array.astype(np.float64).ravel(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("pieces", [2, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_two_give_what_the_whole_gives(name: str, pieces: int) -> None:
    fn, inputs = CASES[name]
    for whole in functions(fn, inputs):
        agree(whole, pieces, 0)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["sums", "of a prime", "of what leaves", "extremes"])
def test_what_is_no_number_stays_in_its_column(name: str, special: float) -> None:
    fn, inputs = CASES[name]
    for whole in functions(fn, inputs):
        agree(whole, 5, 0, special)


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_rows_that_are_not_known_are_cut_with_a_tail(rows: int) -> None:
    (whole,) = functions(scaled, (torch.randn(9, 11), torch.randn(11)), dynamic=True)
    agree(whole, 4, rows)


def test_elements_that_leave_are_cut_without_a_tail_or_not_at_all() -> None:
    (whole,) = functions(sums_of_what_leaves, (PRIME, torch.randn(23, 11)))
    assert cut_columns(whole, 4) is None
    (whole,) = functions(sums_of_what_leaves, (X, G))
    halves = cut_columns(whole, 5)
    assert halves is not None and [int(d.extent) for d in halves.second.inner] in ([4], [6])


def test_elements_that_wait_for_a_sum_are_of_another_visit() -> None:
    whole = next(f for f in functions(centred, (X, torch.randn(11))) if f.inner)
    assert cut_columns(whole, 4) is None
    visits = in_visits(whole)
    assert visits is not None and not visits.rest.inner and in_visits(visits.rest) is None
    assert [o.buffer.shape for o in visits.first.outputs] == [(11,)]


def test_one_visit_is_not_cut() -> None:
    for name in ("sums", "of what leaves", "scaled"):
        for whole in functions(*CASES[name]):
            assert in_visits(whole) is None


def fused(fn: Function, *shape: int) -> Fusion:
    """What a GPU runs for a function of an array of half types."""
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.bfloat16)
    captured = capture(fn, (x,))
    retarget(captured, "cuda")
    return fuse(run_passes(GRAPH_PASSES, import_graph(captured[0]), USUAL))


def called(fn: Function, *shape: int) -> list[TensorFunction]:
    """The functions of its calls."""
    fusion = fused(fn, *shape)
    return [fusion.functions[n.function] for n in fusion.graph.nodes if isinstance(n, CallTensor)]


def test_large_columns_are_two_kernels_of_whole_lines() -> None:
    first, second = called(sums, 16384, 4096)
    nest = lower_to_loops(first)
    schedule = default_schedule(nest, SM90)
    assert schedule.rule == "gpu_column_reduction"
    (pieces,) = (int(d.extent) for d in second.inner)
    columns = columns_of(SM90.machine, [pieces, 4096], 2)
    assert columns * 2 >= 128 and pieces * 4096 // columns >= 2 * SM90.machine.cores


def test_elements_behind_few_columns_have_a_kernel_of_their_own() -> None:
    first, second, third = called(lambda x: x - x.mean(0), 1 << 17, 256)
    assert default_schedule(lower_to_loops(first), SM90).rule == "gpu_column_reduction"
    assert default_schedule(lower_to_loops(third), SM90).rule == "gpu_pointwise"
    assert len(second.rows) == 1


def test_visits_behind_one_another_have_names_of_their_own() -> None:
    graph = fused(lambda x: (x - x.mean(0)) / (x - x.mean(0)).square().sum(0).sqrt(), 1 << 17, 256).graph
    calls = [n for n in graph.nodes if isinstance(n, CallTensor)]
    names = [name for call in calls for name in call.names]
    assert len(calls) == 5 and len(set(names)) == len(names)


def test_parts_of_rows_that_lie_apart_are_read_by_a_program_each() -> None:
    first, second, third = called(lambda x: x - x.sum((0, 2), keepdim=True), 64, 256, 3136)
    assert [int(d.extent) for d in first.rows] == [64, 256] and [int(d.extent) for d in second.inner] == [64]
    assert default_schedule(lower_to_loops(first), SM90).rule == "gpu_row_persistent"
    assert [int(d.extent) for d in third.rows] == [64, 256, 3136], "neighbours in memory are neighbours in the loops"


def test_what_is_soon_done_or_rows_that_lie_along_are_one_kernel() -> None:
    assert len(called(sums, 256, 1024)) == 1
    assert len(called(lambda x: x.sum(1), 4096, 16384)) == 1


def test_a_second_kernel_has_to_be_worth_its_launch() -> None:
    machine = SM90.machine
    assert [pieces_of_columns(machine, [4096], r, r * 8192, 4, 2) > 1 for r in (64, 512, 32768)] == [False, False, True]
    # So many columns occupy the machine by themselves.
    assert pieces_of_columns(machine, [1 << 17], 8192, 1 << 31, 4, 2) == 1
    assert [segment_share(n) for n in (32, 64, 128, 512)] == [0.5, 0.75, 1.0, 1.0]
