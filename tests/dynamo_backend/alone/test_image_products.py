"""Convolutions of nets without libraries: products of tiles in registers, whatever lies between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc
from torch_mlc.ir.expr.value import Select, walk
from torch_mlc.ir.nest.loops import Update, blocks

ALONE = {"libraries": "none", "freeze": True}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Two convolutions behind a first one, with something between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], channels: int = 32, **geometry: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.third = nn.Conv2d(channels, 48, **({"kernel_size": 3, "padding": 1} | geometry))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.relu(self.third(self.between(self.norm(self.second(y)), y)))


BETWEEN = {
    "nothing": lambda y, x: y,
    "relu": lambda y, x: F.relu(y),
    "residual": lambda y, x: F.relu(y + x),
    "scaled": lambda y, x: y * torch.sigmoid(y) * 0.5,
    "pooling": lambda y, x: F.max_pool2d(F.relu(y), 3, 2, 1),
    "mean": lambda y, x: y * y.mean((2, 3), keepdim=True),
    "concat": lambda y, x: torch.cat((x, y), 1)[:, 16:48],
    "upsampled": lambda y, x: y.repeat_interleave(2, 2).repeat_interleave(2, 3),
}  # fmt: skip


def check(model: nn.Module, x: Tensor, dynamic: bool | None = None) -> None:
    """Against float64, in shape and layout of eager."""
    model.eval()
    made = torch.compile(model, backend="mlc", options=ALONE | {"cache": False}, dynamic=dynamic)(x)
    eager = model(x)
    assert (made.shape, made.stride()) == (eager.shape, eager.stride())
    wanted = model.double()(x.double())
    model.float()
    scale = wanted.abs().max().item() if wanted.numel() else 1.0
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5 * scale)


def products(model: nn.Module, x: Tensor) -> list[Any]:
    """The kernels that multiply."""
    report = torch_mlc.explain(model.eval(), x, options=ALONE)
    return [k for k in report.graphs[0].kernels if any("convolution" in op for op in k.ops) and k.function.inner]


@pytest.mark.parametrize("between", BETWEEN)
def test_no_term_of_a_sum_asks_for_the_border(between: str) -> None:
    found = products(Net(BETWEEN[between]), torch.randn(2, 3, 20, 20))
    assert [k.rule for k in found] == ["cpu_product_tiles"] * 3
    for kernel in found:
        terms = [
            v
            for b, _ in blocks(kernel.nest)
            if b.is_reduction
            for s in b.body
            if isinstance(s, Update)
            for v in s.values
        ]
        assert not any(isinstance(e, Select) for v in terms for e in walk(v))


def test_images_between_have_channels_innermost() -> None:
    report = torch_mlc.explain(Net(BETWEEN["residual"]).eval(), torch.randn(2, 3, 20, 20), options=ALONE)
    made = [o.buffer for k in report.graphs[0].kernels for o in k.function.outputs]
    between = [b for b in made if len(b.shape) == 4 and b.shape[1] == 32]
    assert between and all(b.strides[1] == 1 for b in between)


@pytest.mark.parametrize("channels", [256, 200])
@pytest.mark.parametrize("size", [(4, 3, 3, 3), (2, 3, 4, 5), (3, 3, 7, 7), (1, 3, 2, 13)], ids=str)
def test_small_images_of_many_channels(size: tuple[int, ...], channels: int) -> None:
    """Panels of filters that no cache holds meet all places in blocks of terms; tiles go on in the next row."""
    check(Net(BETWEEN["residual"], channels), torch.randn(size))


@pytest.mark.parametrize("size", [(4, 4, 4), (3, 3, 3), (5, 2, 7), (7, 3, 4), (1, 4, 4), (2, 1, 5)], ids=str)
def test_single_elements_of_small_images(size: tuple[int, ...]) -> None:
    """A panel goes over several images where one is no more than a vector."""
    batch, *image = size
    model = nn.Sequential(nn.Conv2d(40, 52, 1), nn.ReLU(), nn.Conv2d(52, 33, 1, bias=False), nn.Sigmoid())
    check(model, torch.randn(batch, 40, *image))


def test_products_of_one_image_with_other_dimensions_stay_apart() -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Conv2d(64, 32, 1), nn.Conv2d(64, 128, 1, stride=2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.relu(x)
            return self.narrow(x), self.wide(x)

    kernels = products(Bottleneck(), torch.randn(2, 64, 16, 16))
    assert [len(k.function.inner) for k in kernels] == [1, 1]
    assert {len(k.function.outputs) for k in kernels} == {1}


@pytest.mark.parametrize("size", [(1, 3, 7, 13), (3, 3, 9, 2), (0, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_values_with_what_lies_between(between: str, size: tuple[int, ...]) -> None:
    check(Net(BETWEEN[between]), torch.randn(size))


GEOMETRIES = [
    {"stride": 2}, {"dilation": 2}, {"groups": 4}, {"groups": 16}, {"padding": (2, 0)},
    {"kernel_size": 1, "padding": 0}, {"kernel_size": 1, "padding": 0, "stride": 2}, {"kernel_size": (1, 5)},
    {"padding": 2, "padding_mode": "reflect"},
]  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_geometries(geometry: dict[str, Any]) -> None:
    check(Net(BETWEEN["residual"], **geometry), torch.randn(2, 3, 11, 10))


def test_sizes_that_vary_and_images_of_one_pixel() -> None:
    check(Net(BETWEEN["relu"]), torch.randn(3, 3, 9, 9), dynamic=True)
    check(Net(BETWEEN["residual"]), torch.randn(2, 3, 1, 1))
    check(
        Net(BETWEEN["residual"]).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    )


def test_nan_and_infinities_stay_where_they_are() -> None:
    model, x = Net(BETWEEN["relu"]).eval(), torch.randn(2, 3, 12, 12)
    x[1, 2, 0, 11], x[0, 1, 11, 5] = torch.nan, torch.inf
    made = torch.compile(model, backend="mlc", options=ALONE)(x)
    assert torch.equal(made.isnan(), model(x).isnan())
