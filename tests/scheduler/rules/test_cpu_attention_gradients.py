"""The backward of attention on CPUs: the rule's schedules by the oracle, and as machine code against float64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import LoopKind
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.cpu.attention import roles
from torch_mlc.scheduler.schedule.schedule import Schedule

TARGET = cpu_target()


def scheduled(module: ModuleType, sizes: Any, of_keys: bool) -> tuple[Any, Schedule]:
    function = module.gradients(sizes, of_keys)
    schedule = default_schedule(lower_to_loops(function), TARGET)
    assert schedule.rule == "cpu_attention"
    verify(schedule.nest)
    return function, schedule


def check(module: ModuleType, sizes: Any, of_keys: bool, schedule: Schedule, function: Any, m: int, n: int) -> None:
    given, expected = module.tensors(sizes, m, n)
    lengths = {symbol("s0"): m, symbol("s1"): n}
    outs = [torch.full([int(e.xreplace(lengths)) for e in o.buffer.shape], float("nan"), dtype=o.buffer.dtype.torch)
            for o in function.outputs]  # fmt: skip
    kernel = load_kernel(emit_llvm(schedule.nest, TARGET), TARGET)
    values = [lengths[s] for s in function.symbols.symbols]
    kernel(*(t.data_ptr() for t in (*(given[b.name] for b in function.inputs), *outs)), *values)
    tolerance = 2e-2 if sizes.dtype is DType.BFLOAT16 else 1e-5
    for out, name in zip(outs, results(sizes, of_keys), strict=True):
        torch.testing.assert_close(out.double(), expected[name], rtol=tolerance, atol=tolerance)


def results(sizes: Any, of_keys: bool) -> list[str]:
    return ["v", "k", *(["bias"] if sizes.bias else [])] if of_keys else ["q"]


@pytest.mark.parametrize(
    ("of_keys", "dtype", "dropout"),
    [(False, DType.BFLOAT16, False), (True, DType.BFLOAT16, False), (True, DType.FLOAT32, False),
     (False, DType.FLOAT32, True), (True, DType.BFLOAT16, True)],
)  # fmt: skip
def test_machine_code_against_float64(
    attention_gradients: ModuleType, of_keys: bool, dtype: DType, dropout: bool
) -> None:
    torch.manual_seed(0)
    sizes = attention_gradients.Sizes(m=67, n=65, e=16, d=24, dtype=dtype, dropout=dropout)
    function, schedule = scheduled(attention_gradients, sizes, of_keys)
    check(attention_gradients, sizes, of_keys, schedule, function, 67, 65)


def test_symbolic_sizes(attention_gradients: ModuleType) -> None:
    torch.manual_seed(0)
    sizes = attention_gradients.Sizes(b=1, m=symbol("s0"), n=symbol("s1"), e=8, d=8)
    function, schedule = scheduled(attention_gradients, sizes, False)
    for m, n in ((1, 1), (97, 70)):
        check(attention_gradients, sizes, False, schedule, function, m, n)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32], ids=str)
def test_the_gradient_of_a_bias(attention_gradients: ModuleType, dtype: DType) -> None:
    """Tiles of one part of the batch after the other are added to a result that they share."""
    torch.manual_seed(0)
    sizes = attention_gradients.Sizes(b=3, m=symbol("s0"), n=symbol("s1"), e=8, d=8, dtype=dtype, bias=True)
    function, schedule = scheduled(attention_gradients, sizes, True)
    for m, n in ((1, 1), (97, 70)):
        check(attention_gradients, sizes, True, schedule, function, m, n)
    (team,) = [lp for lp in schedule.get_loops("b3") if schedule.loop(lp).kind is LoopKind.PARALLEL]
    assert [b for b in schedule.get_blocks() if team in schedule.get_loops(b)] == schedule.get_blocks()


@pytest.mark.parametrize(("of_keys", "bias"), [(False, False), (True, False), (True, True)])
def test_by_the_oracle(attention_gradients: ModuleType, of_keys: bool, bias: bool) -> None:
    torch.manual_seed(0)
    m, n = (9, 66) if bias else (70, 66)
    sizes = attention_gradients.Sizes(b=2 if bias else 1, m=m, n=n, e=2, d=3, bias=bias)
    function, schedule = scheduled(attention_gradients, sizes, of_keys)
    given, expected = attention_gradients.tensors(sizes, m, n)
    inputs = [given[b.name].flatten().numpy() for b in function.inputs]
    got = run_nest(schedule.nest, inputs, {}, backward=True)
    for k, name in enumerate(results(sizes, of_keys)):
        np.testing.assert_allclose(got[f"out{k}"].reshape(expected[name].shape), expected[name], rtol=1e-4, atol=1e-5)


def test_the_blocks(attention_gradients: ModuleType) -> None:
    found = roles(lower_to_loops(attention_gradients.gradients(attention_gradients.Sizes(), True)))
    assert found is not None and not found.online
    assert (found.products, found.edits, found.states) == (("b0", "b1"), ("b2",), ("b3", "b4"))
    assert (str(found.queries), str(found.keys)) == ("i1", "r0")
