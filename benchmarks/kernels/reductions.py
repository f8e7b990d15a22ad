"""Reductions over rows and columns, and the softmax family."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import LONG, ROWS, KernelCase, Shape, normal, same


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def row_max(x: Tensor) -> Tensor:
    return x.amax(-1)


def row_argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def bias_gelu_column_sum(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of bias and GELU: a pointwise result and its sum by column."""
    grad = torch.ops.aten.gelu_backward(grad, x)
    return grad, grad.sum(0)


def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, -1)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_mask(x: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax(torch.where(keep, x * 0.125, float("-inf")), -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def mse_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y)


def huber_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(x, y, delta=0.5)


def logits_loss(x: Tensor, y: Tensor) -> Tensor:
    """Binary cross entropy of logits; the targets are probabilities."""
    return F.binary_cross_entropy_with_logits(x, torch.sigmoid(y))


def make_masked(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    keep = torch.rand(shape, generator=generator) < 0.8
    keep[:, 0] = True
    return torch.randn(shape, generator=generator), keep


def make_classes(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(shape, generator=generator), torch.randint(shape[-1], shape[:1], generator=generator)


CASES = (
    KernelCase("row_sum", row_sum, normal(same), ROWS),
    KernelCase("row_max", row_max, normal(same), ROWS),
    KernelCase("row_argmax", row_argmax, normal(same), ROWS),
    KernelCase("column_sum", column_sum, normal(same), ROWS),
    KernelCase("bias_gelu_column_sum", bias_gelu_column_sum, normal(same, same), ROWS),
    KernelCase("var_mean", var_mean, normal(same), ROWS),
    KernelCase("softmax", softmax, normal(same), ROWS),
    KernelCase("softmax_long", softmax, normal(same), LONG),
    KernelCase("softmax_mask", softmax_mask, make_masked, ROWS),
    KernelCase("log_softmax", log_softmax, normal(same), ROWS),
    KernelCase("cross_entropy", cross_entropy, make_classes, ROWS),
    KernelCase("mse_loss", mse_loss, normal(same, same), ROWS),
    KernelCase("huber_loss", huber_loss, normal(same, same), ROWS, gradients=1),
    KernelCase("logits_loss", logits_loss, normal(same, same), ROWS, gradients=1),
)
