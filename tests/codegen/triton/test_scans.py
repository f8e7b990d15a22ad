"""Scans on GPUs: interpreted against the oracle, rows whole and in a loop over tiles, and compiled without spills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan_op

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.graph.graph import Graph, Library
from torch_mlc.ir.nest.loops import LoopNest, blocks
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule, design_space

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
INF, NAN = float("inf"), float("nan")


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A scan that waits for a sum of its row, and one that does not."""
    return x.cumsum(1) * x.sum(1, keepdim=True), x.abs().sum(1), x.cumprod(1) + x


def top(x: Tensor) -> Tensor:
    return torch.where(F.softmax(x, -1).cumsum(-1) < 0.7, x, -1e9)


def before(x: Tensor) -> tuple[Tensor, Tensor]:
    """What stands before each element, and the sums themselves."""
    c = x.cumsum(1)
    return F.pad(c, (1, 0))[:, :-1] * x, c * 2


def recurrence(x: Tensor) -> Tensor:
    """y = a y + b by a function of the user's."""

    def combine(a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor) -> list[Tensor]:
        return [a0 * b0, a1 * b0 + b1]

    return associative_scan_op(combine, [(x * 0.5).t().contiguous(), x.t()], ())[1].t() * 2


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.dtype]] = {
    "sum": (lambda x: x.exp().cumsum(1) * x, (5, 37), torch.float32),
    "half": (lambda x: x.cumsum(1) + 1, (5, 37), torch.bfloat16),
    "double": (lambda x: x.cumsum(-1), (5, 37), torch.float64),
    "product": (lambda x: x.cumprod(1), (5, 37), torch.int32),
    "narrow": (lambda x: x.cumsum(1, dtype=torch.int8), (5, 37), torch.int8),
    "count": (lambda x: (x > 0).cumsum(1), (5, 37), torch.float32),
    "pairs": (lambda x: x.logcumsumexp(1), (5, 37), torch.float32),
    "best": (lambda x: (x.cummax(1).values * 2, x.cummin(1)[1]), (5, 37), torch.float32),
    "columns": (lambda x: x.cumsum(0).tanh(), (37, 12), torch.float32),
    "column_pairs": (lambda x: x.logcumsumexp(0) * 2, (37, 12), torch.float32),
    "planes": (lambda x: (x * 2).cumsum(1) - x, (2, 21, 10), torch.float32),
    "merged": (lambda x: (x * 2).reshape(x.shape[0], -1).cumsum(1), (3, 6, 5), torch.float32),
    "one_row": (lambda x: x.cumsum(0), (37,), torch.float32),
    "twice": (lambda x: x.cumsum(1).cumsum(1), (5, 37), torch.float32),
    "recurrence": (recurrence, (5, 37), torch.float32),
    "from_the_end": (lambda x: F.softmax(x, -1).flip(1).cumsum(1).flip(1) * x, (5, 37), torch.float32),
    "before": (before, (5, 37), torch.float32),
    "three": (three, (5, 37), torch.float32),
    "top": (top, (5, 37), torch.float32),
}


@cache
def imported(name: str, dynamic: bool) -> Graph:
    fn, shape, dtype = PROGRAMS[name]
    gms = capture(fn, (torch.zeros(shape, dtype=dtype),), dynamic=dynamic)
    retarget(gms, "cuda")
    graph = import_graph(gms[0])
    assert not any(isinstance(n, Library) for n in graph.nodes)
    return run_passes(GRAPH_PASSES, graph, context_of(Options(target="cuda:sm_90")))


@cache
def nests_of(name: str, dynamic: bool, hint: int | None = None) -> tuple[LoopNest, ...]:
    found = map(lower_to_loops, fuse(imported(name, dynamic)).functions.values())
    return tuple(n if hint is None else believing(n, hint) for n in found)


def believing(nest: LoopNest, hint: int) -> LoopNest:
    return replace(nest, symbols=SymbolTable(tuple(replace(s, hint=hint) for s in nest.symbols.sizes)))


