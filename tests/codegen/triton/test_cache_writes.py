"""Rotated keys and values that are written into a cache: one launch, interpreted, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.graph.graph import CallTensor, Library
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

Fn = Callable[..., Any]
SM90 = gpu_target("cuda:sm_90")
BF16, F32 = torch.bfloat16, torch.float32


def half_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Hugging Face's models write it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), cos, sin = x.chunk(2, -1), cos[..., : x.shape[-1] // 2], sin[..., : x.shape[-1] // 2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def copied(rotate: Fn) -> Fn:
    def step(*given: Tensor) -> None:
        k, v, cos, sin, keys, values, at = given
        assert all(x.dim() for x in given)
        keys.index_copy_(2, at, rotate(k, cos, sin))
        values.index_copy_(2, at, v)

    return step


def assigned(k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
    assert all(x.dim() for x in (k, v, cos, sin, keys, values, at))
    keys[:, :, at] = half_turned(k, cos, sin)
    values[:, :, at] = v


def sliced(k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
    assert all(x.dim() for x in (k, v, cos, sin, keys, values, at))
    keys[:, :, 5:7] = half_turned(k, cos, sin)
    values[:, :, 5:7] = v


def fused(fn: Fn, given: tuple[Tensor, ...]) -> Fusion:
    gms = capture(fn, given)
    retarget(gms, "cuda")
    context = context_of(Options(target="cuda:sm_90"))
    return run_passes(CALL_PASSES, fuse(run_passes(GRAPH_PASSES, import_graph(gms[0]), context)), context)


def inputs(dtype: torch.dtype, tokens: int = 2, width: int = 24) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 3, tokens, width) for _ in range(2))
    k[0, 1, 0, 3], v[1, 2, 0, 5], v[0, 0, 0, 1] = float("nan"), float("inf"), float("-inf")
    cos, sin = (torch.randn(1, 1, tokens, width) for _ in range(2))
    keys, values = (torch.randn(2, 3, 17, width) for _ in range(2))
    return (*(x.to(dtype) for x in (k, v, cos, sin, keys, values)), torch.tensor([5, 11])[:tokens])


def array(t: Tensor) -> np.ndarray:
    return t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype is BF16 else t.numpy()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "fn",
    [copied(half_turned), copied(in_halves), assigned, sliced],
    ids=["half", "halves", "assigned", "sliced"],
)
def test_one_launch_rotates_and_writes_both(interpreter, fn, dtype):
    given = inputs(dtype)
    fusion = fused(fn, given)
    (call,) = (n for n in fusion.graph.nodes if isinstance(n, CallTensor))
    assert not any(isinstance(n, Library) and "copy" not in n.target for n in fusion.graph.nodes)
    names = [i.name for i in fusion.graph.inputs]
    # Places that are known are no input.
    tensors = dict(zip(names, given, strict=False))
    schedule = default_schedule(lower_to_loops(fusion.functions[call.function]), SM90)
    assert schedule.rule == ("gpu_pointwise" if fn is sliced else "gpu_scatter")
    assert len(schedule.nest.outputs) == 2
    nest = schedule.nest
    arrays = {b.name: array(tensors[a]).reshape([int(e) for e in b.shape])
              for b, a in zip(nest.params, call.args, strict=True)}  # fmt: skip
    found = interpreter.run(emit_triton(nest, SM90), nest.outputs, arrays, {})
    exact = [t.double() if t.is_floating_point() else t.clone() for t in given]
    fn(*exact)
    bound = 2e-2 if dtype is BF16 else 1e-5
    for name, into in zip(nest.outputs, call.into, strict=True):
        wanted = exact[names.index(into)].numpy()
        assert not np.isfinite(wanted).all()
        written = found[name].astype(np.float64).reshape(wanted.shape)
        np.testing.assert_allclose(written, wanted, rtol=bound, atol=bound)


def step_of(q: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """A step's queries rotated, its keys and values written, and a mask of what is alive by now."""
    assert q.dim()
    copied(half_turned)(*given)
    _, _, cos, sin, keys, _, at = given
    return half_turned(q, cos, sin), torch.arange(keys.shape[2]) <= at[-1:]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "heads"), [(2, 6), (1, 9), (2, 1)])
