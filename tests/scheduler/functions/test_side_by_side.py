"""Functions that do one thing several times are that thing, called several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import MAX, SUM, Monoid
from torch_mlc.ir.expr.value import Load, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, IRModule, TensorType
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.target import gpu_target, usual_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.calls.side_by_side import part_side_by_side
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.functions.side_by_side import calls_side_by_side, one_of
from torch_mlc.scheduler.fusion.fusion import Fusion

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
COLUMN, ROW = symbol("i0"), symbol("r0")
GPU = PassContext(target_of=lambda device: gpu_target("cuda:sm_90"))


def sums(
    count: int, rows: int = 5, columns: int = 8, monoids: Sequence[Monoid] | None = None, dtype: DType = F32
) -> TensorFunction:
    """out[j] = sum of in[:, j], so many times."""

    def buffer(name: str, kind: DType, *shape: int) -> Buffer:
        sizes = tuple(map(sympy.Integer, shape))
        return Buffer(name, sizes, contiguous_strides(sizes), kind)

    inputs = tuple(buffer(f"in{k}", F32, rows, columns) for k in range(count))
    outputs = tuple(Output(buffer(f"out{k}", dtype, columns), f"t{k}", (COLUMN,)) for k in range(count))
    stages = tuple(
        Stage((f"t{k}",), (Load(f"in{k}", (ROW, COLUMN), F32),), True, (monoids or [SUM] * count)[k])
        for k in range(count)
    )
    dims = (Dim(COLUMN, sympy.Integer(columns)),), (Dim(ROW, sympy.Integer(rows)),)
    return TensorFunction(f"sums_{count}", *dims, inputs, outputs, stages)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_done_each_time(count: int) -> None:
    assert one_of(sums(count)) == one_of(sums(1)) == sums(1)


def test_what_differs_or_is_shared() -> None:
    assert one_of(sums(2, monoids=[SUM, MAX])) is None
    both = sums(2)
    shared = replace(both, stages=(both.stages[0], replace(both.stages[1], values=both.stages[0].values)))
    assert one_of(shared) is None
    assert one_of(replace(both, table=True)) is None
    other = replace(both.outputs[1], buffer=replace(both.outputs[1].buffer, dtype=BF16))
    assert one_of(replace(both, outputs=(both.outputs[0], other))) is None


def fused(device: str, *functions: TensorFunction) -> Fusion:
    inputs: list[Input] = []
    calls: list[CallTensor] = []
    for k, f in enumerate(functions):
        given = [TensorType(b.shape, b.strides, b.dtype, device) for b in f.inputs]
        names = tuple(f"x{k}{j}" for j in range(len(given)))
        inputs += [Input(n, t) for n, t in zip(names, given, strict=True)]
        made = tuple(TensorType(o.buffer.shape, o.buffer.strides, o.buffer.dtype, device) for o in f.outputs)
        calls.append(CallTensor(tuple(f"y{k}{j}" for j in range(len(made))), made, f.name, names))
    graph = Graph("main", tuple(inputs), tuple(calls), tuple(n for c in calls for n in c.names))
    return Fusion(graph, {f.name: f for f in functions})


def test_different_numbers_of_times_are_called_apart_and_mean_the_same() -> None:
    before = fused("cuda:0", sums(3), sums(2))
    after = part_side_by_side(before, GPU)
    verify(IRModule({"main": after.graph, **after.functions}))
    assert [len(n.names) for n in after.graph.nodes] == [1] * 5
    assert list(after.functions.values()) == [sums(1)]
    rng = np.random.default_rng(0)
    arrays = {i.name: rng.standard_normal((5, 8)).astype(np.float32) for i in before.graph.inputs}
    wanted, found = (
        run_graph(f.graph, dict(arrays), {}, module=IRModule({"main": f.graph, **f.functions})) for f in (before, after)
    )
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    "functions",
    [
        (sums(3), replace(sums(3), name="again")), (sums(3), sums(2, rows=6)), (sums(3),),
        (sums(2, 1 << 20, 8), sums(1, 1 << 20, 8)),
    ],
    ids=["as often", "another thing", "alone", "large"],
)  # fmt: skip
def test_what_stays_one_call(functions: tuple[TensorFunction, ...]) -> None:
    before = fused("cuda:0", *functions)
    assert part_side_by_side(before, GPU) is before


def test_on_a_cpu_calls_stay_as_they_are() -> None:
    before = fused("cpu", sums(3), sums(2))
    assert part_side_by_side(before, PassContext(target_of=usual_target)) is before


def test_memory_that_is_written() -> None:
    call = CallTensor(("a", "b"), (TensorType((), (), F32),) * 2, "f", ("x", "y"), into=(None, "m"))
    assert [c.into for c in calls_side_by_side(call, sums(2), "once")] == [(None,), ("m",)]
