"""Rows of the suite static about what is asked of memory: bytes in flight, and bytes that lie together."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from benchmarks.static.memory import COLUMN_RULES, IN_FLIGHT, LINE, memory_rows
from torch_mlc.dynamo_backend.reports.report import KernelReport

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kernels() -> tuple[KernelReport, ...]:
    """Sums of columns, and of rows, of an array that is large enough."""
    with FakeTensorMode():
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    report = torch_mlc.explain(lambda x: (x.sum(0), x.exp().sum(1)), x, target="cuda:sm_90", options={"cache": False})
    return report.kernels


def test_rows_are_of_the_worst_kernel_that_moves_much(kernels: tuple[KernelReport, ...]) -> None:
    flight, together = memory_rows("sums", kernels)
    assert flight.name == "sums: KiB in flight" and together.name == "sums: contiguous bytes of columns"
    large = [k for k in kernels if k.traffic is not None and k.traffic.moved > 1 << 24]
    assert flight.value == min(k.bytes_in_flight / 1024 for k in large if k.bytes_in_flight is not None) > 1
    assert flight.target == IN_FLIGHT and flight.at_least
    columns = [k for k in large if k.rule in COLUMN_RULES]
    assert columns and together.value == min(k.contiguous_bytes for k in columns if k.contiguous_bytes is not None)
    assert together.target == LINE and together.at_least


def test_kernels_that_are_soon_over_or_multiply_have_no_row(kernels: tuple[KernelReport, ...]) -> None:
    (large, *_) = sorted(kernels, key=lambda k: -k.traffic.moved if k.traffic is not None else 0)
    assert large.traffic is not None
    small = replace(large.traffic, arrays={n: replace(v, read=v.read // 64) for n, v in large.traffic.arrays.items()})
    assert memory_rows("few", [replace(large, traffic=small)]) == []
    assert memory_rows("products", [replace(large, source="tl.dot(a, b)")]) == []
    # Beside one that moves far more, a kernel does not matter.
    beside = [large, replace(large, calls=1000, rule="gpu_row_looped")]
    assert [r.name for r in memory_rows("beside", beside)] == ["beside: KiB in flight"]
