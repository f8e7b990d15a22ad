"""Quantizing and dequantizing as torch.ao's ops ask for it, in element-wise ops that share kernels with what is around.

The ops are there once ``torch.ao.quantization.fx._decomposed`` has been imported, which nothing here does. Results are
eager's: reciprocals of scales are taken where and as eager takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def quantizing() -> dict[OpOverload, Callable[..., Any]]:
    """Overload -> function of simpler ops; none where torch.ao's ops are not there."""
    ops = torch.ops.quantized_decomposed
    if not hasattr(ops, "quantize_per_tensor"):
        return {}
    return {
        ops.quantize_per_tensor.default: _quantize,
        ops.quantize_per_tensor.tensor: _quantize_by_tensors,
        ops.dequantize_per_tensor.default: _dequantize,
        ops.dequantize_per_tensor.tensor: _dequantize_by_tensors,
        ops.quantize_per_channel.default: _quantize_channels,
        ops.dequantize_per_channel.default: _dequantize_channels,
    }


def _quantize(x: Tensor, scale: float, zero: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return _rounded(x, 1.0 / scale, zero, low, high, dtype)


def _quantize_by_tensors(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    inverse = (1.0 / scale.reshape(()).double()).float()
    return _rounded(x, inverse, zero.reshape(()), low, high, dtype)


def _quantize_channels(
    x: Tensor, scales: Tensor, zeros: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return _rounded(x, 1.0 / _along(scales, axis, x), _along(zeros, axis, x), low, high, dtype)


def _rounded(x: Tensor, inverse: Tensor | float, zero: Tensor | int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return torch.clamp(torch.round(x.float() * inverse) + zero, low, high).to(dtype)


def _dequantize(
    x: Tensor, scale: float, zero: int, low: int, high: int, dtype: torch.dtype,
    *, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return (x.to(out_dtype or torch.float32) - zero) * scale


def _dequantize_by_tensors(
    x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, dtype: torch.dtype,
    *, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return (x.to(out_dtype or torch.float32) - zero.reshape(())) * scale.reshape(())


def _dequantize_channels(
    x: Tensor, scales: Tensor, zeros: Tensor | None, axis: int, low: int, high: int, dtype: torch.dtype,
    *, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    whole = x if zeros is None else x - _along(zeros, axis, x)
    return (whole * _along(scales, axis, x)).to(out_dtype or torch.float32)


def _along(values: Tensor, axis: int, x: Tensor) -> Tensor:
    """One value a channel, to be broadcast over the other dimensions of ``x``."""
    return values.view([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])
