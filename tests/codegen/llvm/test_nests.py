"""Whole kernels: fused functions of torch programs, scheduled by the rules, against the oracle on awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import Loop, LoopKind, LoopNest, Node, map_nodes
from torch_mlc.ir.oracle.oracle import run_nest, size
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

Array = np.ndarray[Any, Any]
Execute = Callable[..., dict[str, Array]]


def kernels(fn: Callable[..., Any], inputs: Sequence[Any], dynamic: bool) -> Iterator[LoopNest]:
    for gm in capture(fn, inputs, dynamic=dynamic):
        graph = import_graph(gm)
        graph = run_passes(GRAPH_PASSES, graph, USUAL)
        for function in fuse(graph).functions.values():
            yield lower_to_loops(function)


def always_a_team(nest: LoopNest) -> LoopNest:
    """Parallel loops start their team however little they do."""

    def change(node: Node) -> Node | None:
        if isinstance(node, Loop) and node.kind is LoopKind.PARALLEL:
            return replace(node, annotations=(("grain", 0),))
        return None

    return replace(nest, body=map_nodes(nest.body, change))


def sample(dtype: DType, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return rng.normal(0, 1, count).astype(np.float32).astype(dtype.numpy)
    return rng.integers(0, 2, count).astype(dtype.numpy)


def check(execute: Execute, nest: LoopNest, sizes: dict[str, int], target: Target, tolerance: float = 2e-5) -> None:
    inputs = []
    for k, p in enumerate(p for p in nest.params if p.name not in nest.outputs):
        shape = [size(e, sizes) for e in p.shape]
        span = 1 + sum((n - 1) * size(s, sizes) for n, s in zip(shape, p.strides, strict=True)) if 0 not in shape else 0
        inputs.append(sample(p.dtype, span, k))
    want = run_nest(nest, inputs, sizes)
    scheduled = default_schedule(nest, target)
    given = scheduled.nest if target.cores == 1 else always_a_team(scheduled.nest)
    got = execute(given, inputs, sizes, target)
    for name in nest.outputs:
        kind = nest.buffer(name).dtype
        close = 1e-2 if kind.is_half else tolerance if kind.is_float else 0
        np.testing.assert_allclose(
            got[name].astype(np.float64), want[name].astype(np.float64), rtol=close, atol=close,
            err_msg=f"{name} of {nest.name} by {scheduled.rule} at {sizes}",
        )  # fmt: skip


def softmax_bf16(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x.bfloat16(), -1)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gelu": lambda x: F.gelu(x),
    "masks and bytes": lambda x: ((x > 0) & (x < 1), (x * 100).to(torch.int8)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax of halves": softmax_bf16,
    "softmax down": lambda x: F.softmax(x, 0),
    "variance": lambda x: torch.var_mean(x, -1),
    "variance down": lambda x: torch.var_mean(x, 0),
    "argmax": lambda x: (x.argmax(-1), x.argmin(0)),
    "column sums": lambda x: (x.sum(0), (x * x).sum(0)),
    "whole sum": lambda x: (x.sum(), x.amax()),
    "normalised by all": lambda x: x / x.norm(),
    "transposed": lambda x: x.t().contiguous() + 1,
    "added transposed": lambda x: x + (2 * x).t().flip(0)[: x.shape[0], : x.shape[1]].sum() * x,
    "joined": lambda x: torch.cat([x, x.exp(), x[:, :1]], 1),
    "padded": lambda x: F.pad(x, (1, 2, 1, 0), value=3.0),
    "flipped": lambda x: x.flip(1) + x.flip(0),
    "every other": lambda x: x[:, ::2] * 2,
    "looked up": lambda x: F.embedding((x.abs().sum(1) * 7).long() % x.shape[0], x),
    "repeated": lambda x: x.repeat(2, 3) - x.repeat(2, 3).mean(),
    "reshaped": lambda x: (x.reshape(-1) * 2, x),
    "running sums": lambda x: x.exp().cumsum(1) * x,
    "running products down": lambda x: (x.cumprod(0), x.cumsum(0) - 1),
    "running log-sum-exp": lambda x: x.logcumsumexp(-1),
    "running sums of probabilities": lambda x: F.softmax(x, -1).cumsum(-1),
    "running sums of halves": lambda x: x.bfloat16().cumsum(-1),
    "running counts": lambda x: (x > 0).cumsum(1),
    "running sums over all": lambda x: x.reshape(-1).cumsum(0).reshape(x.shape) + x,
    "double": lambda x: torch.log1p(x.double().abs()).sum(-1),
}
SHAPES = ((1, 1), (3, 5), (7, 33), (65, 2), (16, 64), (31, 129))


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_static_shapes(program: str, execute: Execute) -> None:
    for shape in SHAPES:
        for nest in kernels(PROGRAMS[program], [torch.randn(shape)], dynamic=False):
            for cores in (1, 2):
                check(execute, nest, {}, cpu_target(cores))


@pytest.mark.parametrize("program", sorted(set(PROGRAMS) - {"added transposed"}))
def test_symbolic_shapes(program: str, execute: Execute) -> None:
    for nest in kernels(PROGRAMS[program], [torch.randn(6, 10)], dynamic=True):
        names = [s.name for s in nest.symbols.symbols]
        for rows, columns in ((2, 3), (7, 33), (64, 2), (33, 129)):
            check(execute, nest, dict(zip(names, (rows, columns), strict=False)), cpu_target(2))


def test_long_sums_are_as_exact_as_torch(execute: Execute) -> None:
    torch.manual_seed(0)
    x = torch.rand(1 << 18)
    exact = x.double().sum().item()
    for nest in kernels(lambda v: v.sum(), [x], dynamic=False):
        for cores in (1, 2):
            target = cpu_target(cores)
            (got,) = execute(default_schedule(nest, target).nest, [x.numpy()], {}, target).values()
            assert abs(float(got) - exact) <= 4 * max(abs(x.sum().item() - exact), exact * 6e-8)


def test_column_sums_are_as_exact_as_torch(execute: Execute) -> None:
    torch.manual_seed(0)
    x = torch.rand(1 << 14, 24)
    exact = x.double().sum(0)
    for nest in kernels(lambda v: v.sum(0), [x], dynamic=False):
        for cores in (1, 2):
            target = cpu_target(cores)
            (got,) = execute(default_schedule(nest, target).nest, [x.numpy()], {}, target).values()
            error = (torch.from_numpy(got).double() - exact).abs().max()
            assert error <= 8 * max((x.sum(0) - exact).abs().max(), exact.max() * 6e-8)
