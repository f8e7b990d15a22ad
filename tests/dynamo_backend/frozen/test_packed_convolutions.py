"""Filters that oneDNN reads in a layout of its own: values as eager's, copies between calls gone, the rest plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dynamo_backend.frozen.frozen_graphs import graph_of
from torch_mlc.dynamo_backend.aten_passes.frozen.pack_convolutions import has_layout
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.cost.frozen import packed_filters_pay

FREEZE = {"freeze": True}
PACKED = ("mkldnn::_convolution_pointwise.default", "mkldnn::_convolution_transpose_pointwise.default")
pytestmark = [
    pytest.mark.skipif(not has_layout(), reason="this torch has no oneDNN"),
    pytest.mark.usefixtures("without_gradients"),
]


def packed(model: nn.Module, *inputs: Any, **options: Any) -> int:
    return sum(c.calls for c in graph_of(model, *inputs, **options).libraries if c.op in PACKED)


class Block(nn.Module):
    """Two convolutions with norms, an activation between them and a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        self.first, self.second = convolutions
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(2)])
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + x).relu()


GEOMETRIES = [
    {"kernel_size": 3}, {"kernel_size": 3, "padding": 1, "bias": False}, {"kernel_size": (5, 2), "stride": (2, 1)},
    {"kernel_size": 3, "dilation": 2, "padding": 2}, {"kernel_size": (1, 3), "padding": (0, 1), "stride": 2},
    {"kernel_size": 1, "stride": 2}, {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, {"kernel_size": 3, "groups": 2, "padding": 1},
    {"kernel_size": 1, "groups": 2}, {"kernel_size": 3, "channels": (3, 16), "stride": 2, "padding": 1},
    {"kernel_size": 3, "channels": (7, 16)},
]  # fmt: skip
TRANSPOSED = [
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}, {"kernel_size": 2, "stride": 2},
    {"kernel_size": (4, 3), "stride": (2, 1), "padding": (1, 0), "bias": False}, {"kernel_size": 3, "dilation": 2},
    {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 2}, {"kernel_size": 3, "channels": (4, 24)},
]  # fmt: skip
KINDS = [(nn.Conv2d, how) for how in GEOMETRIES] + [(nn.ConvTranspose2d, how) for how in TRANSPOSED]


@pytest.mark.parametrize(("kind", "how"), KINDS, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels last"])
@pytest.mark.parametrize("batch", [1, 3])
def test_values_and_layouts_are_those_of_eager(
    kind: Callable[..., nn.Module], how: dict[str, Any], last: bool, batch: int
) -> None:
    how = dict(how)
    channels, made = how.pop("channels", (130, 68))
    model = kind(channels, made, **how)
    x = torch.randn(batch, channels, 11, 9)
    if last:
        x = x.to(memory_format=torch.channels_last)
    exact = kind(channels, made, **how).double()
    exact.load_state_dict(model.state_dict())
    wanted, plain = exact(x.double()), model(x)
    assert packed(model, x) == 1
    compiled = torch.compile(model, backend="mlc", options=FREEZE)
    for _ in range(2):
        have = compiled(x)
        assert (have.shape, have.stride()) == (plain.shape, plain.stride())
        # The sums of some 1,000 products are in another order, in which they may round as a plain loop's would.
        assert (have.double() - wanted).abs().max() <= 1000**0.5 * 2**-23 * wanted.abs().max()


@pytest.mark.parametrize("form", ["native", "python"])
def test_blocks_of_a_net(form: str) -> None:
    """What lies between two calls has the layout of both: one copy to it, and none where the results leave."""
    model, x = nn.Sequential(Block(192), Block(192), Block(192)).eval(), torch.randn(1, 192, 13, 13)
    graph = graph_of(model, x, host_program=form)
    assert [(c.op, c.calls) for c in graph.libraries] == [(PACKED[0], 6)]
    assert graph.launches == 7
    compiled = torch.compile(model, backend="mlc", options=FREEZE | {"host_program": form})
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 4])
def test_values_that_are_no_numbers_stay_such(kind: Callable[..., nn.Module], groups: int) -> None:
    model, x = kind(128, 64, 3, groups=groups), torch.randn(2, 128, 8, 8)
    x[0, 5, 4, 4], x[1, 3, 0, 0] = float("nan"), float("inf")
    have, want = torch.compile(model, backend="mlc", options=FREEZE)(x), model(x)
    assert torch.equal(have.isnan(), want.isnan()) and torch.equal(have.isinf(), want.isinf())


def test_what_gains_nothing_or_may_not_stays_plain() -> None:
    x = torch.randn(1, 256, 8, 8)
    assert packed(nn.Conv2d(256, 256, 3), x) == 1
    assert not packed(nn.Conv2d(256, 256, 3), x, numerics="eager")
    assert not packed(nn.Conv2d(256, 256, 3), x, target="cuda:sm_90")
    assert not packed(nn.Conv2d(256, 256, 3).double(), x.double())
    assert packed(nn.Conv2d(256, 256, 3, groups=2), x) == 1
    assert not packed(nn.Conv2d(256, 256, 3, groups=256), x), "loops of ours"
    assert not packed(nn.Conv2d(256, 512, 3, groups=256), x)
    assert not packed(nn.ConvTranspose2d(256, 256, 3, groups=256), x)
    assert not packed(nn.Conv2d(256, 256, 1), x)
    assert packed(nn.ConvTranspose2d(256, 256, 3), x) == 1
    assert not packed(nn.Conv2d(256, 256, 8), x), "an image of one place has several layouts"
    torch.testing.assert_close(
        torch.compile(nn.Conv2d(256, 256, 3), backend="mlc", options=FREEZE)(x[:0]), torch.empty(0, 256, 6, 6)
    )


