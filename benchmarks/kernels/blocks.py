"""Blocks of models that are more than one kernel: inverted bottlenecks, token mixers, state spaces, volumes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Shape

# images, channels, height, width
SMALL: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (16, 32, 32, 32), "odd": (15, 33, 27, 29)},
    "cuda": {"aligned": (64, 96, 32, 32), "odd": (63, 95, 27, 29)},
}
# batch, tokens, channels
TOKENS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 512, 256), "odd": (7, 509, 240)},
    "cuda": {"aligned": (32, 2048, 768), "odd": (31, 2047, 720)},
}
# batch, chunks, tokens of a chunk, heads, width of a head and of its state
CHUNKS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 8, 64, 8, 32), "odd": (7, 5, 63, 9, 30)},
    "cuda": {"aligned": (16, 16, 128, 16, 64), "odd": (15, 15, 127, 17, 62)},
}
# images, channels, depth, height, width
VOLUMES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 16, 8, 32, 32), "odd": (3, 12, 9, 31, 33)},
    "cuda": {"aligned": (16, 64, 16, 64, 64), "odd": (15, 60, 17, 63, 65)},
}


def inverted_bottleneck(x: Tensor, *weights: Tensor) -> Tensor:
    """Six times as many channels, each convolved by itself, and back. Source: Sandler et al. 2018, "MobileNetV2"."""
    (grow, *first), (each, *second), (shrink, *third) = (weights[k : k + 5] for k in (0, 5, 10))
    y = F.relu6(F.batch_norm(F.conv2d(x, grow), *first))
    y = F.relu6(F.batch_norm(F.conv2d(y, each, None, 1, 1, 1, y.shape[1]), *second))
    return x + F.batch_norm(F.conv2d(y, shrink), *third)


def grouped_mixer(x: Tensor, taps: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Tokens mixed by a convolution over time in eight groups of channels, behind a norm, beside a residual."""
    y = F.layer_norm(x, x.shape[-1:], weight, shift)
    y = F.conv1d(y.transpose(1, 2), taps, bias, padding=taps.shape[-1] // 2, groups=8)
    return x + F.silu(y).transpose(1, 2)


def depthwise_mixer(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """The short causal convolution of a state-space block. Source: Gu and Dao 2023, "Mamba"."""
    y = F.conv1d(x.transpose(1, 2), taps, bias, padding=taps.shape[-1] - 1, groups=x.shape[-1])
    return F.silu(y[..., : x.shape[1]]).transpose(1, 2)


def _sums_between(a: Tensor) -> Tensor:
    """Of ``a [..., t]`` the sums of ``a[j + 1 .. i]`` at ``[i, j]``, minus infinity above the diagonal."""
    total = a.cumsum(-1)
    later = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=a.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf"))


def state_space(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A selective state space by chunks: ``x, b, c [batch, chunk, token, head, d]``, ``decay [batch, head, chunk,
    token]``, below zero. Source: Dao and Gu 2024, "Transformers are SSMs" (state space duality)."""
    within = torch.exp(_sums_between(decay))
    near = torch.einsum("zclhn,zcshn,zhcls,zcshp->zclhp", c, b, within, x)
    total = decay.cumsum(-1)
    states = torch.einsum("zclhn,zhcl,zclhp->zchpn", b, torch.exp(total[..., -1:] - total), x)
    states = torch.cat((torch.zeros_like(states[:, :1]), states), 1)
    between = torch.exp(_sums_between(F.pad(total[..., -1], (1, 0))))
    states = torch.einsum("zhkc,zchpn->zkhpn", between, states)[:, :-1]
    return near + torch.einsum("zclhn,zchpn,zhcl->zclhp", c, states, torch.exp(total))


def volume_norm(x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of volumes, a group norm and an activation."""
    return F.silu(F.group_norm(F.conv3d(x, kernel, padding=1), 4, weight, bias))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _norm(channels: int, generator: torch.Generator) -> list[Tensor]:
    mean, weight, bias = (_normal(generator, channels) for _ in range(3))
    return [mean, torch.rand(channels, generator=generator) + 0.5, weight, bias]


def _bottleneck(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    channels, wide = shape[1], 6 * shape[1]
    grow = _normal(generator, wide, channels, 1, 1) / channels**0.5
    each = _normal(generator, wide, 1, 3, 3) / 3
    shrink = _normal(generator, channels, wide, 1, 1) / wide**0.5
    made = (*_norm(wide, generator), each, *_norm(wide, generator), shrink, *_norm(channels, generator))
    return (_normal(generator, *shape), grow, *made)


def _grouped(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    channels = 8 * (shape[-1] // 8)
    taps = _normal(generator, channels, channels // 8, 5) / (channels * 5 / 8) ** 0.5
    around = (_normal(generator, channels) for _ in range(3))
    return (_normal(generator, *shape[:-1], channels), taps, *around)


def _depthwise(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _normal(generator, *shape), _normal(generator, shape[-1], 1, 4) / 2, _normal(generator, shape[-1])


def _chunks(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    batch, chunks, tokens, heads, width = shape
    x, b, c = (_normal(generator, *shape) for _ in range(3))
    return x, -torch.rand(batch, heads, chunks, tokens, generator=generator), b / width**0.5, c


def _volume(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    channels = shape[1]
    kernel = _normal(generator, channels, channels, 3, 3, 3) / (27 * channels) ** 0.5
    return _normal(generator, *shape), kernel, _normal(generator, channels), _normal(generator, channels)


CASES = (
    KernelCase("inverted_bottleneck", inverted_bottleneck, _bottleneck, SMALL),
    KernelCase("grouped_mixer", grouped_mixer, _grouped, TOKENS),
    KernelCase("depthwise_mixer", depthwise_mixer, _depthwise, TOKENS),
    KernelCase("state_space", state_space, _chunks, CHUNKS),
    KernelCase("volume_norm", volume_norm, _volume, VOLUMES, gradients=4),
)