def test_one_launch_rotates_queries_too(interpreter, dtype, tokens, heads):
    """Of the four things each has a number of points of its own, none a multiple of a tile."""
    given = inputs(dtype, tokens)
    q = torch.randn(2, heads, tokens, 24)
    q[1, 0, 0, 3], q[0, heads - 1, tokens - 1, 23] = float("nan"), float("-inf")
    given = (q.to(dtype), *given)
    fusion = fused(step_of, given)
    (call,) = (n for n in fusion.graph.nodes if isinstance(n, CallTensor))
    function = fusion.functions[call.function]
    schedule = default_schedule(lower_to_loops(function), SM90)
    assert schedule.rule == "gpu_small"
    assert len(schedule.nest.outputs) == 4
    tensors = dict(zip((i.name for i in fusion.graph.inputs), given, strict=True))
    arrays = {b.name: array(tensors[a]).reshape([int(e) for e in b.shape])
              for b, a in zip(function.inputs, call.args, strict=True)}  # fmt: skip
    for o in function.outputs:
        if o.buffer not in function.inputs:
            empty = np.full([int(e) for e in o.buffer.shape], 77)
            arrays[o.buffer.name] = empty.astype(array(torch.empty(0, dtype=o.buffer.dtype.torch)).dtype)
    found = interpreter.run(emit_triton(schedule.nest, SM90), schedule.nest.outputs, arrays, {})
    exact = [t.double() if t.is_floating_point() else t.clone() for t in given]
    made = dict(zip(fusion.graph.outputs, step_of(*exact), strict=False))
    after = dict(zip((i.name for i in fusion.graph.inputs), exact, strict=True))
    bound = 2e-2 if dtype is BF16 else 1e-5
    for o, name, into in zip(function.outputs, call.names, call.into, strict=True):
        wanted = (after[into] if into is not None else made[name]).numpy()
        written = found[o.buffer.name].astype(wanted.dtype).reshape(wanted.shape)
        np.testing.assert_allclose(written, wanted, rtol=bound, atol=bound)


def test_what_waits_or_is_large_has_its_own_launch():
    def step(q: Tensor, large: Tensor, k: Tensor, keys: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert all(x.dim() for x in (q, large, k, keys, at))
        keys.index_copy_(2, at, k)
        return torch.sin(q), torch.cos(large), keys[:, :, :2].exp()

    k, _, _, _, keys, _, at = inputs(F32)
    fusion = fused(step, (torch.randn(5, 7), torch.randn(1 << 18, 2), k, keys, at))
    made = [n.names for n in fusion.graph.nodes if isinstance(n, CallTensor)]
    sine, cosine, power = fusion.graph.outputs[:3]
    (joined,) = (names for names in made if sine in names)
    assert len(made) == 3 and len(joined) == 2 and cosine not in joined and power not in joined


def test_writes_that_wait_for_one_another_stay_apart():
    def waits(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
        assert k.dim() and v.dim()
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v + keys[:, :, :2])

    k, v, _, _, keys, values, at = inputs(F32)
    fusion = fused(waits, (k, v, keys, values, at))
    scatters = [n for n in fusion.graph.nodes if isinstance(n, CallTensor) and fusion.functions[n.function].scatters]
    assert len(scatters) == 2


def test_writes_of_other_points_stay_apart():
    def other(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> None:
        assert k.dim() and v.dim()
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at[:1], v[:, :, :1])

    k, v, _, _, keys, values, at = inputs(F32)
    fusion = fused(other, (k, v, keys, values, at))
    assert sum(isinstance(n, CallTensor) for n in fusion.graph.nodes) == 2


def test_compiled():
    fusion = fused(copied(half_turned), inputs(BF16, 1, 128))
    (function,) = fusion.functions.values()
    nest = default_schedule(lower_to_loops(function), SM90).nest
    assert resource_report(compile_triton(emit_triton(nest, SM90), SM90)).spills == 0
