"""Attention functions on GPUs: one online kernel of two matrix products, interpreted, and compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import on_fake_device
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.graph.graph import CallTensor, Library
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.fusion.pieces.split_keys import split_keys
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.gpu.attention import GPU_ATTENTION
from torch_mlc.scheduler.schedule.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[3] / "scheduler"))
import attention_functions as plain

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def scheduled(variant, target=SM90, hints=None, **sizes):
    schedule = default_schedule(lower_to_loops(plain.attention(variant, plain.Sizes(**sizes), hints)), target)
    assert schedule.rule == "gpu_attention"
    return schedule.nest


CASES = {
    **{
        v.name: (v, {"m": 20, "n": 37, "e": 16, "d": 24, "dtype": BF16})
        for v in plain.VARIANTS
        if v is not plain.DROPOUT
    },
    "dropout": (plain.DROPOUT, {"h": 1, "m": 5, "n": 18, "e": 16, "d": 24, "dtype": BF16}),
    "float32": (plain.CAUSAL, {"m": 19, "n": 33, "e": 20, "d": 16}),
    "shared heads": (plain.SOFTCAP, {"b": 2, "h": 4, "m": 17, "n": 18, "e": 32, "d": 32, "groups": 2, "dtype": BF16}),
    "rows first": (plain.PLAIN, {"m": 33, "n": 70, "e": 16, "d": 16, "rows_first": True, "dtype": BF16}),
    "even": (plain.CAUSAL, {"m": 64, "n": 128, "e": 16, "d": 64, "dtype": BF16}),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_keeps_the_meaning(agrees, name):
    variant, sizes = CASES[name]
    source = agrees(scheduled(variant, **sizes), tolerance=1e-5 if "dtype" not in sizes else 2e-2)
    assert source.text.count("tl.dot(") == 2


COPIED = {
    "tails": (plain.CAUSAL, {"m": 20, "n": 37, "e": 16, "d": 24, "dtype": BF16}, {"k", "v"}),
    "window": (plain.window(9), {"h": 2, "m": 70, "n": 150, "e": 24, "d": 16, "dtype": BF16}, {"k", "v"}),
    "shared heads": (CASES["shared heads"][0], CASES["shared heads"][1], {"k", "v"}),
    "rows first": (plain.PLAIN, {"m": 33, "n": 70, "e": 16, "d": 16, "rows_first": True, "dtype": BF16}, {"k", "v"}),
    "rows of any length": (plain.PLAIN, {"m": 20, "n": 37, "e": 17, "d": 24, "dtype": BF16}, {"v"}),
}


@pytest.mark.parametrize("name", COPIED)
def test_tiles_of_keys_by_descriptors(agrees, name):
    """What a tile has beyond the array is zero: the tails of keys and of features have no mask of their own."""
    variant, sizes, copied = COPIED[name]
    source = agrees(copied_by_descriptors(variant, **sizes), tolerance=2e-2)
    assert set(str(source.option("descriptors")).split(",")) == copied
    assert not any(f"tl.load({b}_ptr" in source.text for b in copied)


def copied_by_descriptors(variant, hints=None, **sizes):
    nest = lower_to_loops(plain.attention(variant, plain.Sizes(**sizes), hints))
    params = {k: v[0] for k, v in GPU_ATTENTION.parameters(nest, SM90).items()}
    assert params["descriptors"] is False, "too little work"
    schedule = Schedule(nest)
    GPU_ATTENTION.apply(schedule, SM90, {**params, "descriptors": True})
    return schedule.nest


@pytest.mark.parametrize("length", [3, 70])
def test_descriptors_of_a_symbolic_length(agrees, length):
    s0 = symbol("s0")
    nest = copied_by_descriptors(plain.CAUSAL, hints={"s0": 64}, m=s0, n=s0, e=16, d=16, dtype=BF16)
    source = agrees(nest, {"s0": length}, tolerance=2e-2)
    assert source.option("descriptors") == "k,v"


@pytest.mark.parametrize("length", [3, 16, 70])
def test_symbolic_length(agrees, length):
    s0 = symbol("s0")
    nest = scheduled(plain.CAUSAL, hints={"s0": 64}, m=s0, n=s0, e=16, d=16, dtype=BF16)
    agrees(nest, {"s0": length}, tolerance=2e-2)


@pytest.mark.parametrize("variant", [plain.CAUSAL, plain.window(9)], ids=lambda v: v.name)
@pytest.mark.parametrize("symbolic", [False, True])
def test_empty_tiles_are_not_read(agrees, variant, symbolic):
    """The loop over keys begins and ends where the mask does: NaN beyond does not show."""
    s0, s1 = (symbol("s0"), symbol("s1")) if symbolic else (70, 110)
    nest = scheduled(variant, hints={"s0": 70, "s1": 110}, h=2, m=s0, n=s1, e=16, d=16)
    rng = np.random.default_rng(0)
    inputs = {b: rng.standard_normal((2, n, 16)).astype(np.float32) for b, n in (("q", 70), ("k", 110), ("v", 110))}
    inputs["k"][:, 96:], inputs["v"][:, 96:] = np.nan, np.nan
    source = agrees(nest, {"s0": 70, "s1": 110} if symbolic else {}, inputs, tolerance=1e-5)
    (loop,) = [line for line in source.text.splitlines() if "in tl.range" in line]
    assert "high0" in loop and ("low0" in loop) == (variant is not plain.CAUSAL)


@pytest.mark.parametrize("variant", [plain.PLAIN, plain.CAUSAL, plain.window(150), plain.ALIBI], ids=lambda v: v.name)
@pytest.mark.parametrize(("m", "n"), [(70, 300), (290, 290), (300, 270)])
def test_tiles_that_no_mask_crosses_have_a_loop_of_their_own(interpreter, monkeypatch, variant, m, n):
    """Without comparisons, tails included; the loop over the others is at one end, or at both."""
    torch.manual_seed(0)
    # As if tensor cores multiplied float32.
    monkeypatch.setattr("torch_mlc.scheduler.rules.gpu.attention.by_threads", lambda *_: False)
    function = plain.attention(variant, plain.Sizes(b=1, h=2, m=m, n=n, e=16, d=16))
    nest = default_schedule(lower_to_loops(function), SM90).nest
    source = emit_triton(nest, SM90)
    body, edges = source.text.split("in tl.range(")[1:]
    assert " < " not in body.partition("for ")[0] and " < " in edges
    assert ("tl.where(k0_ < before0" in edges) == (variant.name.startswith("window") and m > 150)
    tensors = plain.inputs(function)
    given = {
        b.name: t.numpy().reshape([int(n) for n in nest.buffer(b.name).shape])
        for b, t in zip(function.inputs, tensors, strict=True)
    }
    (got,) = interpreter.run(source, nest.outputs, given, {}).values()
    wanted = plain.expected(variant, tensors)
    np.testing.assert_allclose(got.reshape(wanted.shape), wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [plain.CAUSAL, pytest.param(plain.window(150), marks=pytest.mark.slow)])
def test_two_loops_of_half_types(interpreter, variant):
    """By the rule's own choice, for a row of tiles or more: weights are rounded as they would be in memory."""
    torch.manual_seed(0)
    function = plain.attention(variant, plain.Sizes(b=1, h=1, m=150, n=530, e=16, d=16, dtype=BF16))
    nest = default_schedule(lower_to_loops(function), SM90).nest
    source = emit_triton(nest, SM90)
    assert source.text.count("in tl.range(") == 2
    tensors = plain.inputs(function)
    given = {
        b.name: half(t).reshape([int(n) for n in nest.buffer(b.name).shape])
        for b, t in zip(function.inputs, tensors, strict=True)
    }
    (got,) = interpreter.run(source, nest.outputs, given, {}).values()
    wanted = plain.expected(variant, tensors)
    np.testing.assert_allclose(got.reshape(wanted.shape).astype(np.float64), wanted.numpy(), rtol=2e-2, atol=2e-2)


