"""Layer, RMS and batch norm, forward and backward. A backward takes what a forward saves, as autograd would call it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import IMAGES, ROWS, KernelCase, Shape, channels, last, normal, same


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def residual_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.layer_norm(total, x.shape[-1:], weight, bias)


def layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def rms_norm_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm`` for x and weight, from its saved ``rstd [rows, 1]``."""
    normed = x * rstd
    scaled = grad * weight
    inner = (scaled * normed).mean(-1, keepdim=True)
    return (scaled - normed * inner) * rstd, (grad * normed).sum(0)


def batch_norm_train(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def batch_norm_relu_train(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 1e-5, [True, True, True]
    )


def make_layer_norm_backward(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    grad, x = (torch.randn(shape, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=generator) for _ in range(2))
    mean = x.mean(-1, keepdim=True)
    return grad, x, mean, torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5), weight, bias


def make_rms_norm_backward(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    grad, x = (torch.randn(shape, generator=generator) for _ in range(2))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return grad, x, rstd, torch.randn(shape[-1], generator=generator)


def make_batch_norm_backward(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    grad, x = (torch.randn(shape, generator=generator) for _ in range(2))
    invstd = torch.rsqrt(x.var((0, 2, 3), correction=0) + 1e-5)
    return grad, x, torch.randn(shape[1], generator=generator), x.mean((0, 2, 3)), invstd


CASES = (
    KernelCase("layer_norm", layer_norm, normal(same, last, last), ROWS),
    KernelCase("residual_layer_norm", residual_layer_norm, normal(same, same, last, last), ROWS),
    KernelCase("layer_norm_backward", layer_norm_backward, make_layer_norm_backward, ROWS),
    KernelCase("rms_norm", rms_norm, normal(same, last), ROWS),
    KernelCase("rms_norm_backward", rms_norm_backward, make_rms_norm_backward, ROWS),
    KernelCase("batch_norm_train", batch_norm_train, normal(same, channels, channels), IMAGES),
    KernelCase("batch_norm_relu_train", batch_norm_relu_train, normal(same, channels, channels), IMAGES),
    KernelCase("batch_norm_backward", batch_norm_backward, make_batch_norm_backward, IMAGES),
)