def elements(nest: LoopNest, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Numbers near one, so that products of many stay what they are; some integers, some infinities."""
    rng, found = np.random.default_rng(1), {}
    for b in nest.params:
        shape = tuple(int(e.xreplace({s: sizes[s.name] for s in e.free_symbols})) for e in b.shape)
        if b.name not in nest.outputs:
            values = rng.integers(-2, 4, shape) if b.dtype.is_int else 1 + 0.2 * rng.standard_normal(shape)
            found[b.name] = np.asarray(values).astype(np.float32).astype(b.dtype.numpy)
    return found


def extents(name: str, nest: LoopNest) -> dict[str, int]:
    return dict(zip((s.name for s in nest.symbols.symbols), PROGRAMS[name][1], strict=False))


WHOLE = (
    "sum",
    "best",
    "recurrence",
    "double",
    "product",
    "narrow",
    "column_pairs",
    "planes",
    "merged",
    "one_row",
    "twice",
    "before",
    "top",
)
LOOPED = ("half", "best", "recurrence", "pairs", "columns", "planes", "before", "three", "top")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_rows(name: str, agrees: Callable) -> None:
    for nest in nests_of(name, False):
        schedule = default_schedule(nest, SM90)
        assert schedule.rule == "gpu_scan"
        source = agrees(schedule.nest, inputs=elements(nest, {}), tolerance=3e-2 if name == "half" else 1e-5)
        assert "associative_scan" in source.text and " in tl.range" not in source.text


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_over_tiles_carries_the_states(name: str, agrees: Callable) -> None:
    for nest in nests_of(name, True, 16):
        schedule, sizes = default_schedule(nest, SM90), extents(name, nest)
        if not any(b.is_scan for b, _ in blocks(nest)):
            continue
        assert schedule.rule == "gpu_scan"
        source = agrees(schedule.nest, sizes, elements(nest, sizes), tolerance=3e-2 if name == "half" else 1e-5)
        assert " in tl.range" in source.text and "carry" in source.text


def test_everything_that_is_offered(agrees: Callable) -> None:
    (nest,) = nests_of("columns", True, 16)
    sizes = extents("columns", nest)
    for candidate in [c for c in design_space(nest, SM90).candidates() if c.rule == "gpu_scan"][1:4]:
        agrees(candidate.schedule.nest, sizes, elements(nest, sizes), tolerance=1e-5)


@pytest.mark.parametrize("name", ["sum", "pairs", "best"])
def test_infinities_and_nan_pass_from_tile_to_tile(name: str, agrees: Callable) -> None:
    (nest,) = nests_of(name, True, 16)
    x = np.ones((5, 37), np.float32)
    x[0, 3], x[1, 20], x[2, :], x[3, 17:19], x[4, 2] = NAN, INF, -INF, (INF, -INF), -0.0
    agrees(default_schedule(nest, SM90).nest, extents(name, nest), {nest.params[0].name: x}, tolerance=1e-5)


@pytest.mark.parametrize("target", [SM90, GFX942], ids=str)
def test_they_compile(target: Any) -> None:
    dynamic = ("half", "column_pairs", "best", "recurrence") if target is SM90 else ("half",)
    for nest in (*(n for name in dynamic for n in nests_of(name, True, 3000)), *nests_of("narrow", False)):
        source = emit_triton(default_schedule(nest, target).nest, target)
        report = resource_report(compile_triton(source, target))
        assert not report.spills and report.shared <= target.shared_bytes, source.text


def test_what_a_row_makes_of_a_scan_is_not_mixed_with_it_again() -> None:
    """Not in one kernel, where rows are longer than registers hold."""

    def centred(x: Tensor) -> Tensor:
        y = x.cumsum(1)
        return y - y.mean(1, keepdim=True)

    counts = []
    for width in (64, 9000):
        gms = capture(centred, (torch.zeros(256, width),))
        retarget(gms, "cuda")
        graph = run_passes(GRAPH_PASSES, import_graph(gms[0]), context_of(Options(target="cuda:sm_90")))
        functions = fuse(graph).functions.values()
        for f in functions:
            emit_triton(default_schedule(lower_to_loops(f), SM90).nest, SM90)
        counts.append(len(functions))
    assert counts == [1, 2]


def test_few_long_rows_are_left_to_the_library() -> None:
    gms = capture(lambda x: x.cumsum(1) + 1, (torch.zeros(2, 100_000),))
    retarget(gms, "cuda")
    (call,) = (n for n in import_graph(gms[0]).nodes if isinstance(n, Library))
    assert call.target == "aten::cumsum.default" and "few long rows" in call.reason
