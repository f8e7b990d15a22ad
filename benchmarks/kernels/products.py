"""Products with what stands around them: a block of an MLP, a projection with its norm, logits with their loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import KernelCase, Shape

# rows, terms, columns
HIDDEN: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8192, 1024, 4096), "odd": (8190, 509, 2051)},
    "cuda": {"aligned": (16384, 4096, 14336), "odd": (16381, 4095, 14335)},
}
PROJECTION: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 768, 768), "odd": (4095, 765, 767)},
    "cuda": {"aligned": (16384, 4096, 4096), "odd": (16381, 4095, 4097)},
}
LOGITS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (1024, 768, 32000), "odd": (1023, 765, 32003)},
    "cuda": {"aligned": (8192, 4096, 128256), "odd": (8191, 4095, 50257)},
}
# Weights that no cache holds meet the few rows of a small batch in decoding.
FEW: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 4096, 4096), "odd": (7, 4093, 4095)},
    "cuda": {"aligned": (8, 4096, 14336), "odd": (7, 4093, 14335)},
}


def gelu_mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


def linear_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, weight, bias) + residual, bias.shape)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias))


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As ``few_rows_linear``, by a weight that lies along its columns."""
    return F.relu(torch.addmm(bias, x, weight))


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def _weights(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    rows, terms, columns = shape
    x, weight = (torch.randn(n, terms, generator=generator) for n in (rows, columns))
    return x, weight * terms**-0.5, torch.randn(columns, generator=generator)


def _mlp(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    _, terms, columns = shape
    return *_weights(shape, generator), torch.randn(terms, columns, generator=generator) * columns**-0.5


def _norm(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    rows, _, columns = shape
    return *_weights(shape, generator), torch.randn(rows, columns, generator=generator)


def _columns(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    x, weight, bias = _weights(shape, generator)
    return x, weight.t().contiguous(), bias


def _loss(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
    rows, _, columns = shape
    return *_weights(shape, generator)[:2], torch.randint(0, columns, (rows,), generator=generator)


CASES = (
    KernelCase("gelu_mlp", gelu_mlp, _mlp, HIDDEN),
    KernelCase("linear_layer_norm", linear_layer_norm, _norm, PROJECTION),
    KernelCase("few_rows_linear", few_rows_linear, _weights, FEW),
    KernelCase("few_rows_product", few_rows_product, _columns, FEW),
    KernelCase("linear_cross_entropy", linear_cross_entropy, _loss, LOGITS),
)
