"""Joins on CPUs: what is made for a part is made in the join's loops, and each part has loops of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, symbol
from torch_mlc.ir.graph.graph import CallTensor, Graph, Reduction
from torch_mlc.ir.nest.loops import LoopNest, Store, blocks
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.facts.evaluations import evaluations
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES, unroll_reductions
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule

CPU, GPU = Target("cpu", "znver3", 4), gpu_target("cuda:sm_90")
F32, I64 = DType.FLOAT32, DType.INT64
Make = Callable[..., Tensor]


def embeddings(x: Tensor, rows: Tensor, *tables: Tensor) -> Tensor:
    """A part made of the others' type, and sums of a few rows each."""
    return torch.stack([torch.relu(x), *(F.embedding(rows[:, k], t).sum(1) for k, t in enumerate(tables))], 1)


def overlapping(x: Tensor) -> Tensor:
    """Elements of a part are read twice."""
    s = x.sum(1)
    return torch.cat([s[:6], s[1:]])


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def recommender(dim: int = 32) -> tuple[Tensor, ...]:
    rows = torch.randint(7, (5, 3, 4), generator=torch.Generator().manual_seed(1))
    return rand(5, dim), rows, *(rand(7, dim) + k for k in range(3))


def imported(fn: Make, *inputs: Tensor, device: str = "cpu") -> Graph:
    (gm,) = capture(fn, inputs)
    if device != "cpu":
        retarget([gm], device)
    return import_graph(gm)


def nest_of(fn: Make, *inputs: Tensor, dynamic: bool = False) -> LoopNest:
    """The one kernel of a function."""
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    (function,) = fuse(graph).functions.values()
    return lower_to_loops(function)


def scheduled(nest: LoopNest, target: Target = CPU) -> Schedule:
    s = default_schedule(nest, target)
    verify(s.nest)
    return s


def selects(nest: LoopNest) -> int:
    return sum(
        isinstance(e, Select) for b, _ in blocks(nest) for s in b.body if isinstance(s, Store) for e in _inside(s.value)
    )


def _inside(value: Expr) -> list[Expr]:
    from_here = [value]
    for e in from_here:
        if isinstance(e, Select):
            from_here += [e.condition, e.if_true, e.if_false]
        elif not isinstance(e, (Load, IndexValue)):
            from_here += [v for name in ("args", "value") for v in _as_tuple(getattr(e, name, ()))]
    return from_here


def _as_tuple(v: Any) -> tuple[Any, ...]:
    return v if isinstance(v, tuple) else (v,) if hasattr(v, "dtype") else ()


# --- fusion -----------------------------------------------------------------------------------------------------------


def test_sums_of_a_few_rows_are_made_in_the_join(reference: Callable[..., Any]) -> None:
    inputs = recommender()
    made = reference(embeddings, inputs)
    calls = [n for n in made.fusion.graph.nodes if isinstance(n, CallTensor)]
    assert len(calls) == 1
    torch.testing.assert_close(made.run(inputs)[0], embeddings(*inputs))


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: torch.cat([x.sum(1), x.amax(1)]), 0),
        (lambda x: torch.cat([x.sum(1), x[:, 0]]) + x.sum(1).repeat(2), 1),  # read elsewhere too
        (lambda x: x.sum(1) * 2, 1),  # no join
        (lambda x: torch.cat([x.sum(0), x[0]]), 1),  # too many elements
        (overlapping, 1),
        (lambda x: (torch.cat([x.sum(1), x[:, 1]]), x.sum(1)), 1),  # it is a result
    ],
)
def test_which_reductions_are_written_out(fn: Make, left: int) -> None:
    graph = unroll_reductions(imported(fn, rand(9, 3)))
    verify(graph)
    assert sum(isinstance(n, Reduction) for n in graph.nodes) == left


def test_reductions_on_gpus_stay() -> None:
    graph = imported(embeddings, *recommender(), device="cuda:0")
    assert unroll_reductions(graph) is graph


