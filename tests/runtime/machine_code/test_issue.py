"""Slots of real kernels: what they ask of memory, as their machine code is counted, is what their loops move."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.dynamo_backend.reports.traffic import traffic_of

pytest.importorskip("triton")
TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_120", "hip:gfx942")


def kernels(f: Callable[..., Tensor], target: str, *shapes: tuple[int, ...]) -> tuple[KernelReport, ...]:
    with FakeTensorMode():
        inputs = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
    options = {"cache": False, "compile_workers": 0}
    return torch_mlc.explain(f, *inputs, target=target, options=options).kernels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: torch.softmax(x, -1), (256, 131072)),  # two loops, in the second a division by a function
        (lambda x: x.sum(0), (8192, 4096)),  # iterations written as one
        (lambda x: F.gelu(x), (512, 4096)),  # no loop
        (lambda x: torch.cumsum(x, 1), (256, 16384)),
    ],
    ids=["softmax", "columns", "gelu", "cumsum"],
)
def test_bytes_that_are_asked_for(f: Callable[[Tensor], Tensor], shape: tuple[int, int], target: str) -> None:
    found = [k for k in kernels(f, target, shape) if k.traffic is not None and k.traffic.moved > 1 << 20]
    assert found
    for k in found:
        assert k.issue is not None and k.traffic is not None and not k.issue.guessed
        # What the code asks for, whether or not a cache has it.
        assert k.scheduled is not None and k.issue.asked == pytest.approx(traffic_of(k.scheduled).moved, rel=0.1)
        assert k.slots_a_byte == k.issue.slots / k.traffic.least > 0.2
        assert "instruction slots a byte" in k.show()


def test_a_causal_mask_halves_the_slots() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.1
        return torch.softmax(scores.masked_fill(mask(scores), float("-inf")), -1) @ v

    slots = []
    for diagonal in (1, 4096):

        def mask(scores: Tensor, diagonal: int = diagonal) -> Tensor:
            return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)

        shape = (1, 8, 2048, 64)
        (k,) = kernels(attention, "cuda:sm_90", shape, shape, shape)
        assert k.issue is not None
        slots.append(k.issue.slots)
    assert 0.4 < slots[0] / slots[1] < 0.7


def test_slots_of_loops_that_data_end_are_not_known() -> None:
    """How many rows are added to a place only a call tells; what else a launch takes is told."""

    def add(x: Tensor, at: Tensor, out: Tensor) -> Tensor:
        return out.index_add(0, at, x)

    with FakeTensorMode():
        x, out = (torch.empty(n, 768, dtype=torch.bfloat16) for n in (16384, 50257))
        given = x, torch.empty(16384, dtype=torch.int64), out
    found = torch_mlc.explain(add, *given, target="cuda:sm_90").kernels
    ended = [k for k in found if k.rule == "gpu_segments" and "tl.range(0, high" in k.source]
    assert ended
    for k in ended:
        assert k.issue is not None and k.issue.guessed and k.issue.known_slots is None and k.slots_a_byte is None
        lines = k.source.splitlines()
        assert all("for " in lines[n - 1] for n in k.issue.guessed)
        assert f"how often the loop of line {k.issue.guessed[0]} runs is not known" in k.show()


def test_cpus_have_none() -> None:
    (k,) = torch_mlc.explain(torch.exp, torch.ones(8), target="cpu").kernels
    assert k.issue is None and k.slots_a_byte is None and "slots a byte" not in k.show()