def half(t: torch.Tensor) -> np.ndarray:
    return t.float().numpy().astype(BF16.numpy)


def test_documents_skip_nothing(agrees):
    """What tokens are of one document is known to data alone."""
    source = agrees(scheduled(plain.DOCUMENTS, h=1, m=20, n=70, e=16, d=16), tolerance=1e-5)
    assert "in tl.range(0, 3, num_stages=" in source.text


DECODING = {
    "heads that share keys": {"h": 3, "m": 1, "n": 523, "e": 16, "d": 32, "groups": 3, "dtype": BF16},
    "a growing cache": {"h": 1, "m": 2, "n": symbol("s0"), "e": 16, "d": 16, "dtype": BF16},
}


@pytest.mark.parametrize("name", DECODING)
def test_keys_in_pieces(agrees, name):
    """Pieces of the keys in programs of their own, and the kernel that combines them."""
    sizes = {"s0": 600} if name == "a growing cache" else {}
    function = plain.attention(plain.PLAIN, plain.Sizes(**DECODING[name]), {"s0": 600})
    pieces = split_keys(function, SM90.machine)
    assert pieces is not None
    first, second = (default_schedule(lower_to_loops(f), SM90) for f in (pieces.first, pieces.second))
    assert first.rule == "gpu_attention"
    tolerance = 2e-2 if "dtype" in DECODING[name] else 1e-5
    agrees(first.nest, sizes, tolerance=tolerance)
    if sizes:
        agrees(second.nest, sizes, tolerance=1e-5)