def test_sizes_that_vary_read_plain_filters() -> None:
    model = nn.Conv2d(256, 64, 3)
    compiled = torch.compile(model, backend="mlc", options=FREEZE, dynamic=True)
    for size in (8, 11):
        x = torch.randn(1, 256, size, size)
        torch.testing.assert_close(compiled(x), model(x))


def test_one_filter_for_images_of_two_sizes() -> None:
    layer = nn.Conv2d(128, 128, 3, padding=1)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer(x[..., :5])

    x = torch.randn(1, 128, 9, 9)
    for have, want in zip(torch.compile(both, backend="mlc", options=FREEZE)(x), both(x), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_large_filters_of_small_images_pay() -> None:
    machine = target_for("cpu", None, 1)
    assert packed_filters_pay(512 * 512 * 9, 49, machine) and packed_filters_pay(512 * 512 * 9, 8 * 49, machine)
    assert packed_filters_pay(64 * 64 * 9, 28 * 28, machine), "for what ATen does around the call"
    assert not packed_filters_pay(64 * 64 * 9, 64 * 56 * 56, machine)
    assert not packed_filters_pay(512 * 512 * 9, 49, target_for("cuda", "cuda:sm_90", None))


class Behind(nn.Module):
    """A convolution with an image added to it, or a leaky relu."""

    def __init__(self, adds: bool, slope: float | None, first: bool = False) -> None:
        super().__init__()
        self.layer = nn.Conv2d(130, 67, 3, padding=1)
        self.adds, self.slope, self.first = adds, slope, first

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        y = self.layer(x)
        if self.adds:
            y = image + y if self.first else y + image
        return y if self.slope is None else nn.functional.leaky_relu(y, self.slope)


@pytest.mark.parametrize("form", ["native", "python"])
@pytest.mark.parametrize(
    ("adds", "slope", "first"),
    [(True, None, False), (True, None, True), (False, 0.1, False), (False, -0.5, False)],
)
def test_what_follows_is_in_the_call(adds: bool, slope: float | None, first: bool, form: str) -> None:
    model = Behind(adds, slope, first)
    x, image = torch.randn(2, 130, 11, 9), torch.randn(2, 67, 11, 9)
    x[0, 5, 4, 4], x[1, 3, 0, 0], x[1, 7, 9, 2] = float("nan"), float("inf"), float("-inf")
    image[0, 0], image[0, 1], image[0, 2, 1] = float("nan"), float("inf"), float("-inf")
    graph = graph_of(model, x, image, host_program=form)
    told = "mkldnn::_convolution_pointwise." + ("binary" if adds else "default")
    assert [(c.op, c.calls) for c in graph.libraries] == [(told, 1)]
    assert graph.launches == (3 if adds else 2), "the images and the result in another layout"
    exact = Behind(adds, slope, first).double()
    exact.load_state_dict(model.state_dict())
    wanted, plain = exact(x.double(), image.double()), model(x, image)
    compiled = torch.compile(model, backend="mlc", options=FREEZE | {"host_program": form})
    for _ in range(2):
        have = compiled(x, image)
        assert (have.shape, have.stride()) == (plain.shape, plain.stride())
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(test(have), test(wanted))
        finite = wanted.isfinite()
        error = (have.double() - wanted)[finite].abs().max()
        assert error <= 1000**0.5 * 2**-23 * wanted[finite].abs().max()


def test_what_differs_from_eager_stays_a_kernel() -> None:
    x, image = torch.randn(2, 130, 11, 9), torch.randn(2, 67, 11, 9)
    layer = nn.Conv2d(130, 67, 3, padding=1)

    def ops(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
        module = nn.Module()
        module.layer, module.forward = layer, function  # type: ignore[assignment]
        return [c.op for c in graph_of(module, *inputs).libraries]

    plain = [PACKED[0]]
    assert ops(lambda x: layer(x).relu(), x) == plain
    assert ops(lambda x, y: (layer(x) + y).relu(), x, image) == plain
    assert ops(lambda x, y: layer(x) + y, x, image[:1]) == plain, "a sum that spreads"
    x[0, 5, 4, 4] = float("nan")
    for slope in (0.0, 1e-60):
        assert torch.compile(Behind(False, slope), backend="mlc", options=FREEZE)(x, image)[0, 0, 4, 4].isnan()
    assert ops(lambda x, y: nn.functional.leaky_relu(layer(x) + y), x, image) == plain
    assert ops(lambda x, y: torch.add(layer(x), y, alpha=2), x, image) == plain
    assert ops(lambda x, y: layer(x) + y, x, image.double()) == plain
    assert ops(lambda x: (y := layer(x)) + y, x) == plain
    assert ops(lambda x: (y := layer(x)) * nn.functional.leaky_relu(y), x) == plain
