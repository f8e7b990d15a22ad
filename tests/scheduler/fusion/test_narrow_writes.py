"""A part of a tensor that is assigned is visited alone: the rest is there already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

Fn = Callable[..., Any]


def function_of(fn: Fn, *given: Any, dynamic: bool = False) -> TensorFunction:
    """The function of the only call."""
    (gm,) = capture(fn, given, dynamic=dynamic)
    context = context_of(Options())
    fusion = run_passes(CALL_PASSES, fuse(run_passes(GRAPH_PASSES, import_graph(gm), context)), context)
    (call,) = (n for n in fusion.graph.nodes if isinstance(n, CallTensor))
    function = fusion.functions[call.function]
    verify(lower_to_loops(function))
    return function


def points(function: TensorFunction) -> int:
    total = 1
    for d in function.rows:
        total *= int(d.extent)
    return total


def middle(x: Tensor, k: Tensor) -> None:
    x[:, 4:7] = k[:, :3] * 2


def begin(x: Tensor, k: Tensor) -> None:
    x[:, :3] = k[:, :3] * 2


def end(x: Tensor, k: Tensor) -> None:
    x[:, -3:] = k[:, :3] * 2


def corner(x: Tensor, k: Tensor) -> None:
    x[1:, 2:4, 3:] = k[1:, :2, 3:] * 2


def one(x: Tensor, k: Tensor) -> None:
    x[:, 8] = k[:, 0] * 2


def past_the_end(x: Tensor, k: Tensor) -> None:
    x[:, 9:99] = k[:, :2] * 2


def stepping(x: Tensor, k: Tensor) -> None:
    x[:, 1:7:2] = k[:, :3] * 2


def masked(x: Tensor, k: Tensor) -> None:
    x[:, 4:7] = torch.where(k[:, :3] > 0, k[:, :3], x[:, 4:7])


def nothing(x: Tensor, k: Tensor) -> None:
    x[:, 5:5] = k[:, :0] * 2


def in_order(fn: Fn) -> Fn:
    def call(x: Tensor, k: Tensor) -> Any:
        # Dynamo numbers inputs in the order in which they are first looked at.
        assert x.dim() == k.dim() == 3
        return fn(x, k)

    return call


CASES = {middle: 72, begin: 72, end: 72, corner: 20, one: 24, past_the_end: 48, masked: 72}


@pytest.mark.parametrize("fn", CASES)
def test_points_of_the_part_are_visited(fn: Fn) -> None:
    function = function_of(in_order(fn), torch.zeros(3, 11, 8), torch.zeros(3, 11, 8))
    (out,) = function.outputs
    assert out.buffer in function.inputs
    assert points(function) == CASES[fn]


def test_steps_visit_what_lies_between() -> None:
    function = function_of(in_order(stepping), torch.zeros(3, 11, 8), torch.zeros(3, 11, 8))
    assert points(function) == 3 * 6 * 8


def test_what_is_made_of_a_tensor_that_lives_on_is_written_whole() -> None:
    def whole(x: Tensor, k: Tensor) -> Tensor:
        y = x.clone()
        y[:, 4:7] = k[:, :3] * 2
        return y

    function = function_of(in_order(whole), torch.zeros(3, 11, 8), torch.zeros(3, 11, 8))
    (out,) = function.outputs
    assert out.buffer not in function.inputs
    assert points(function) == 3 * 11 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("fn", [*CASES, stepping, nothing])
def test_the_rest_stays(fn: Fn, dtype: torch.dtype) -> None:
    x, k = ((torch.randn(3, 11, 8) * 9).to(dtype) for _ in range(2))
    if dtype.is_floating_point:
        x[0, 0, 0], x[2, 5, 3], k[1, 0, 4], k[2, 1, 5] = float("nan"), float("inf"), float("nan"), float("-inf")
    wanted = x.clone()
    fn(wanted, k)
    torch.compile(in_order(fn), backend="mlc")(x, k)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_place_that_a_size_says(place: int) -> None:
    def at(x: Tensor, k: Tensor, place: int) -> None:
        assert x.dim() == k.dim() == 3
        x[:, place : place + k.shape[1]] = k * 2

    x, k = torch.randn(3, 11, 8), torch.randn(3, 2, 8)
    wanted = x.clone()
    at(wanted, k, place)
    torch.compile(at, backend="mlc", dynamic=True)(x, k, place)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0)


CONDITIONS = {
    "two ends": lambda i, s, t: (i < s) & (i < t),
    "two begins": lambda i, s, t: (i >= s) & (i >= t),
    "two places": lambda i, s, t: (i == s) & (i == t),
    "an end and a place": lambda i, s, t: (i < s) & (i == t),
    "a begin and an end": lambda i, s, t: (i >= s) & (i < t),
    "an end and a number": lambda i, s, t: (i < s) & (i < 5) & (i < t),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_all_of_several_conditions_by_sizes_hold(name: str) -> None:
    """Of two sizes nobody knows which is less: a part by one of them leaves the other's condition."""

    def where(x: Tensor, k: Tensor, u: Tensor, w: Tensor) -> None:
        i = torch.arange(12)[:, None]
        x.copy_(torch.where(CONDITIONS[name](i, u.shape[0], w.shape[0]), k * 2, x))

    compiled = torch.compile(where, backend="mlc")
    for s, t in ((3, 5), (5, 3), (8, 9), (9, 2), (4, 4)):
        u, w = torch.zeros(s), torch.zeros(t)
        for given in (u, w):
            torch._dynamo.mark_dynamic(given, 0, min=2, max=10)
        x, k = torch.randn(12, 6), torch.randn(12, 6)
        wanted = x.clone()
        where(wanted, k, u, w)
        compiled(x, k, u, w)
        torch.testing.assert_close(x, wanted, rtol=0, atol=0)
