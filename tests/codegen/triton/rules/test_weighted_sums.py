"""Attention without a softmax on GPUs: from plain operations to one kernel, interpreted, against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.graph.graph import CallTensor, Library
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule

Fn = Callable[..., Any]
SM90 = gpu_target("cuda:sm_90")
BF16, HALF = torch.bfloat16, torch.float16


class Model(nn.Module):
    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *given: Tensor) -> Any:
        # Dynamo numbers inputs in the order in which they are first looked at.
        assert all(x.dim() for x in given)
        return self.fn(*given)


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * 0.25 - 1) @ v


def squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.relu(q @ k.mT).square() @ v


def _hidden(scores: Tensor) -> Tensor:
    m, n = (torch.arange(x, device=scores.device) for x in scores.shape[-2:])
    return n > m[:, None]


def masked_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return torch.sigmoid(scores.masked_fill(_hidden(scores), float("-inf"))) @ v


def masked_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return torch.where(_hidden(scores), 0.0, torch.sigmoid(scores)) @ v


def masked_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return torch.relu(scores.masked_fill(_hidden(scores), float("-inf"))).square() @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:1].expand(2, -1, -1) for x in (k, v))
    return torch.sigmoid(q @ k.mT * 0.25) @ v


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No function of scores but which of them are seen."""
    scores = q @ k.mT * 0.25
    return torch.where(_hidden(scores), 0.0, scores) @ v


def fused(fn: Fn, given: tuple[Tensor, ...], device: str = "cuda") -> Fusion:
    model, inputs = on_fake_device(Model(fn), given, device) if device != "cpu" else (Model(fn), given)
    (gm,) = capture(model, inputs)
    return fuse(run_passes(GRAPH_PASSES, import_graph(gm), USUAL))


def inputs(m: int, n: int, d: int, dtype: torch.dtype, heads: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, rows, d).to(dtype) for rows in (m, n, n))
    return q, k, v


def array(t: Tensor) -> np.ndarray:
    return t.float().numpy().astype(ml_dtypes.bfloat16 if t.dtype is BF16 else np.float16)


def run(interpreter: Any, fusion: Fusion, given: tuple[Tensor, ...]) -> np.ndarray:
    """The only kernel's only result."""
    (call,) = (n for n in fusion.graph.nodes if isinstance(n, CallTensor))
    assert not any(isinstance(n, Library) for n in fusion.graph.nodes)
    schedule = default_schedule(lower_to_loops(fusion.functions[call.function]), SM90)
    assert schedule.rule == "gpu_attention_gradients"
    tensors = {i.name: t for i, t in zip(fusion.graph.inputs, given, strict=True)}
    nest = schedule.nest
    arrays = {
        b.name: array(tensors[a]).reshape([int(e) for e in b.shape])
        for b, a in zip(nest.params, call.args, strict=False)
    }
    (out,) = nest.outputs
    return interpreter.run(emit_triton(nest, SM90), (out,), arrays, {})[out].astype(np.float64)


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("fn", [sigmoid, squared_relu, masked_before, masked_behind, masked_relu, grouped, linear])
def test_one_kernel_as_in_float64(interpreter, fn, dtype):
    given = inputs(70, 37, 24, dtype)
    wanted = fn(*(t.double() for t in given)).numpy()
    found = run(interpreter, fused(fn, given), given).reshape(wanted.shape)
    bound = 3e-2 if dtype is BF16 else 4e-3
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound * np.abs(wanted).max())


@pytest.mark.parametrize("fn", [sigmoid, squared_relu, masked_before])
def test_rows_of_nan_and_infinities_are_eagers(interpreter, fn):
    q, k, v = inputs(70, 70, 16, BF16)
    q[0, 3] = float("nan")
    q[0, 5, 2] = float("inf")
    q[1, 69, 0] = float("-inf")
    v[1, 0, 7] = float("inf")
    wanted = fn(*(t.double() for t in (q, k, v))).numpy()
    assert np.isnan(wanted[0, 3]).all()
    assert np.isinf(wanted).any()
    found = run(interpreter, fused(fn, (q, k, v)), (q, k, v)).reshape(wanted.shape)
    bound = 3e-2
    finite = np.where(np.isfinite(wanted), np.abs(wanted), 0.0).max()
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound * finite)


def test_causal_tiles_are_left_out():
    """The last tile of keys that a tile of queries sees bounds the loop."""
    for fn in (masked_before, masked_behind, masked_relu):
        fusion = fused(fn, tuple(torch.empty(64, 1024, 64, dtype=BF16) for _ in range(3)))
        (function,) = fusion.functions.values()
        text = emit_triton(default_schedule(lower_to_loops(function), SM90).nest, SM90).text
        assert re.search(r"in tl.range\((0|last0), high0", text), text


def products(fusion: Fusion) -> list[str]:
    return [n.reason for n in fusion.graph.nodes if isinstance(n, Library) and "bmm" in n.target]


def test_scores_that_another_reads_stay(interpreter):
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.sigmoid(q @ k.mT)
        return weights @ v, weights

    fusion = fused(both, inputs(2048, 2048, 64, BF16, 32))
    assert any("the graph's output" in r for r in products(fusion))


def test_a_product_is_not_repeated_in_another_kernel():
    def two_ways(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.sigmoid(q @ k.mT)
        return weights @ v, weights.mT @ v

    fusion = fused(two_ways, inputs(1024, 1024, 64, BF16, 32))
    assert sum("needs what is made of" in r for r in products(fusion)) == 2


def test_wide_heads_stay_where_a_library_is_faster():
    fusion = fused(sigmoid, inputs(1024, 1024, 256, BF16, 32))
    assert any("stays apart: " in r and "us in one kernel" in r for r in products(fusion))


def test_wide_heads_of_which_a_mask_leaves_half():
    """Our loop leaves out what it empties, and a library makes all of it."""
    assert not products(fused(masked_behind, inputs(1024, 1024, 256, BF16, 32)))


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cuda"), (BF16, "cpu")])
def test_other_types_and_targets_stay(dtype, device):
    fusion = fused(sigmoid, inputs(256, 256, 64, dtype, 8), device)
    assert len(products(fusion)) == 2 or not any(f.extra for f in fusion.functions.values())


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("fn", [sigmoid, masked_behind])
def test_compiled(fn, width):
    fusion = fused(fn, tuple(torch.empty(32, 1024, width, dtype=BF16) for _ in range(3)))
    (function,) = fusion.functions.values()
    nest = default_schedule(lower_to_loops(function), SM90).nest
    report = resource_report(compile_triton(emit_triton(nest, SM90), SM90))
    assert report.spills == 0 and report.group_products > 0
    assert report.shared <= SM90.shared_bytes
