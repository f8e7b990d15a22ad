"""Gradients of smooth resizing are gathered: values against eager's in double precision, layouts, and no scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_mlc import explain

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MODES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
EXTENTS, SIZES = (9, 5, 4), [(18, 10, 8), (4, 3, 9), (1, 7, 4), (9, 5, 4), (31, 1, 13)]
FACTORS = [2.0, 0.5, 1.7, 0.37, (3.0, 1.3, 1.0)]


def resize(mode: str, align_corners: bool = False, **sizes: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, mode=mode, align_corners=align_corners, **sizes)


def compare(fn: Callable[[Tensor], Tensor], x: Tensor, tolerance: float = 1e-12, **how: Any) -> None:
    """Values, gradients and their strides are eager's, of an image of floats that of the same image of doubles."""
    found = torch.compile(fn, backend="mlc", **how)(x)
    wide = x.detach().double().requires_grad_()
    expected = fn(wide)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    given = torch.randn_like(found)
    (gradient,), (wanted,) = torch.autograd.grad(found, x, given), torch.autograd.grad(expected, wide, given.double())
    scale = max(float(wanted.abs().max()), 1.0)
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance * scale)
    eager = fn(x)
    assert found.stride() == eager.stride()
    assert gradient.stride() == torch.autograd.grad(eager, x, given)[0].stride()


def image(mode: str, dtype: torch.dtype = torch.float64, extents: tuple[int, ...] = EXTENTS) -> Tensor:
    return torch.randn(2, 3, *extents[: MODES[mode]], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_sizes(mode: str, size: tuple[int, ...]) -> None:
    for align_corners in (False, True):
        compare(resize(mode, align_corners, size=size[: MODES[mode]]), image(mode), dynamic=False)
        torch.compiler.reset()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("mode", MODES)
def test_factors(mode: str, factor: Any) -> None:
    factors = factor[: MODES[mode]] if isinstance(factor, tuple) else factor
    compare(resize(mode, scale_factor=factors), image(mode), dynamic=False)


@pytest.mark.parametrize("mode", MODES)
def test_images_of_one_element(mode: str) -> None:
    for align_corners in (False, True):
        x = image(mode, extents=(1, 1, 1))
        compare(resize(mode, align_corners, size=(5, 4, 3)[: MODES[mode]]), x, dynamic=False)
        torch.compiler.reset()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_narrow_types(dtype: torch.dtype, tolerance: float) -> None:
    doubled, uneven = resize("bilinear", scale_factor=2.0), resize("bilinear", True, size=(40, 7))
    for fn in (doubled, uneven, resize("bicubic", size=(23, 4))):
        compare(fn, image("bilinear", dtype), tolerance, dynamic=False)
        torch.compiler.reset()


def test_places_far_from_the_first() -> None:
    """A step that is no ratio of small numbers."""
    x = torch.randn(1, 1, 2003, dtype=torch.float64, requires_grad=True)
    compare(resize("linear", scale_factor=0.7310931), x, dynamic=False)
    torch.compiler.reset()
    compare(resize("linear", True, size=2311), x, dynamic=False)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "trilinear"])
def test_channels_innermost(mode: str) -> None:
    layout = torch.channels_last if MODES[mode] == 2 else torch.channels_last_3d
    x = image(mode).detach().to(memory_format=layout).requires_grad_()  # type: ignore[call-overload]
    compare(resize(mode, scale_factor=2.0), x, dynamic=False)


@pytest.mark.parametrize("mode", MODES)
def test_no_scatter_and_no_library(mode: str) -> None:
    for dynamic in (False, True):
        report = explain(resize(mode, scale_factor=2.0), image(mode, torch.float32), training=True, dynamic=dynamic)
        assert all(graph.kernels and not graph.libraries for graph in report.graphs)
        assert all("scatter" not in kernel.rule for kernel in report.kernels)
        torch.compiler.reset()


@pytest.mark.parametrize("mode", MODES)
def test_sizes_that_vary(mode: str) -> None:
    """By whole factors they gather, else torch's decomposition scatters."""
    for sizes in ({"scale_factor": 2.0}, {"scale_factor": 0.6}, {"size": (7, 12, 5)[: MODES[mode]]}):
        fn = resize(mode, **sizes)
        run: Any = torch.compile(fn, backend="mlc", dynamic=True)
        for extents in ((9, 8, 7), (5, 12, 4), (16, 3, 6)):
            x = image(mode, extents=extents)
            given = torch.randn_like(fn(x))
            found, wanted = (torch.autograd.grad(f(x), x, given)[0] for f in (run, fn))
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        torch.compiler.reset()


def test_gpus_gather_too() -> None:
    fn = resize("bilinear", scale_factor=2.0)
    report = explain(fn, image("bilinear", torch.float32, (33, 47)), training=True, target="cuda:sm_90")
    assert all("atomic" not in kernel.source for kernel in report.kernels)
