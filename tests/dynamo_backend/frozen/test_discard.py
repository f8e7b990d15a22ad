"""Weights whose packed form is kept alone: their memory is given back, and whoever needs them after that is told."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_mlc
from torch_mlc.dynamo_backend.aten_passes.frozen.pack_weights import has_layout
from torch_mlc.runtime.frozen.discard import LEAST_BYTES, can_discard, discard, is_discarded
from torch_mlc.runtime.frozen.kept import FrozenError

DISCARD = {"freeze": True, "freeze_discard": True}
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are mapped as Linux does")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Folded(nn.Module):
    """A convolution whose weight is folded with its norm, a product that may be packed, a weight that is read plainly
    and one that is small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 96, 3, bias=False)
        self.norm = nn.BatchNorm2d(96)
        self.wide = nn.Linear(517, 1031)
        self.scale = nn.Parameter(torch.randn(517, 900))
        self.small = nn.Parameter(torch.randn(3))
        self.norm.running_mean.normal_()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.wide(y * self.scale.sum(1)) * self.small.exp().sum()
        return self.norm(self.conv(x)).relu(), z + (y[0, :, None] * self.scale).sum()


def resident() -> int:
    """Bytes of the process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def inputs(rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 64, 9, 9), torch.randn(rows, 517)


def test_values_and_what_is_left() -> None:
    model, plain = Folded().eval(), Folded().eval()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="mlc", options=DISCARD)
    for _ in range(3):
        given = inputs()
        for have, want in zip(compiled(*given), plain(*given), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-3)
    gone = {name for name, p in model.named_parameters() if is_discarded(p)}
    packed = {"wide.weight"} if has_layout(torch.float32) else set()
    assert gone == {"conv.weight"} | packed
    assert bool(model.conv.weight.isnan().all())
    assert isinstance(model.conv.weight, nn.Parameter) and model.conv.weight.stride() == plain.conv.weight.stride()


@pytest.mark.skipif(not has_layout(torch.float32), reason="this torch has no oneDNN")
def test_memory_is_given_back() -> None:
    """Of two layers of 64 MiB each, the packed form alone stays."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False))
    x = torch.randn(16, 4096)
    want = model(x)
    compiled = torch.compile(model, backend="mlc", options=DISCARD)
    before = resident()
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-4)
    gc.collect()
    kept = torch_mlc.memory_stats().frozen
    assert kept >= 128 << 20 and resident() - before < 64 << 20


def test_another_graph_that_needs_them_is_an_error() -> None:
    model = Folded().eval()
    compiled = torch.compile(model, backend="mlc", dynamic=False, options=DISCARD)
    compiled(*inputs(16))
    with pytest.raises(FrozenError, match=r"reads .*conv\.weight.*given back.*freeze_discard"):
        compiled(*inputs(5))
    compiled(*inputs(16))  # the first graph goes on


def test_a_graph_that_reads_them_plainly_is_an_error_too() -> None:
    layer = nn.Conv2d(64, 96, 3, bias=False)
    model = nn.Sequential(layer, nn.BatchNorm2d(96)).eval()
    other = torch.compile(layer, backend="mlc", options=DISCARD)
    x = torch.randn(2, 64, 56, 56)  # so large that the filters stay plain without the norm
    other(x)
    torch.compile(model, backend="mlc", options=DISCARD)(x)
    with pytest.raises(FrozenError, match=r"reads weight, whose memory"):
        other(x)


def test_weights_that_are_loaded_again_serve() -> None:
    model = Folded().eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    given = inputs()
    want = model(*given)
    torch.compile(model, backend="mlc", options=DISCARD)(*given)
    model.load_state_dict(state)
    torch._dynamo.reset()
    for options in (None, DISCARD):
        for have, wanted in zip(torch.compile(model, backend="mlc", options=options)(*given), want, strict=True):
            torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-3)
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inference", [False, True])
def test_a_discarded_tensor(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        whole = torch.randn(3000, 1111).to(dtype)
        small = torch.randn(LEAST_BYTES // 16, dtype=dtype)
        turned = whole.mT.clone(memory_format=torch.preserve_format)
        assert can_discard(turned) and not can_discard(small[1:]) and not can_discard(torch.empty(0))
        before = turned.shape, turned.stride(), turned.dtype
        assert discard(turned) == whole.numel() * dtype.itemsize
        assert (turned.shape, turned.stride(), turned.dtype) == before
        assert is_discarded(turned) and bool(turned.isnan().all()) and not is_discarded(whole)
        turned.copy_(whole.mT)
        assert torch.equal(turned, whole.mT) and (inference or not is_discarded(turned))
        again = torch.randn(3000, 1111).to(dtype)
        discard(again)
        assert bool(again.isnan().all()), "what is written to one tensor is not seen in another"


def test_memory_of_many_is_unmapped() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("torch_mlc_discarded")

    before = maps()
    tensors = [torch.randn(1 << 16) for _ in range(20)]
    for t in tensors:
        discard(t)
    assert maps() > before
    del tensors, t
    gc.collect()
    assert maps() == before
