"""Images that are resized, sampled, or padded with what they hold, and gradients of these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Shape, normal, same

# images, channels, height, width
IMAGES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 256, 256), "odd": (8, 3, 409, 411)},
    "cuda": {"aligned": (64, 16, 512, 512), "odd": (64, 3, 1021, 1023)},
}
# Those of which four times as many elements are made.
SMALL: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 128, 128), "odd": (4, 3, 287, 285)},
    "cuda": {"aligned": (64, 16, 256, 256), "odd": (64, 3, 511, 509)},
}

# Volumes of which eight times as many elements are made: images, channels, depth, height, width.
VOLUMES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 8, 32, 32), "odd": (3, 5, 15, 29, 31)},
    "cuda": {"aligned": (16, 16, 32, 64, 64), "odd": (15, 15, 31, 63, 65)},
}


def resize_antialias(x: Tensor) -> Tensor:
    """In float32, for which alone eager has it among floating point types of fewer than 64 bits."""
    return F.interpolate(
        x.to(torch.promote_types(x.dtype, torch.float32)), scale_factor=0.4375, mode="bilinear", antialias=True
    )


def resize_bicubic(x: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.interpolate(x, scale_factor=0.4375, mode="bicubic", antialias=True)


def resize_down(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=0.4375, mode="bilinear")


def resize_up(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


def resize_trilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="trilinear")


def resize_up_backward(grad: Tensor) -> Tensor:
    """The gradient of an image that was made twice as high and as wide."""
    *outer, high, wide = grad.shape
    shape = [*outer, high // 2, wide // 2]
    return torch.ops.aten.upsample_bilinear2d_backward(grad, [high, wide], shape, False)


def sample_backward(grad: Tensor, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of an image that was sampled at places that are data, and of these."""
    return torch.ops.aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, False, [True, True])


def sample(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, align_corners=False)


def _places(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], 2)


def reflect_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, stride=1)


def replicate_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=2)


CASES = (
    KernelCase("resize_antialias", resize_antialias, normal(same), IMAGES),
    KernelCase("resize_bicubic", resize_bicubic, normal(same), IMAGES),
    KernelCase("resize_down", resize_down, normal(same), IMAGES),
    KernelCase("resize_up", resize_up, normal(same), SMALL, gradients=1),
    KernelCase("resize_trilinear", resize_trilinear, normal(same), VOLUMES, gradients=1),
    KernelCase("resize_up_backward", resize_up_backward, normal(same), IMAGES),
    KernelCase("sample", sample, normal(same, _places), SMALL, gradients=2),
    KernelCase("sample_backward", sample_backward, normal(same, same, _places), SMALL),
    KernelCase("reflect_pool", reflect_pool, normal(same), IMAGES),
    KernelCase("replicate_pool", replicate_pool, normal(same), IMAGES),
)
