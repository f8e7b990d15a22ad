"""Reductions along rows and across them, of the same elements, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.value import loads
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import CallTensor
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.fusion.pieces.two_stage import in_two_stages
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

Function = Callable[..., Any]


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, w, b, [True, True, True])


def rms_norm_backward(g: Tensor, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    normed, scaled = x * r, g * w
    inner = (scaled * normed).mean(-1, keepdim=True)
    return (scaled - normed * inner) * r, (g * normed).sum(tuple(range(x.ndim - 1)))


def columns_first(g: Tensor, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over rows come first, and leave in another type."""
    scale = (g * x * r).sum(0).to(torch.bfloat16)
    return g * w - x * (g * w * x).sum(-1, keepdim=True) * r, scale


def of_rows_in_a_row(p: Tensor, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What comes back is a product of two dimensions, as of a linear layer, and the norm's input has three; the last
    sum reads nothing else."""
    g = p.view_as(x)
    return *rms_norm_backward(g, x, r, w), g.sum((0, 1))


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), (x * x).sum(1)


def both_scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sum(1), x.amax(0) * 2, (x.sum(0) * 0.5).to(torch.bfloat16)


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.argmax(-1), x.argmin(0)


def fused(fn: Function, inputs: tuple[Tensor, ...], device: str = "cpu", dynamic: bool = False) -> Fusion:
    found = capture(fn, inputs, dynamic=dynamic)
    if device != "cpu":
        retarget(found, device)
    graph = import_graph(found[0])
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    return fuse(graph)


def kernels(fusion: Fusion) -> list[TensorFunction]:
    return [fusion.functions[n.function] for n in fusion.graph.nodes if isinstance(n, CallTensor)]


def rms_inputs(*shape: int) -> tuple[Tensor, ...]:
    return torch.randn(shape), torch.randn(shape), torch.rand(*shape[:-1], 1) + 0.5, torch.randn(shape[-1])


def crossing(function: TensorFunction) -> list[str]:
    return [r for s in function.stages if s.axes is not None and s.monoid is not None for r in s.results]


CASES = [
    (rms_norm_backward, rms_inputs(37, 41)),
    (rms_norm_backward, rms_inputs(4, 33, 48)),
    (columns_first, rms_inputs(37, 41)),
    (of_rows_in_a_row, (torch.randn(4 * 33, 48), *rms_inputs(4, 33, 48)[1:])),
    (both, (torch.randn(21, 35),)),
    (both_scaled, (torch.randn(64, 33),)),
    (extremes, (torch.randn(31, 129),)),
]
IDS = ["rms", "rms of three dims", "columns first", "rows in a row", "both", "both, scaled", "extremes"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), CASES, ids=IDS)
def test_one_kernel_on_a_cpu(fn: Function, inputs: tuple[Tensor, ...], dynamic: bool) -> None:
    (function,) = kernels(fused(fn, inputs, dynamic=dynamic))
    assert crossing(function)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), CASES, ids=IDS)
def test_compiled_on_a_cpu(fn: Function, inputs: tuple[Tensor, ...], dynamic: bool) -> None:
    torch._dynamo.reset()
    got = torch.compile(fn, backend="mlc", dynamic=dynamic)(*inputs)
    wide = [t.double() for t in inputs]
    for ours, reference in zip(got, fn(*wide), strict=True):
        close = 1e-2 if ours.dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(ours.double(), reference.double(), rtol=close, atol=close)


def test_layer_norm_backward_is_one_visit_of_many_rows() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1031, 129), (2048, 96)):
        g, x = torch.randn(rows, columns), torch.randn(rows, columns)
        w, b = torch.randn(columns), torch.randn(columns)
        torch._dynamo.reset()
        got = torch.compile(layer_norm_backward, backend="mlc")(g, x, w, b)
        wanted = layer_norm_backward(*(t.double() for t in (g, x, w, b)))
        for ours, reference in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours.double(), reference, rtol=2e-5, atol=5e-4)


def test_what_spreads_the_sums_stays_outside() -> None:
    """A softmax over the columns needs its maxima element by element, so they are not made beside sums of rows."""
    functions = kernels(fused(lambda x: (x.sum(1), F.softmax(x, 0)), (torch.randn(40, 50),)))
    assert not any(crossing(f) for f in functions)


def over_channels(p: Tensor, q: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradient of a norm over channels that lie behind one another, of a sum that is kept, and sums of channels."""
    g = p + q
    scaled = g * w[:, None]
    mean, slope = scaled.sum(1, keepdim=True) / w.numel(), (scaled * x).sum(1, keepdim=True) / w.numel()
    out = (scaled - mean) - x * slope
    return g, out, g.sum((0, 2)), out.sum((0, 2))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_elements_that_read_what_is_made_of_sums_stay_outside(device: str) -> None:
    """They may read the sums themselves or a scale of them: neither is there before all rows have been visited."""
    inputs = (*(torch.randn(2, 16, 256) for _ in range(3)), torch.randn(16))
    for function in kernels(fused(over_channels, inputs, device)):
        late = {r for s in function.stages if s.axes is not None for r in s.results}
        for stage in function.stages:
            if stage.axes is None:
                assert late.isdisjoint(ld.buffer for v in stage.values for ld in loads(v)), function
    test_compiled_on_a_cpu(over_channels, inputs, False)


def of_two_norms(g: Tensor, h: Tensor, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What comes back from one norm, beside what passes it by, goes through another."""
    between, scale = rms_norm_backward(g, x, r, w)
    between = between + h
    return scale, *rms_norm_backward(between, h, r, w), between.sum(tuple(range(x.ndim - 1)))


@pytest.mark.parametrize("shape", [(4, 14, 14, 32), (4, 14, 28, 32), (4, 2, 7, 2, 7, 32), (1, 1, 200, 32), (5, 20, 33)])
def test_rows_of_several_dimensions_on_a_gpu(shape: tuple[int, ...]) -> None:
    """Where a dimension has just as many rows as there should be pieces, each has one of them."""
    g, x, r, w = rms_inputs(*shape)
    target = gpu_target("cuda:sm_90")
    turned = torch.randn(shape).movedim(-2, 0).contiguous().movedim(0, -2)  # or the rows would be one dimension
    fusion = fused(of_two_norms, (g, turned, x, r, w), "cuda")
    crossed = [f for f in kernels(fusion) if crossing(f)]
    assert crossed
    for function in crossed:
        schedule = default_schedule(lower_to_loops(function), target)
        assert schedule.rule == "gpu_cross_reduction"
        emit(schedule.nest, target)


def test_few_rows_and_short_rows_are_visited_twice() -> None:
    for shape in ((8, 200), (200, 8)):
        assert not any(crossing(f) for f in kernels(fused(both, (torch.randn(shape),))))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), CASES, ids=IDS)
def test_in_pieces(fn: Function, inputs: tuple[Tensor, ...], dynamic: bool) -> None:
    """The two functions of a GPU, one after the other, give what the one of a CPU gives."""
    (whole,) = kernels(fused(fn, inputs, dynamic=dynamic))
    pieces = in_two_stages(whole, gpu_target("cuda:sm_90").machine)
    assert pieces is not None
    nest, first, second = (lower_to_loops(f) for f in (whole, pieces.first, pieces.second))
    for n in (nest, first, second):
        verify(n)
    sizes = {s.name: 19 + 20 * k for k, s in enumerate(whole.symbols.symbols)}
    rng = np.random.default_rng(0)
    given = [rng.standard_normal([_number(e, sizes) for e in b.shape]).astype(np.float32) for b in whole.inputs]
    flat = [a.reshape(-1) for a in given]
    wanted = run_nest(nest, flat, sizes)
    parts = list(run_nest(first, flat, sizes).values())
    rest, partial = parts[: len(parts) - pieces.partial], parts[len(parts) - pieces.partial :]
    last = run_nest(second, [*partial, *(flat[k] for k in pieces.taken)], sizes)
    found = {True: iter(last.values()), False: iter(rest)}
    for k, array in enumerate(wanted.values()):
        ours = next(found[k in pieces.last])
        np.testing.assert_allclose(
            ours.astype(np.float64).ravel(), array.astype(np.float64).ravel(), rtol=1e-4, atol=1e-5
        )


def _number(e: Any, sizes: dict[str, int]) -> int:
    return int(e.subs({s: sizes[s.name] for s in e.free_symbols}))


def test_two_kernels_on_a_gpu_and_one_read() -> None:
    inputs = rms_inputs(64, 256)
    fusion = fused(rms_norm_backward, inputs, "cuda")
    first, second = kernels(fusion)
    assert crossing(first) and second.name.startswith(first.name.rsplit("_", 1)[0])
    calls = [n for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    assert set(calls[1].args) <= set(calls[0].names), "the second kernel reads the pieces alone"


def test_rows_that_no_program_holds_are_read_again() -> None:
    functions = kernels(fused(rms_norm_backward, rms_inputs(32, 16384), "cuda"))
    assert not any(crossing(f) for f in functions)
