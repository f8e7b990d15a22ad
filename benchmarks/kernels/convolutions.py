"""Convolutions with what stands around them in image networks, in inference: depthwise, points, transposed."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Maker, Shape

DEPTHWISE = {
    "cpu": {"aligned": (8, 96, 56, 56), "odd": (7, 95, 57, 55)},
    "cuda": {"aligned": (64, 384, 56, 56), "odd": (63, 383, 57, 55)},
}
POINTS = {
    "cpu": {"aligned": (8, 64, 56, 56), "odd": (7, 61, 57, 55)},
    "cuda": {"aligned": (64, 256, 56, 56), "odd": (63, 255, 57, 55)},
}
TRANSPOSED = {
    "cpu": {"aligned": (16, 32, 32, 64), "odd": (15, 33, 31, 57)},
    "cuda": {"aligned": (64, 128, 32, 64), "odd": (63, 127, 31, 57)},
}


def depthwise_norm_relu(x: Tensor, kernel: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The middle of an inverted residual block. Source: Sandler et al. 2018, "MobileNetV2"."""
    y = F.conv2d(x, kernel, None, 1, 1, 1, x.shape[1])
    return F.relu6(F.batch_norm(y, mean, var, weight, bias))


def norm_relu_depthwise(x: Tensor, kernel: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What is in front of the middle of an inverted residual block, and that. Source: Sandler et al. 2018."""
    y = F.relu6(F.batch_norm(x, mean, var, weight, bias))
    return F.conv2d(y, kernel, None, 1, 1, 1, x.shape[1])


def convnext_head(x: Tensor, kernel: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The depthwise convolution and norm over channels of a ConvNeXt block. Source: Liu et al. 2022."""
    y = F.conv2d(x, kernel, shift, 1, 3, 1, x.shape[1])
    return F.layer_norm(y.permute(0, 2, 3, 1), x.shape[1:2], weight, bias)


def points_norm_relu(x: Tensor, kernel: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The last convolution of a bottleneck, of 1 x 1 elements, to four times as many channels. Source: He et al."""
    return F.relu(F.batch_norm(F.conv2d(x, kernel), mean, var, weight, bias))


def transposed_mean(x: Tensor, kernel: Tensor) -> Tensor:
    """The mean of each channel of images made twice as high and as wide."""
    return (F.conv_transpose2d(x, kernel, stride=2, padding=1, output_padding=1) * 0.5).mean((2, 3))


def transposed_relu(x: Tensor, kernel: Tensor) -> Tensor:
    """The same images with what follows of each element."""
    return torch.tanh(F.relu(F.conv_transpose2d(x, kernel, stride=2, padding=1, output_padding=1)))


def _transposed(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    channels = shape[1]
    kernel = torch.randn(channels, channels, 3, 3, generator=generator)
    return torch.randn(shape, generator=generator), kernel / channels**0.5


def _make(
    shape: Shape, generator: torch.Generator, kernel: int, grow: int, norm: bool, last: bool
) -> tuple[Tensor, ...]:
    channels = shape[1]
    x = torch.randn(shape, generator=generator)
    filters = (grow * channels, channels) if grow else (channels, 1)
    taps = torch.randn(*filters, kernel, kernel, generator=generator)
    around = [torch.randn(filters[0], generator=generator) for _ in range(3)]
    if norm:
        around.insert(1, torch.rand(filters[0], generator=generator) + 0.5)
    x = x.to(memory_format=torch.channels_last) if last else x
    return (x, taps / taps[0].numel() ** 0.5, *around)


def _maker(kernel: int, grow: int = 0, norm: bool = True, last: bool = False) -> Maker:
    return partial(_make, kernel=kernel, grow=grow, norm=norm, last=last)


CASES = (
    KernelCase("depthwise_norm_relu", depthwise_norm_relu, _maker(3), DEPTHWISE),
    KernelCase("depthwise_norm_relu_nhwc", depthwise_norm_relu, _maker(3, last=True), DEPTHWISE),
    KernelCase("norm_relu_depthwise", norm_relu_depthwise, _maker(3), DEPTHWISE),
    KernelCase("convnext_head", convnext_head, _maker(7, norm=False), DEPTHWISE),
    KernelCase("transposed_mean", transposed_mean, _transposed, TRANSPOSED),
    KernelCase("transposed_relu", transposed_relu, _transposed, TRANSPOSED),
    KernelCase("points_norm_relu", points_norm_relu, _maker(1, grow=4), POINTS),
)
