"""Attention of few rows on CPUs: keys in pieces, by the oracle, and as machine code against float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.cpu.attention_rows import CPU_ATTENTION_ROWS
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

TARGET = cpu_target(2)
VARIANTS = ["plain", "alibi", "documents", "window5"]
SHAPES: dict[str, dict[str, Any]] = {
    "pieces": {"h": 1, "m": 1, "n": 2048, "e": 16, "d": 16},
    "pieces with a tail": {"h": 1, "m": 2, "n": 1031, "e": 9, "d": 19},
    "heads": {"b": 2, "h": 4, "m": 1, "n": 131, "e": 64, "d": 24},
    "all that are few": {"m": 7, "n": 70, "e": 8, "d": 40, "rows_first": True},
    "half, shared keys": {"h": 4, "m": 3, "n": 130, "e": 32, "d": 64, "groups": 4, "dtype": DType.BFLOAT16},
}


def scheduled(nest: LoopNest, **params: int) -> Schedule:
    if not params:
        schedule = default_schedule(nest, TARGET)
        assert schedule.rule == "cpu_attention_rows"
    else:
        schedule = Schedule(nest)
        chosen = {k: v[0] for k, v in CPU_ATTENTION_ROWS.parameters(nest, TARGET).items()}
        CPU_ATTENTION_ROWS.apply(schedule, TARGET, chosen | params)
    verify(schedule.nest)
    return schedule


def run(schedule: Schedule, inputs: list[torch.Tensor], out: torch.Tensor, sizes: dict[str, int]) -> None:
    kernel = load_kernel(emit_llvm(schedule.nest, TARGET), TARGET)
    kernel(*(t.data_ptr() for t in (*inputs, out)), *sizes.values())


def variant(module: ModuleType, name: str) -> Any:
    return next(v for v in module.VARIANTS if v.name == name)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_machine_code_against_float64(attention_functions: ModuleType, name: str, shape: str) -> None:
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    function = attention_functions.attention(kind, attention_functions.Sizes(**SHAPES[shape]))
    inputs = attention_functions.inputs(function)
    out = attention_functions.empty(function.outputs[0].buffer, {})
    schedule = scheduled(lower_to_loops(function))
    assert any(s.primitive == "rfactor" for s in schedule.trace.steps) == shape.startswith("pieces")
    run(schedule, inputs, out, {})
    tolerance = 1e-2 if out.dtype is torch.bfloat16 else 1e-5
    expected = attention_functions.expected(kind, inputs)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", ["plain", "window5"])
def test_symbolic_sizes(attention_functions: ModuleType, name: str) -> None:
    """A cache that grows: pieces have tails, or no element at all."""
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    sizes = attention_functions.Sizes(h=1, m=symbol("s0"), n=symbol("s1"), e=8, d=16)
    function = attention_functions.attention(kind, sizes, {"s0": 2, "s1": 4096})
    schedule = scheduled(lower_to_loops(function))
    for m, n in ((1, 1), (3, 2), (2, 130), (1, 4095), (9, 4097)):
        values = {"s0": m, "s1": n}
        inputs = attention_functions.inputs(function, values)
        out = attention_functions.empty(function.outputs[0].buffer, values)
        run(schedule, inputs, out, values)
        expected = attention_functions.expected(kind, inputs)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["plain", "window5"])
@pytest.mark.parametrize("piece", [0, 16])
def test_by_the_oracle(attention_functions: ModuleType, name: str, piece: int) -> None:
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    function = attention_functions.attention(kind, attention_functions.Sizes(h=2, m=2, n=37, e=2, d=3))
    nest = lower_to_loops(function)
    inputs = attention_functions.inputs(function)
    expected = attention_functions.expected(kind, inputs).numpy()
    schedule = scheduled(nest, keys=8, piece=piece)
    got = run_nest(schedule.nest, [t.flatten().numpy() for t in inputs], {}, backward=True)
    np.testing.assert_allclose(got["out0"].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    assert replay(Trace.from_json(schedule.trace.to_json()), nest).nest == schedule.nest


def test_a_team_has_enough_to_do(attention_functions: ModuleType) -> None:
    """Heads and pieces of keys together are two for each of a team; keys of many heads are not cut."""
    for heads, wanted in ((1, 1024), (3, 2731), (4, 4096), (16, 0), (32, 0)):
        function = attention_functions.attention(
            attention_functions.PLAIN, attention_functions.Sizes(h=heads, m=1, n=16384, e=16, d=16)
        )
        nest = lower_to_loops(function)
        target = cpu_target(8)
        assert CPU_ATTENTION_ROWS.parameters(nest, target)["piece"][0] == wanted, heads
    schedule = scheduled(lower_to_loops(attention_functions.attention(
        attention_functions.PLAIN, attention_functions.Sizes(h=1, m=1, n=4096, e=16, d=16))))  # fmt: skip
    (team,) = {schedule.get_loops(b)[0] for b in schedule.get_blocks() if b not in ("b2", "b3")}
    assert schedule.loop(team).kind is LoopKind.PARALLEL and schedule.extent(team) == 4
