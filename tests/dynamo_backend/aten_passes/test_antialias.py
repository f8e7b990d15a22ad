"""Anti-aliased resizing is kernels alone, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_mlc import explain

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SIZES = [((9, 11), (4, 5)), ((7, 7), (7, 7)), ((5, 30), (40, 3)), ((3, 2), (1, 1)), ((1, 6), (9, 1))]


def resize(size: tuple[int, int], mode: str, align_corners: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, antialias=True, align_corners=align_corners)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("extents", "size"), SIZES)
def test_values_gradients_and_layouts(extents: tuple[int, int], size: tuple[int, int], mode: str) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        fn = resize(size, mode, align_corners=layout is torch.channels_last)
        x = torch.randn(2, 3, *extents, dtype=torch.float64).to(memory_format=layout).requires_grad_()
        expected = fn(x)
        found = torch.compile(fn, backend="mlc", dynamic=False)(x)
        given = torch.randn_like(expected)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(y, x, given)[0] for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert found.stride() == expected.stride() and gradients[0].stride() == gradients[1].stride()
        torch.compiler.reset()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_no_library_is_called(mode: str) -> None:
    for training in (False, True):
        x = torch.randn(1, 3, 17, 19, requires_grad=training)
        report = explain(resize((5, 40), mode, False), x, training=training)
        assert all(graph.kernels and not graph.libraries for graph in report.graphs)


def test_scale_factors_rule_where_they_are_given() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=0.37, mode="bilinear", antialias=True)

    x = torch.randn(1, 2, 20, 31)
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x))


def test_images_of_bytes_and_of_any_size_are_the_librarys() -> None:
    fn = resize((4, 5), "bilinear", False)
    images = torch.randint(0, 256, (1, 3, 9, 11), dtype=torch.uint8)
    assert torch.equal(torch.compile(fn, backend="mlc")(images), fn(images))
    run = torch.compile(fn, backend="mlc", dynamic=True)
    for n in (9, 12, 4):
        x = torch.randn(2, 3, n, n + 1)
        torch.testing.assert_close(run(x), fn(x))
