"""Scatters on GPUs: interpreted against the oracle, with places out of range, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import Graph, Library
from torch_mlc.ir.nest.loops import LoopNest, blocks
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")


def rows(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, i, (v * 2).sigmoid())


def each(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter_add(0, (i[:, None] + torch.arange(37)) % 19, v)


def best(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(0, i[:, None].expand(v.shape), v, "amax")


def assigned(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_copy(1, torch.arange(13) * 2 + i[:1], v[:19, :13])


def one_place(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter(1, i[:19, None].expand(19, 8), v[:19, 3:4].expand(19, 8))


def greatest(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(0, i, v, "amax")


def least(x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(0, i, v, "amin")


PROGRAMS = {
    "rows": (rows, torch.float32),
    "halves": (rows, torch.bfloat16),
    "each": (each, torch.float32),
    "best": (best, torch.int32),
    "best of halves": (best, torch.bfloat16),
    "narrow": (best, torch.uint8),
    "assigned": (assigned, torch.bfloat16),
    "one place": (one_place, torch.float32),
}


@cache
def nests_of(name: str, dynamic: bool = False) -> tuple[LoopNest, ...]:
    fn, dtype = PROGRAMS[name]
    shapes = (torch.zeros(19, 37, dtype=dtype), torch.zeros(23, 37, dtype=dtype), torch.zeros(23, dtype=torch.int64))
    return nests_from(fn, shapes, dynamic)


def nests_from(fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], dynamic: bool = False) -> tuple[LoopNest, ...]:
    gms = capture(fn, inputs, dynamic=dynamic)
    retarget(gms, "cuda")
    graph = import_graph(gms[0])
    assert not any(isinstance(n, Library) for n in graph.nodes)
    context = context_of(Options(target="cuda:sm_90"))
    fusion = run_passes(CALL_PASSES, fuse(run_passes(GRAPH_PASSES, graph, context)), context)
    return tuple(map(lower_to_loops, fusion.functions.values()))


def is_scatter(nest: LoopNest) -> bool:
    return any(b.is_scatter for b, _ in blocks(nest))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_scattered(name: str, agrees: Callable[..., Any]) -> None:
    found = [n for n in nests_of(name) if is_scatter(n)]
    assert found
    for nest in found:
        schedule = default_schedule(nest, SM90)
        assert schedule.rule == "gpu_scatter"
        rng, given = np.random.default_rng(0), {}
        for b in nest.params:
            shape = tuple(map(int, b.shape))
            values = rng.integers(0, 9, shape) if b.dtype.is_int else rng.normal(size=shape)
            given[b.name] = np.asarray(values).astype(np.float32).astype(b.dtype.numpy)
        source = agrees(schedule.nest, inputs=given, tolerance=1e-5)
        assert ("tl.atomic_" in source.text) == (name not in ("assigned", "one place"))


def test_places_out_of_range_are_left_alone(interpreter: Any) -> None:
    nest = next(n for n in nests_of("rows") if is_scatter(n))
    index = next(b for b in nest.params if b.dtype.is_int)
    (output,) = nest.outputs
    at = np.arange(23) % 19
    given = {b.name: np.zeros(tuple(map(int, b.shape)), b.dtype.numpy) for b in nest.params}
    given[index.name] = at.copy()
    given[index.name][[3, 5]] = 19, -1
    source = emit_triton(default_schedule(nest, SM90).nest, SM90)
    found = interpreter.run(source, nest.outputs, given, {})[output]
    wanted = np.zeros((19, 37), np.float32)
    np.add.at(wanted, np.delete(at, [3, 5]), np.float32(0.5))
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("rows", True), pytest.param("halves", False, marks=pytest.mark.slow), ("best", False)]
)
def test_they_compile(name: str, dynamic: bool) -> None:
    for nest in nests_of(name, dynamic):
        binary = compile_triton(emit_triton(default_schedule(nest, SM90).nest, SM90), SM90)
        assert binary.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("fn", "combine"), [(greatest, np.maximum), (least, np.minimum)], ids=["amax", "amin"])
def test_extremes_of_floats_keep_nan(
    fn: Callable[..., Any], combine: np.ufunc, dtype: torch.dtype, interpreter: Any
) -> None:
    """Whatever is in memory and whatever two lanes bring, of one program or of two: a NaN of either sign stays."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    nan = np.array([np.nan], kind)
    special = np.concatenate([nan, -nan, np.array([np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, 3e38, -1e-40], kind)])
    assert np.signbit(special[1]) and np.isnan(special[1])
    held, first, second = (a.ravel() for a in np.meshgrid(special, special, special, indexing="ij"))
    n = held.size
    # The places in turn, so that some find both of their values in one program and others in two.
    at = np.concatenate([np.arange(n), np.arange(n)[::-1]])
    values = np.concatenate([first, second[::-1]])
    (nest,) = (m for m in nests_from(fn, tuple(map(torch.from_numpy, (held, values, at)))) if is_scatter(m))
    source = emit_triton(default_schedule(nest, SM90).nest, SM90)
    (output,) = nest.outputs
    given = {b.name: held if b.name == output else at if b.dtype.is_int else values for b in nest.params}
    found = interpreter.run(source, nest.outputs, given, {})[output]
    np.testing.assert_array_equal(found, combine(combine(held, first), second))
    assert compile_triton(source, SM90).code


def mean_of_bags(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(i, x, mode="mean")


@pytest.mark.parametrize(
    ("fn", "inputs", "op"),
    [
        (rows, (torch.zeros(9, 4), torch.zeros(7, 4), torch.zeros(7, dtype=torch.int64)), "aten::sort.stable"),
        (
            mean_of_bags, (torch.zeros(9, 4), torch.zeros(3, 2, dtype=torch.int64)),
            "aten::_embedding_bag_forward_only.default",
        ),
    ],
)  # fmt: skip
def test_order_that_is_asked_for_sorts_rows_and_leaves_other_rounding_sums_to_the_library(
    fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], op: str
) -> None:
    gms = capture(fn, inputs)
    retarget(gms, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        graph: Graph = import_graph(gms[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert [n.target for n in graph.nodes if isinstance(n, Library)] == [op]
