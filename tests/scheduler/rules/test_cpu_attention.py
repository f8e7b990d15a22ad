"""Attention on CPUs: the rule's schedules by the oracle, and as machine code against float64."""

from __future__ import annotations

from itertools import islice
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
from torch_mlc.scheduler.rules import default_schedule, design_space
from torch_mlc.scheduler.rules.cpu.attention import roles
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

TARGET = cpu_target()
VARIANTS = ["plain", "softcap", "causal", "alibi", "documents", "bias", "window5"]
SHAPES: dict[str, dict[str, Any]] = {
    "tiles": {"m": 64, "n": 64, "e": 16, "d": 16},
    "one more": {"m": 65, "n": 65, "e": 16, "d": 16},
    "one less, shared keys": {"h": 4, "m": 63, "n": 63, "e": 8, "d": 24, "groups": 2},
    "less than a tile": {"b": 2, "m": 8, "n": 9, "e": 5, "d": 3},
    "rows first": {"b": 2, "m": 9, "n": 131, "e": 16, "d": 40, "rows_first": True},
    "half": {"h": 4, "m": 70, "n": 129, "e": 32, "d": 64, "groups": 4, "dtype": DType.BFLOAT16},
}


def variant(module: ModuleType, name: str) -> Any:
    return next(v for v in module.VARIANTS if v.name == name)


def scheduled(nest: LoopNest) -> Schedule:
    schedule = default_schedule(nest, TARGET)
    assert schedule.rule == "cpu_attention"
    verify(schedule.nest)
    return schedule


def run(schedule: Schedule, inputs: list[torch.Tensor], out: torch.Tensor, sizes: dict[str, int]) -> None:
    kernel = load_kernel(emit_llvm(schedule.nest, TARGET), TARGET)
    kernel(*(t.data_ptr() for t in (*inputs, out)), *sizes.values())


@pytest.mark.parametrize(
    "name, shape",
    [*((v, s) for s in SHAPES for v in VARIANTS), ("dropout", "half"), ("dropout", "one more"),
     ("weights", "one less, shared keys"), ("weights", "less than a tile"), ("weights", "rows first")],
)  # fmt: skip
def test_machine_code_against_float64(attention_functions: ModuleType, name: str, shape: str) -> None:
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    function = attention_functions.attention(kind, attention_functions.Sizes(**SHAPES[shape]))
    inputs = attention_functions.inputs(function)
    out = attention_functions.empty(function.outputs[0].buffer, {})
    run(scheduled(lower_to_loops(function)), inputs, out, {})
    tolerance = 1e-2 if out.dtype is torch.bfloat16 else 1e-5
    expected = attention_functions.expected(kind, inputs)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_symbolic_sizes(attention_functions: ModuleType, name: str) -> None:
    """Rows beyond a window see nothing, and are NaN as in torch."""
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    sizes = attention_functions.Sizes(m=symbol("s0"), n=symbol("s1"), e=8, d=16)
    function = attention_functions.attention(kind, sizes)
    schedule = scheduled(lower_to_loops(function))
    for m, n in ((1, 1), (3, 2), (64, 64), (97, 130), (130, 97)):
        if name == "documents" and m > n:
            continue
        values = {"s0": m, "s1": n}
        inputs = attention_functions.inputs(function, values)
        out = attention_functions.empty(function.outputs[0].buffer, values)
        run(schedule, inputs, out, values)
        expected = attention_functions.expected(kind, inputs)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["causal", "window5"])
def test_what_is_offered(attention_functions: ModuleType, name: str) -> None:
    """By the oracle, with rows and keys in several tiles; traces replay."""
    torch.manual_seed(0)
    kind = variant(attention_functions, name)
    function = attention_functions.attention(kind, attention_functions.Sizes(h=1, m=37, n=67, e=2, d=3))
    nest = lower_to_loops(function)
    inputs = attention_functions.inputs(function)
    expected = attention_functions.expected(kind, inputs).numpy()
    offered = [c for c in islice(design_space(nest, TARGET).candidates(), 27) if c.rule == "cpu_attention"]
    assert len(offered) == 27
    for candidate in offered[:: len(offered) // 3]:
        verify(candidate.schedule.nest)
        got = run_nest(candidate.schedule.nest, [t.flatten().numpy() for t in inputs], {}, backward=True)
        np.testing.assert_allclose(got["out0"].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
        trace = Trace.from_json(candidate.schedule.trace.to_json())
        assert replay(trace, nest).nest == candidate.schedule.nest


def test_empty_tiles_are_not_read(attention_functions: ModuleType) -> None:
    """NaN among keys that a causal mask hides from whole tiles of queries does not show."""
    torch.manual_seed(0)
    kind = variant(attention_functions, "causal")
    function = attention_functions.attention(kind, attention_functions.Sizes(m=64, n=256, e=16, d=16))
    q, k, v = attention_functions.inputs(function)
    expected = attention_functions.expected(kind, [q, k, v])
    k[:, :, 64:], v[:, :, 64:] = float("nan"), float("nan")
    out = attention_functions.empty(function.outputs[0].buffer, {})
    run(scheduled(lower_to_loops(function)), [q, k, v], out, {})
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_blocks_and_axes(attention_functions: ModuleType) -> None:
    function = attention_functions.attention(
        attention_functions.SOFTCAP, attention_functions.Sizes(h=4, m=9, n=7, e=2, d=3, groups=2)
    )
    nest = lower_to_loops(function)
    found = roles(nest)
    assert found is not None
    assert (found.products, found.edits, found.state, found.results) == (("b0",), ("b1",), "b2", ("b3",))
    assert (str(found.queries), str(found.keys), [str(d) for d in found.width]) == ("i2", "r0", ["x0"])
    schedule = scheduled(nest)
    team = [lp for lp in schedule.get_loops("b0") if schedule.loop(lp).kind is LoopKind.PARALLEL]
    assert len(team) == 1 and all(schedule.get_loops(b)[0] == team[0] for b in schedule.get_blocks())
    assert [schedule.loop(lp).kind for lp in schedule.get_loops("b0")[-2:]] == [LoopKind.UNROLLED, LoopKind.VECTORIZED]