def test_decoding_in_two_launches():
    shapes = [torch.empty(s, dtype=torch.bfloat16) for s in ((1, 8, 1, 64), (1, 2, 4096, 64), (1, 2, 4096, 64))]

    class Decode(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (t.repeat_interleave(4, 1) for t in (k, v))
            return torch.softmax(q @ k.mT / 8, -1) @ v

    model, inputs = on_fake_device(Decode(), shapes, "cuda")
    (gm,) = capture(model, inputs)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    fused = fuse(graph)
    calls = [n for n in fused.graph.nodes if isinstance(n, CallTensor)]
    found = [default_schedule(lower_to_loops(fused.functions[c.function]), SM90) for c in calls]
    assert [s.rule for s in found] == ["gpu_attention", "gpu_column_reduction"]
    assert not any(isinstance(n, Library) for n in fused.graph.nodes)
    for schedule in found:
        report = resource_report(compile_triton(emit_triton(schedule.nest, SM90), SM90))
        assert report.spills == 0 and report.shared <= SM90.shared_bytes


class Causal(torch.nn.Module):
    """Attention as models write it: heads by views, a cap, a mask, a softmax in float32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = 20 * torch.tanh((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 / 20)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), -1).to(q.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)


def kernels(rows: int, width: int) -> list[str]:
    return [s.rule for s in causal_schedules(rows, width)]


def causal_schedules(rows: int, width: int) -> list[Schedule]:
    return schedules(Causal(2), [torch.empty(2, rows, 2 * width, dtype=torch.bfloat16)] * 3)


def schedules(model: torch.nn.Module, shapes: list[torch.Tensor]) -> list[Schedule]:
    model, inputs = on_fake_device(model, shapes, "cuda")
    (gm,) = capture(model, inputs)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    return [default_schedule(lower_to_loops(f), SM90) for f in fuse(graph).functions.values()]


def test_a_user_s_attention_is_one_kernel(agrees):
    (schedule,) = causal_schedules(37, 16)
    assert schedule.rule == "gpu_attention"
    agrees(schedule.nest, tolerance=2e-2)


class Decode(torch.nn.Module):
    """One query against a cache, of which places after the present one count for nothing."""

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, 4, 32).transpose(1, 2)
        mask = torch.where(torch.arange(70, device=x.device) <= at, 0.0, float("-inf"))
        scores = (q @ keys.transpose(-1, -2)).float() * 32**-0.5 + mask
        return (scores.softmax(-1).to(x.dtype) @ values).transpose(1, 2).reshape(1, 128)


def test_one_query_whose_results_leave_its_axis_out(agrees):
    """Where the only query is at place 0, rows of a tile beyond it have no place of their own."""
    cache = torch.empty(1, 4, 70, 32, dtype=torch.bfloat16)
    inputs = [torch.empty(1, 128, dtype=torch.bfloat16), cache, cache, torch.empty(1, dtype=torch.int64)]
    (schedule,) = schedules(Decode(), inputs)
    assert schedule.rule == "gpu_attention"
    rng, given = np.random.default_rng(0), {}
    for b in (p for p in schedule.nest.params if p.name not in schedule.nest.outputs):
        values = np.array([33]) if b.dtype.is_int else rng.standard_normal(tuple(map(int, b.shape)))
        given[b.name] = values.astype(b.dtype.numpy)
    agrees(schedule.nest, inputs=given, tolerance=2e-2)


class Sinks(torch.nn.Module):
    """A sink's exponential is added to the sum, below the largest of scores and sink; a mask empties rows."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        m, n = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
        scores = (q @ k.mT).float() / 4
        scores = scores.masked_fill((m[:, None] < 5) | (n > m[:, None]), float("-inf"))
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
        return (weights / total).to(v.dtype) @ v


def test_a_sink_is_of_the_same_kernel(interpreter):
    """The state is as without one: what follows it adds the sink. Rows that see nothing are zeros."""
    rows = torch.empty(1, 2, 70, 16, dtype=torch.bfloat16)
    (schedule,) = schedules(Sinks(), [rows, rows, rows, torch.empty(2, 1, 1)])
    assert schedule.rule == "gpu_attention"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16).bfloat16() for _ in range(3))
    sinks, nest = torch.tensor([0.5, 80.0]).view(2, 1, 1), schedule.nest
    params = [b for b in nest.params if b.name not in nest.outputs]
    given = dict(zip((b.name for b in params), (half(q), half(k), half(v), sinks.numpy()), strict=True))
    (got,) = interpreter.run(emit_triton(nest, SM90), nest.outputs, given, {}).values()
    wanted = Sinks()(*(t.double() for t in (q, k, v, sinks)))
    np.testing.assert_allclose(got.reshape(wanted.shape).astype(np.float64), wanted.numpy(), rtol=2e-2, atol=2e-2)
    assert not got.reshape(wanted.shape)[:, :, :5].any()


