"""Every schedule that a rule offers computes what the nest did, whatever the sizes that it was chosen for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.nest.loops import LoopKind, LoopNest, blocks
from torch_mlc.ir.oracle.oracle import run_nest, size
from torch_mlc.ir.passes import run_passes
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.calls import CALL_PASSES
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.fusion.pieces.two_stage import in_two_stages
from torch_mlc.scheduler.passes import GRAPH_PASSES
from torch_mlc.scheduler.rules import RULES, default_schedule, design_space
from torch_mlc.scheduler.rules.registry import Rule
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

TARGETS = {"cpu": Target("cpu", "znver3", 2), "cpu_wide": Target("cpu", "sapphirerapids", 16, vector_bytes=64),
           "cuda": gpu_target("cuda:sm_90"), "hip": gpu_target("hip:gfx942")}  # fmt: skip
Programs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def rand(*shape: int) -> Tensor:
    return torch.zeros(shape)


def norm_backward(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = g * w
    return (h - x * (h * x).mean(-1, keepdim=True)), (g * x).sum(0)


def nibbles(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    q = torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], 2 * w.shape[1])
    return x @ (q.to(x.dtype) * s).t()


PROGRAMS: Programs = {
    "pointwise": (lambda x: torch.sigmoid(x) * x, (rand(6, 7),)),
    "broadcast": (lambda x, b: torch.relu(x + b[:, None]) * 2, (rand(6, 7), rand(6))),
    "transpose": (lambda x, y: x.t() + y, (rand(6, 9), rand(9, 6))),
    "permute": (lambda x: x.permute(0, 2, 1).contiguous() * 2, (rand(3, 5, 4),)),
    "softmax": (lambda x: F.softmax(x * 0.5, -1), (rand(6, 9),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), (rand(6, 9), rand(9), rand(9))),
    "norm_backward": (norm_backward, (rand(6, 9), rand(6, 9), rand(9))),
    "norm_backward_rows": (norm_backward, (rand(18, 33), rand(18, 33), rand(33))),
    "column_sum": (lambda x: (x * x).sum(0), (rand(9, 6),)),
    "elements_and_column_mean": (lambda x: (y := x.sigmoid(), y.mean(0)), (rand(9, 6),)),
    "elements_and_whole_sums": (
        lambda x, y: (d := x - y, (d * d).sum(), d.abs().amax(), d.abs() * 2, d / x.sum()),
        (rand(6, 9), rand(6, 9)),
    ),
    "channels": (lambda x: x.mean((0, 2)), (rand(3, 4, 5),)),
    "scan": (lambda x, y: x.abs().cumsum(-1) * y, (rand(6, 9), rand(6, 9))),
    "scan_back": (lambda x, y: x.exp().flip(-1).cumsum(-1).flip(-1) * y, (rand(6, 9), rand(6, 9))),
    "scan_down": (lambda x: (x * 0.5).logcumsumexp(0) + x, (rand(9, 6),)),
    "whole": (lambda x: x.abs().sum(), (rand(6, 9),)),
    "argmax": (lambda x: x.argmax(-1), (rand(6, 9),)),
    "variance": (lambda x: torch.var_mean(x, -1), (rand(6, 9),)),
    "cat": (lambda x, y: torch.cat([x, y * 2], 1), (rand(5, 4), rand(5, 3))),
    "embedding": (lambda i, w: F.embedding(i, w) + 1, (torch.zeros(6, dtype=torch.int64), rand(5, 4))),
    "two_results": (lambda x: (x.amax(-1), x.sum(-1)), (rand(6, 9),)),
    "dequantised": (
        lambda x, w, s, b: F.linear(x, w.to(x.dtype) * s, b).relu(),
        (rand(5, 9), torch.zeros(7, 9, dtype=torch.int8), rand(7, 1), rand(7)),
    ),
    "dequantised_columns": (lambda x, w: x @ w.to(x.dtype), (rand(5, 9), torch.zeros(9, 7, dtype=torch.int8))),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 3).relu(), (rand(2, 3, 5, 9), rand(3, 1, 3, 3), rand(3))),
    "pooled": (lambda x: F.max_pool2d(x, 3, 2, 1), (rand(2, 3, 9, 7).to(memory_format=torch.channels_last),)),
    "filters": (
        lambda x, g: (x.unfold(2, g.shape[2], 1).unfold(3, g.shape[3], 1) * g[:, :, None, None]).sum((0, -2, -1)),
        (rand(2, 3, 12, 13), rand(2, 3, 10, 11)),
    ),
    "nibbles": (nibbles, (rand(3, 32), torch.zeros(6, 16, dtype=torch.uint8), rand(6, 1))),
}


@cache
def nests_of(name: str, dynamic: bool) -> tuple[LoopNest, ...]:
    fn, inputs = PROGRAMS[name]
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    graph = import_graph(gm)
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    functions = list(fuse(graph).functions.values())
    for f in list(functions):
        if (pieces := in_two_stages(f, gpu_target("cuda:sm_90").machine)) is not None:
            functions += [pieces.first, pieces.second]
    return tuple(map(lower_to_loops, functions))


def believing(nest: LoopNest, hint: int) -> LoopNest:
    """The nest with other typical sizes: rules choose as for large tensors, and the oracle still runs small ones."""
    sizes = tuple(replace(s, hint=hint + 7 * k) for k, s in enumerate(nest.symbols.sizes))
    return replace(nest, symbols=SymbolTable(sizes))


def same(before: LoopNest, after: LoopNest, extent: int) -> None:
    table = before.symbols.sizes
    sizes = {s.symbol.name: max(-(-(extent + 2 * k) // s.divisor) * s.divisor, s.lower) for k, s in enumerate(table)}
    rng = np.random.default_rng(0)
    inputs = {}
    for b in before.params:
        if b.name not in before.outputs:
            shape = tuple(size(e, sizes) for e in b.shape)
            # Numbers that look rows up stay within the smallest table.
            inputs[b.name] = rng.integers(0 if b.dtype.is_int else -3, 3, shape).astype(b.dtype.numpy)
    expected, got = run_nest(before, inputs, sizes), run_nest(after, inputs, sizes, backward=True)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=1e-6, err_msg=f"{name} at {sizes}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_for_given_sizes(name: str, target: str) -> None:
    for nest in nests_of(name, False):
        schedule = default_schedule(nest, TARGETS[target])
        verify(schedule.nest)
        same(nest, schedule.nest, 1)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("hint", [3, 3000])
def test_what_is_offered_for_symbolic_sizes(name: str, target: str, hint: int) -> None:
    for nest in nests_of(name, True):
        nest = believing(nest, hint)
        offered = list(islice(design_space(nest, TARGETS[target]).candidates(), 3))
        assert offered
        for candidate in offered:
            schedule = candidate.schedule
            verify(schedule.nest)
            same(nest, schedule.nest, 5)
            trace = Trace.from_json(schedule.trace.to_json())
            assert trace.rule == candidate.rule and replay(trace, nest).nest == schedule.nest


@pytest.mark.parametrize("cores", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_of_a_column_alone_costs_no_second_visit(dtype: torch.dtype, cores: int) -> None:
    """Rounding a sum, or dividing it by a count, waits for the sum; the elements do not."""
    (gm,) = capture(lambda x: (y := x.sigmoid(), y.mean(0)), (torch.zeros(2048, 512, dtype=dtype),))
    (function,) = fuse(run_passes(GRAPH_PASSES, import_graph(gm), USUAL)).functions.values()
    schedule = default_schedule(lower_to_loops(function), replace(TARGETS["cpu"], cores=cores))
    elements, total, *_ = schedule.get_blocks()
    assert schedule.block(total).is_reduction
    assert schedule.get_loops(elements) == schedule.get_loops(total)


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("shape", [(1 << 20,), (2, 600_011), (1021, 1023)])
def test_what_is_written_beside_sums_of_all_elements_costs_no_second_pass(shape: tuple[int, ...], cores: int) -> None:
    """A loss and what is saved for its gradient, on a team as on one core."""

    def loss(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        over = -1 if x.shape[0] == 2 else tuple(range(x.dim()))
        return (d := x - y), F.huber_loss(x, y, reduction="none").mean(over), d.abs().amax(over), d.exp()

    meta = torch.empty(shape, device="meta")
    (gm,) = capture(loss, (meta, meta))
    retarget((gm,), "cpu")
    (function,) = fuse(run_passes(GRAPH_PASSES, import_graph(gm), USUAL)).functions.values()
    schedule = default_schedule(lower_to_loops(function), replace(TARGETS["cpu"], cores=cores))
    verify(schedule.nest)
    assert (schedule.trace.rule == "cpu_split_reduction") == (cores > 1)
    inside = [loops for _, loops in blocks(schedule.nest) if loops and loops[-1].kind is LoopKind.VECTORIZED]
    assert len(inside) == 4 and len({loops[0].var for loops in inside}) == 1


# What rules of GPUs are for that small programs do not reach: a vector times a packed matrix, long rows.
LARGE_ON_GPUS: tuple[tuple[Callable[..., Tensor], tuple[Tensor, ...]], ...] = (
    (lambda x, w, s: x @ (w.to(x.dtype) * s).mT, (
        torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(14336, 4096, dtype=torch.int8),
        torch.ones(14336, 1, dtype=torch.bfloat16),
    )),
    (lambda x: torch.softmax(x, -1), (torch.empty(1024, 131_072, device="meta"),)),
    (lambda g, at: torch.ops.aten.embedding_dense_backward(g, at, 50_257, -1, False), (
        torch.empty(16_384, 768, dtype=torch.bfloat16, device="meta"),
        torch.empty(16_384, dtype=torch.int64, device="meta"),
    )),
)  # fmt: skip


def test_every_rule_is_reached(attention_functions: ModuleType, attention_gradients: ModuleType) -> None:
    """By these programs, some of whose sizes are taken for large."""
    widths = attention_gradients.Sizes(e=16, d=16)
    backward = (attention_gradients.gradients(widths, True), attention_gradients.bias_gradient(widths))
    reached = {default_schedule(lower_to_loops(f), target).rule for f in backward for target in TARGETS.values()}
    # By the programs of calls/test_block_rows.py, and by those of dynamo_backend/quantize.
    reached |= {"cpu_row_blocks", "cpu_dot_products"}
    # By the programs of codegen/triton/test_cache_writes.py.
    reached |= {"gpu_small"}
    for rows in (3, 30):
        heads = attention_functions.Sizes(m=rows, d=16, e=16)
        attention = lower_to_loops(attention_functions.attention(attention_functions.PLAIN, heads))
        reached |= {default_schedule(attention, target).rule for target in TARGETS.values()}
    for device, target in (("cpu", TARGETS["cpu"]), ("cuda", TARGETS["cuda"])):
        gms = capture(lambda x, at: x.index_add(0, at, x[:5]), (torch.zeros(9, 7), torch.arange(5)))
        retarget(gms, device)
        scattered = run_passes(CALL_PASSES, fuse(import_graph(gms[0])), USUAL).functions.values()
        reached |= {default_schedule(lower_to_loops(f), target).rule for f in scattered}
    for fn, given in LARGE_ON_GPUS:
        gms = capture(fn, given)
        retarget(gms, "cuda")
        functions = fuse(run_passes(GRAPH_PASSES, import_graph(gms[0]), USUAL)).functions.values()
        reached |= {default_schedule(lower_to_loops(f), gpu_target("cuda:sm_90")).rule for f in functions}
    for name in PROGRAMS:
        for dynamic in (False, True):
            for nest in nests_of(name, dynamic):
                for hint in (3, 60, 3000, 100_000):
                    for target in TARGETS.values():
                        reached.add(default_schedule(believing(nest, hint), target).rule)
    missing = {r.name for r in RULES if not r.name.endswith("_plain")} - reached
    assert not missing


def test_no_rule_for_an_unknown_machine() -> None:
    (nest,) = nests_of("pointwise", False)
    with pytest.raises(ScheduleError, match="no rule for"):
        default_schedule(nest, Target("abacus", "beads", 1))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rule", [r for r in RULES if r.name.endswith("_plain")], ids=lambda r: r.name)
def test_the_rule_of_last_resort_takes_all(name: str, rule: Rule) -> None:
    target = next(t for t in TARGETS.values() if t.kind in rule.kinds)
    for dynamic in (False, True):
        for nest in nests_of(name, dynamic):
            assert rule.matches(nest, target)
            schedule = Schedule(nest, rule.name)
            rule.apply(schedule, target, {k: v[0] for k, v in rule.parameters(nest, target).items()})
            verify(schedule.nest)
            same(nest, schedule.nest, 5)
