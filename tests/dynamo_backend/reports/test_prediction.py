"""Kernels of ours on GPUs that are not here: how their programs share arrays, and what bounds them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.dynamo_backend.reports.sharing import Sharing, sharing_by_array
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse

HEAD = "@nest(outputs=['out0'])\n"
PRODUCT = """def f(in0: tensor(float32, [512, 64]), in1: tensor(float32, [64, 256]), out0: tensor(float32, [512, 256])):
    for p in block_x({programs}):
        for i in thread_x(64):
            for j in thread_x(64):
                with block('b0'):
                    i0 = spatial(512, i + 64*({row}))
                    i1 = spatial(256, j + 64*({column}))
                    out0[i0, i1] = mul(in0[i0, 0], in1[0, i1])
"""


def product(row: str, column: str) -> LoopNest:
    nest = parse(HEAD + PRODUCT.format(programs=32, row=row, column=column))
    assert isinstance(nest, LoopNest)
    return nest


def test_programs_share_what_their_numbers_do_not_move() -> None:
    rows_first = product("p // 4", "p % 4")
    # All at a time; eight at a time have two of eight rows each, and all four columns.
    assert sharing_by_array(rows_first, 32) == {"in0": Sharing(4, 1), "in1": Sharing(8, 1), "out0": Sharing(1, 1)}
    assert sharing_by_array(rows_first, 8) == {"in0": Sharing(4, 1), "in1": Sharing(8, 4), "out0": Sharing(1, 1)}
    columns_first = product("p % 8", "p // 8")
    assert sharing_by_array(columns_first, 8) == {"in0": Sharing(4, 4), "in1": Sharing(8, 1), "out0": Sharing(1, 1)}


def kernels(f: Callable[..., Tensor], *shapes: tuple[int, ...], target: str) -> tuple[KernelReport, ...]:
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
    options = {"cache": False, "compile_workers": 0}
    return torch_mlc.explain(f, *inputs, target=target, options=options).kernels


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "hip:gfx942"])
def test_a_sum_is_bound_by_memory_and_a_small_one_by_its_launch(target: str) -> None:
    pytest.importorskip("triton")
    (large,), (small,) = (kernels(torch.add, (n, 4096), (n, 4096), target=target) for n in (8192, 2))
    assert large.prediction is not None and small.prediction is not None and large.traffic is not None
    assert large.prediction.bound == "memory" and "predicted to take" in large.show()
    assert large.target is not None
    rate = large.traffic.least / large.prediction.seconds / (large.target.machine.bandwidth * 1e9)
    assert 0.7 < rate < 0.9
    assert small.prediction.bound == "launch" and small.prediction.seconds < 0.1 * large.prediction.seconds


def test_attention_multiplies_at_a_rate_that_the_tensor_cores_have() -> None:
    pytest.importorskip("triton")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1) @ v

    shape = (4, 16, 4096, 128)
    (k,) = kernels(attention, shape, shape, shape, target="cuda:sm_90")
    assert k.prediction is not None and k.target is not None
    operations = 4 * 64 * 4096 * 4096 * 128
    assert 0.3 < operations / k.prediction.seconds / (k.target.machine.matmul * 1e9) < 1
    # Keys and values are read by 32 programs a head each, which run one after the other.
    assert k.prediction.bounds["memory"] < 0.2 * k.prediction.seconds


def test_cpus_have_no_prediction() -> None:
    (k,) = torch_mlc.explain(torch.exp, torch.ones(8), target="cpu").kernels
    assert k.prediction is None and "predicted to take" not in k.show()


def test_predictions_are_of_the_sizes_at_hand() -> None:
    """Kernels that differ in typical sizes alone have equal nests."""
    pytest.importorskip("triton")
    options = {"cache": False, "compile_workers": 0}
    seconds = []
    for rows in (64, 65536):
        with FakeTensorMode():
            x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        (kernel,) = torch_mlc.explain(torch.exp, x, target="cuda:sm_90", options=options).kernels
        assert kernel.prediction is not None
        seconds.append(kernel.prediction.seconds)
    assert seconds[1] > 100 * seconds[0]


def test_a_launch_over_a_table_does_what_its_rows_do() -> None:
    """Sums of many arrays are one launch: its instructions and its time are those of all of them."""
    pytest.importorskip("triton")

    def sums(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(a.sum(0) for a in x)

    def found(many: int) -> tuple[KernelReport, int]:
        with FakeTensorMode():
            inputs = [torch.empty(512, 4096, dtype=torch.bfloat16) for _ in range(many)]
        report = torch_mlc.explain(sums, *inputs, target="cuda:sm_90", options={"cache": False, "compile_workers": 0})
        (graph,), (kernel,) = report.graphs, report.kernels
        return kernel, graph.traffic.kernels

    (one, bytes_of_one), (many, bytes_of_many) = found(1), found(12)
    assert one.rows == 1 and many.calls == 1 and one.issue is not None and many.issue is not None
    assert many.traffic is not None and many.traffic.moved * many.rows == pytest.approx(bytes_of_many, rel=0.01)
    assert bytes_of_many == 12 * bytes_of_one
    assert many.issue.slots == pytest.approx(12 * one.issue.slots, rel=0.2)
    assert many.slots_a_byte == pytest.approx(one.slots_a_byte, rel=0.2)
    assert one.prediction is not None and many.prediction is not None
    assert many.prediction.seconds > 3 * one.prediction.seconds