@pytest.mark.parametrize(
    ("condition", "first", "second"),
    [
        (call("lt", IndexValue(symbol("i0"), I64), IndexValue(sympy.Integer(3), I64)), 15, 35),
        (call("ge", IndexValue(symbol("i0") - 2, I64), IndexValue(sympy.Integer(3), I64)), 25, 25),
        (call("lt", IndexValue(sympy.Integer(3), I64), IndexValue(symbol("i0"), I64)), 30, 20),
        (call("eq", IndexValue(symbol("i0"), I64), IndexValue(sympy.Integer(3), I64)), 5, 50),
        (call("lt", IndexValue(symbol("i0") + symbol("i1"), I64), IndexValue(sympy.Integer(3), I64)), 50, 50),
    ],
)
def test_how_often_a_branch_is_evaluated(condition: Expr, first: int, second: int) -> None:
    i0, i1 = symbol("i0"), symbol("i1")
    value = Select(condition, Load("a", (i0, i1), F32), Load("b", (i0, i1), F32))
    read = evaluations([value], {i0: sympy.Integer(10), i1: sympy.Integer(5)}, int)
    assert read == {"a": first, "b": second}


# --- schedules --------------------------------------------------------------------------------------------------------


def cat(*parts: Tensor) -> Tensor:
    return torch.relu(torch.cat(parts, 1))


def four(x: Tensor, y: Tensor) -> Tensor:
    """Joined along two dimensions."""
    return torch.cat((torch.cat((x, y), 1), torch.cat((y, x), 1)), 2)


@pytest.mark.parametrize(
    ("nest", "parts"),
    [
        (lambda: nest_of(embeddings, *recommender()), 4),
        (lambda: nest_of(cat, rand(6, 70), rand(6, 33)), 2),
        (lambda: nest_of(cat, rand(6, 40), rand(6, 3), rand(6, 40)), 3),
        (lambda: nest_of(cat, rand(6, 70), rand(6, 33), dynamic=True), 2),
        (lambda: nest_of(cat, rand(6, 3), rand(6, 3), rand(6, 3)), 3),
        (lambda: nest_of(lambda x, y: torch.cat((x.tanh(), y.exp()), 1), rand(6, 7), rand(6, 3)), 2),
        (lambda: nest_of(lambda x, y: torch.cat((x.tanh(), y.exp())), rand(7, 6), rand(3, 6)), 2),
        (lambda: nest_of(lambda *x: torch.cat(x), *[rand(40000)] * 3), 3),
        (lambda: nest_of(lambda x, y: torch.slice_scatter(x, y, 1, 40, 80), rand(6, 120), rand(6, 40)), 3),
        (lambda: nest_of(lambda x: torch.roll(x, 50, 1), rand(6, 120)), 2),
        (lambda: nest_of(four, rand(3, 4, 40), rand(3, 4, 40)), 4),
    ],
)
def test_parts_have_loops_of_their_own(nest: Callable[[], LoopNest], parts: int) -> None:
    s = scheduled(nest())
    assert len(s.get_blocks()) == parts
    assert not selects(s.nest)


@pytest.mark.parametrize(
    "nest",
    [
        lambda: nest_of(lambda x: F.pad(x, (40, 40)) + 1, rand(6, 120)),  # the border reads nothing
        lambda: nest_of(cat, rand(6, 100), rand(6, 2)),  # one part is a few elements
        lambda: nest_of(lambda x: torch.where(torch.arange(120) < x, x, x * 2), rand(6, 120)),  # data decide
        lambda: nest_of(lambda *x: torch.cat(x), *[rand(20, 24)] * 4),  # a row's condition is known for all of it
        lambda: nest_of(lambda *x: torch.cat(x), *[rand(1000)] * 20),  # teams of their own would have little to do
        lambda: nest_of(lambda x, y: torch.cat((x, y.t()), 1), rand(64, 64), rand(64, 64)),  # it is transposed in tiles
        lambda: nest_of(lambda *x: torch.cat(x, 1), *[rand(3, 40)] * 40),  # too many parts
    ],
)
def test_other_loops_stay_whole(nest: Callable[[], LoopNest]) -> None:
    assert "partition" not in {step.primitive for step in scheduled(nest()).trace.steps}


def test_gpus_keep_one_loop() -> None:
    s = scheduled(nest_of(cat, rand(6, 70), rand(6, 33)), GPU)
    assert "partition" not in {step.primitive for step in s.trace.steps}
