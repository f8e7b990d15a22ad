"""Weights that oneDNN reads in a layout of its own: values as eager's, and what is kept, told and noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from torch_mlc.dynamo_backend.aten_passes.frozen.pack_weights import has_layout
from torch_mlc.ir.target import Target
from torch_mlc.runtime.frozen.kept import FrozenError
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.cost.frozen import packed_pays, packed_times

FREEZE = {"freeze": True}
PACKED = "mkldnn::_linear_pointwise.default"
pytestmark = [
    pytest.mark.skipif(not has_layout(torch.float32), reason="this torch has no oneDNN"),
    pytest.mark.usefixtures("without_gradients"),
]


class Turned(nn.Module):
    """Weights as they are in both orders, and a bias that changes with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(517, 1031)
        self.down = nn.Parameter(torch.randn(1031, 771) / 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x.sum(), torch.relu(self.up(x)), self.down)


def calls_of(model: nn.Module, *inputs: Any, **options: Any) -> list[str]:
    report = torch_mlc.explain(model, *inputs, options=FREEZE | options)
    torch._dynamo.reset()
    return [call.op for graph in report.graphs for call in graph.libraries]


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_plain_weight(rows: int, dtype: torch.dtype) -> None:
    if not has_layout(dtype):
        pytest.skip("oneDNN has no kernels for the type here")
    model, x = Turned().to(dtype), torch.randn(rows, 517, dtype=dtype)
    exact = Turned().double()
    exact.load_state_dict(model.state_dict())
    wanted = exact(x.double())
    compiled = torch.compile(model, backend="mlc", options=FREEZE)
    scale = wanted.abs().max()
    eager = (model(x).double() - wanted).abs().max() / scale
    for _ in range(2):
        assert (compiled(x).double() - wanted).abs().max() / scale <= 2 * eager + torch.finfo(dtype).eps
    if rows > 2:
        assert PACKED in calls_of(model, x)


@pytest.mark.parametrize("form", ["native", "python"])
def test_both_forms_of_a_program_take_weights_without_strides(form: str) -> None:
    model = nn.Sequential(nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 300))
    compiled = torch.compile(model, backend="mlc", options=FREEZE | {"host_program": form})
    for _ in range(40):
        x = torch.randn(4, 512)
        torch.testing.assert_close(compiled(x), model(x))


def test_bytes_of_packed_weights_are_counted() -> None:
    model, x = nn.Linear(512, 768), torch.randn(4, 512)
    before = torch_mlc.memory_stats().frozen
    compiled = torch.compile(model, backend="mlc", options=FREEZE)
    compiled(x)
    assert torch_mlc.memory_stats().frozen - before >= 512 * 768 * 4


def test_what_gains_nothing_stays_plain() -> None:
    assert PACKED not in calls_of(nn.Linear(16, 16), torch.randn(4, 16))
    assert PACKED not in calls_of(nn.Linear(512, 768), torch.randn(4, 512), numerics="eager")
    assert PACKED not in calls_of(nn.Linear(512, 768).double(), torch.randn(4, 512).double())
    torch.testing.assert_close(
        torch.compile(nn.Linear(512, 0), backend="mlc", options=FREEZE)(torch.randn(4, 512)), torch.empty(4, 0)
    )


def test_a_gpu_gets_plain_weights() -> None:
    assert PACKED not in calls_of(nn.Linear(512, 768), torch.randn(4, 512), target="cuda:sm_90")


def test_rows_that_vary_read_the_plain_weight() -> None:
    model = nn.Linear(512, 768)
    compiled = torch.compile(model, backend="mlc", options=FREEZE, dynamic=True)
    for rows in (3, 9):
        x = torch.randn(rows, 512)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("how", ["in place", "optimizer", "state", "other memory"])
def test_a_changed_weight_is_named(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(512, 768), nn.ReLU()), torch.randn(4, 512)
    compiled = torch.compile(model, backend="mlc", options=FREEZE)
    compiled(x)
    weight = model[0].weight
    if how == "in place":
        weight.add_(1)
    elif how == "optimizer":
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    elif how == "state":
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    else:
        weight.data = torch.randn(768, 512)
    with pytest.raises(FrozenError, match=r"0\.weight.*torch\._dynamo\.reset"):
        compiled(x)


def test_writes_through_data_are_not_seen() -> None:
    model, x = nn.Linear(512, 768), torch.randn(4, 512)
    compiled = torch.compile(model, backend="mlc", options=FREEZE)
    before = compiled(x)
    model.weight.data.mul_(2)
    assert torch.equal(compiled(x), before)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(x), model(x))


def test_a_packed_weight_is_compared_with_the_library_that_would_multiply_the_plain_one() -> None:
    """oneDNN, where it is called for plain weights: it gains less by a packed one than BLAS."""
    machine = Target("cpu", "znver4", 1, 64, 32 << 10, 1 << 20, warp=1, max_threads=1, onednn=True)
    both = replace(machine, onednn=False)
    for rows, inner, columns in ((64, 768, 768), (256, 768, 3072), (1024, 1024, 4096)):
        times, blas = (packed_times(rows, inner, columns, 4, m) for m in (machine, both))
        assert times is not None and blas is not None
        assert times[0] == blas[0] < 0.98 * times[1] and times[1] < blas[1]
    for rows in (1, 2, 3):  # BLAS's, or loops of ours
        assert packed_times(rows, 512, 512, 4, machine) == packed_times(rows, 512, 512, 4, both)


def test_many_rows_and_large_weights_are_packed() -> None:
    machine = target_for("cpu", None, 1)
    assert packed_pays(4, 768, 3072, 4, machine) and packed_pays(4, 4096, 4096, 4, machine)
    for rows in (1, 2):
        assert not packed_pays(rows, 4096, 4096, 4, machine), "loops of ours read the plain weight"
    assert packed_pays(1024, 768, 768, 4, machine) and packed_pays(1, 768, 3072, 2, machine)
    assert not packed_pays(1, 768, 768, 4, machine) and not packed_pays(4, 256, 256, 4, machine)
    assert not packed_pays(128, 64, 64, 4, machine) and not packed_pays(4, 4096, 0, 4, machine)
    assert not packed_pays(4, 4096, 4096, 4, target_for("cuda", "cuda:sm_90", None))
