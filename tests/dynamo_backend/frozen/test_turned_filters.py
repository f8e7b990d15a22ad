"""Filters that kernels of ours read: laid out once in the order of their sums, and no copy at a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dynamo_backend.frozen.frozen_graphs import graph_of

ALONE = {"libraries": "none", "cache": False}
PRODUCTS = ("cpu_product_tiles", "cpu_contraction")
TURNED = "filters in the order of their sums"

pytestmark = pytest.mark.usefixtures("without_gradients")


def turned(graph: Any) -> int:
    return sum(r.told.startswith(TURNED) for r in graph.frozen)


def copies(graph: Any) -> int:
    """How many arrays are copied for a convolution at each call."""
    return sum(len(k.function.outputs) for k in graph.kernels if k.rule not in PRODUCTS)


def check(model: nn.Module, x: Tensor, dynamic: bool = False) -> None:
    compiled = torch.compile(model, backend="mlc", options={"freeze": True} | ALONE, dynamic=dynamic)
    for _ in range(2):
        made = compiled(x)
    torch._dynamo.reset()
    expected = model.double()(x.double())
    model.float()
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-5)


GEOMETRIES = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": 1, "bias": False}, {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 2), "stride": (2, 1)}, {"kernel_size": 3, "dilation": 2, "padding": 2},
    {"kernel_size": (1, 3), "padding": (0, 1), "stride": 2},
]  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("size", [(1, 3, 3), (4, 3, 3), (3, 4, 2), (2, 7, 5), (5, 2, 3)], ids=str)
def test_small_images(size: tuple[int, int, int], geometry: dict[str, Any]) -> None:
    batch, *image = size
    model = nn.Conv2d(19, 40, **geometry).eval()
    try:
        model(torch.zeros(batch, 19, *image))
    except RuntimeError:
        pytest.skip("the filter is larger than the image")
    check(model, torch.randn(batch, 19, *image))


def test_of_other_ranks_and_of_a_batch_that_varies() -> None:
    check(nn.Conv1d(6, 20, 3, padding=1).eval(), torch.randn(3, 6, 5))
    check(nn.Conv3d(6, 20, 2, stride=2).eval(), torch.randn(2, 6, 4, 3, 5))
    check(nn.Conv2d(6, 20, 3, padding=1).eval(), torch.randn(5, 6, 3, 3), dynamic=True)
    check(nn.Conv2d(6, 20, 3, padding=1).eval(), torch.randn(0, 6, 3, 3))


def test_nan_stays_where_it_is() -> None:
    model, x = nn.Conv2d(8, 32, 3, padding=1).eval(), torch.randn(2, 8, 5, 5)
    x[1, 3, 0, 0] = torch.nan
    made = torch.compile(model, backend="mlc", options={"freeze": True} | ALONE)(x)
    torch._dynamo.reset()
    assert torch.equal(made.isnan(), model(x).isnan())


def test_no_kernel_copies_filters_that_do_not_change() -> None:
    model, x = nn.Conv2d(32, 64, 3, padding=1).eval(), torch.randn(2, 32, 8, 8)
    graph = graph_of(model, x, **ALONE)
    assert turned(graph) == 1
    assert copies(graph) == 1, "the images with their border"
    assert copies(graph_of(model, x, freeze=False, **ALONE)) == 2


def test_filters_that_two_convolutions_share_are_turned_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))

    assert turned(graph_of(Twice().eval(), torch.randn(2, 16, 4, 4), **ALONE)) == 1


def test_what_is_read_otherwise_stays() -> None:
    x = torch.randn(2, 16, 4, 4)
    for model in (nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, groups=2), nn.ConvTranspose2d(16, 16, 3)):
        assert turned(graph_of(model.eval(), x, **ALONE)) == 0
    assert turned(graph_of(nn.Conv2d(16, 16, 3).eval(), x, **ALONE | {"libraries": "aten"})) == 0