class Shared(torch.nn.Module):
    """Queries and keys that all of the batch shares: scores have an axis of which neither knows."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.expand(3, *t.shape[-2:]) for t in (q, k, v))
        return torch.softmax(q @ k.mT / 5, -1) @ v


@pytest.mark.parametrize("batch", [(), (3,)], ids=["of all", "but the values"])
def test_scores_that_a_batch_shares(agrees, batch):
    rows = torch.empty(20, 32, dtype=torch.bfloat16)
    (schedule,) = schedules(Shared(), [rows, rows, rows.new_empty(*batch, 20, 32)])
    assert schedule.rule == "gpu_attention"
    agrees(schedule.nest, tolerance=2e-2)


def test_attention_that_fits_no_tile_stays_with_the_library():
    assert kernels(8, 16) == ["gpu_attention"]
    assert "gpu_attention" not in kernels(32, 8)


@pytest.mark.parametrize("variant", [plain.SOFTCAP, plain.CAUSAL, plain.ALIBI], ids=lambda v: v.name)
@pytest.mark.parametrize("depth", [64, 128])
def test_large_attention_uses_the_tensor_cores(variant, depth):
    nest = scheduled(variant, b=4, h=16, m=2048, n=2048, e=depth, d=depth, dtype=BF16)
    binary = compile_triton(emit_triton(nest, SM90), SM90)
    report = resource_report(binary)
    assert binary.assembly.count("wgmma.mma_async") >= 2 * depth // 32
    assert ("cp.async.bulk.tensor" in binary.assembly) == (depth == 128)
    assert report.spills == 0 and report.shared <= SM90.shared_bytes
    assert report.wide_loads >= 0.95 and report.wide_stores == 1.0


def test_attention_compiles_for_amd():
    nest = scheduled(plain.SOFTCAP, GFX942, b=4, h=16, m=2048, n=2048, e=64, d=64, dtype=BF16)
    binary = compile_triton(emit_triton(nest, GFX942), GFX942)
    report = resource_report(binary)
    assert "v_mfma_f32" in binary.assembly
    assert report.spills == 0 and report.shared <= GFX942.shared_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_rule_on_a_gpu(agrees_on_gpu, name):
    variant, sizes = CASES[name]
    agrees_on_gpu(lambda target: scheduled(variant, target, **sizes), tolerance=1e-5 if "dtype" not in sizes else 2e-2)
