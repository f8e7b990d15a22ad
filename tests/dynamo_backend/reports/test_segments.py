"""What of a tile lies together in memory, of kernels as the rules schedule them."""

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.places import place_of
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.dynamo_backend.reports.segments import contiguous_by_array
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import IndexValue, Load, call, const

pytest.importorskip("triton")
TARGET = "cuda:sm_90"


def kernel(f: Callable[..., Tensor], *inputs: tuple[tuple[int, ...], torch.dtype]) -> KernelReport:
    with FakeTensorMode():
        given = [torch.empty(s, dtype=d) for s, d in inputs]
    options = {"cache": False, "compile_workers": 0}
    return torch_mlc.explain(f, *given, target=TARGET, options=options).kernels[0]


BF16, LONG = torch.bfloat16, torch.int64


def test_rows_of_a_tile() -> None:
    assert kernel(torch.relu, ((4096, 4096), BF16)).contiguous_bytes == 512
    short = kernel(lambda x: torch.softmax(x[:, :24].contiguous(), -1), ((65536, 32), BF16))
    assert short.contiguous_bytes == 48  # rows of 24 that lie 32 apart


def test_steps_beyond_one() -> None:
    assert kernel(lambda x: x[:, ::2] + 1, ((4096, 4096), BF16)).contiguous_bytes == 2


def test_parts_of_words_that_are_written_out_lie_together() -> None:
    """Bytes in words of two, whose halves are operands of two products."""
    found = kernel(lambda x, w: x @ w.mT.to(BF16), ((16, 512), BF16), ((2112, 512), torch.int8))
    assert found.rule == "gpu_contraction" and found.scheduled is not None
    assert contiguous_by_array(found.scheduled, 32)["in1"] >= 64


def test_what_data_place_lies_apart() -> None:
    found = kernel(lambda t, i: t[i] + 1, ((50000, 16), BF16), ((65536,), LONG))
    assert found.contiguous_bytes == 32


def test_small_arrays_do_not_count() -> None:
    found = kernel(lambda x, b: x + b[:, None], ((4096, 4096), BF16), ((4096,), BF16))
    assert found.contiguous_bytes == 512


def test_figures_are_told() -> None:
    k = kernel(torch.relu, ((4096, 4096), BF16))
    assert k.bytes_in_flight is not None and k.bytes_in_flight > 25_000
    assert "of loads in flight a multiprocessor" in k.show() and "asks for 512 contiguous bytes" in k.show()
    (cpu,) = torch_mlc.explain(torch.exp, torch.ones(8), target="cpu").kernels
    assert cpu.bytes_in_flight is None and cpu.contiguous_bytes is None


@pytest.mark.parametrize("border", ["reflect", "replicate"])
def test_places_that_are_mirrored_or_clamped_are_no_data(border: str) -> None:
    """Rows of a padded image lie together but at its borders, and no program is apart from the others."""

    def pooled(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, (1, 1, 1, 1), mode=border), 3, 1)

    found = kernel(pooled, ((8, 16, 256, 256), BF16))
    assert found.scheduled is not None and contiguous_by_array(found.scheduled, 32)["in0"] >= 64
    plain = kernel(lambda x: torch.nn.functional.avg_pool2d(x, 3, 1), ((8, 16, 258, 258), BF16))
    assert found.prediction is not None and plain.prediction is not None
    assert found.prediction.bounds["memory"] < 1.5 * plain.prediction.bounds["memory"]


def test_forms_of_places() -> None:
    i = sympy.Symbol("i", integer=True)
    at, seven = IndexValue(i - 1, DType.INT64), const(7, DType.INT64)
    mirrored = place_of(call("sub", seven, call("abs", call("sub", call("abs", at), seven))))
    assert [int(mirrored.subs(i, k)) for k in range(10)] == [1, 0, 1, 2, 3, 4, 5, 6, 7, 6]
    clamped = place_of(call("minimum", call("maximum", at, const(0, DType.INT64)), seven))
    assert [int(clamped.subs(i, k)) for k in (0, 1, 5, 9)] == [0, 0, 4, 7]
    assert place_of(i) == i
    assert place_of(Load("t", (i,), DType.INT64)) is None
    assert place_of(call("add", Load("t", (i,), DType.INT64), seven)) is None
