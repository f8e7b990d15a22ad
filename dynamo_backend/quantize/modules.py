"""Modules with quantized weights. Their forward is what it says, in eager mode and compiled: rounding is visible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import QuantizeError
from .panels import (
    BITS,
    PANEL,
    WORD,
    from_panels,
    inputs_of_word,
    scales_from_panels,
    scales_to_panels,
    to_panels,
)  # fmt: skip
from .rounding import quantize_rows, quantize_weight


class QuantizedWeight(nn.Module):
    """A matrix ``[rows, columns]`` of integers with a scale for each ``group`` columns, in panels.

    Buffers: ``codes``, int8 ``[ceil(rows / 64), columns / 4, 64, 4]``, or uint8
    ``[ceil(rows / 64), columns / 8, 64, 4]`` with two numbers of four bits in a byte; ``scales``, float16 or float32,
    ``[ceil(rows / 64), groups, 64]``. Columns are padded to whole groups.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, rows: int, columns: int, bits: int) -> None:
        super().__init__()
        self.rows, self.columns, self.bits = rows, columns, bits
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def padded(self) -> int:
        """Columns with those that make groups whole."""
        return self.codes.shape[1] * inputs_of_word(self.bits)

    @property
    def group(self) -> int:
        return self.padded // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """float32 ``[rows, padded]``."""
        groups = from_panels(self.codes, self.rows, self.bits).unflatten(1, (-1, self.group))
        return (groups.float() * scales_from_panels(self.scales, self.rows).float().unsqueeze(-1)).flatten(1)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedWeight:
        """Moves between devices; types stay (``model.half()`` speaks of what is computed with, not of codes)."""
        for name, buffer in tuple(self._buffers.items()):
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype is buffer.dtype else buffer.to(moved.device)
        return self

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A checkpoint may hold scales of the other type.
        found = state.get(f"{prefix}scales")
        if found is not None and found.dtype in (torch.float16, torch.float32):
            self.scales = self.scales.to(found.dtype)
        super()._load_from_state_dict(state, prefix, *args, **kwargs)


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with a weight of four or eight bits.

    ``x``: float32, bfloat16 or float16 ``[..., in_features]``; gives ``[..., out_features]`` of the same type, computed
    in float32. With ``activations`` None the weight is dequantized and multiplied; with "int8" each row of ``x`` is
    rounded to integers of eight bits first, with a scale for each group of inputs, so that products within a group are
    sums of integers. A row that has NaN or an infinity then gives NaN.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, activations: str | None) -> None:
        super().__init__()
        self.weight = weight
        self.activations = activations
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)

    @property
    def in_features(self) -> int:
        return self.weight.columns

    @property
    def out_features(self) -> int:
        return self.weight.rows

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        rows = x.reshape(-1, weight.columns)
        if weight.padded != weight.columns:
            rows = nn.functional.pad(rows, (0, weight.padded - weight.columns))
        if self.activations is None:
            rows = rows.float()
        else:
            codes, scales = quantize_rows(rows, weight.group)
            rows = (codes.float() * scales).flatten(1)
        y = rows @ weight.dequantized().t()
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype).reshape(*x.shape[:-1], weight.rows)

    def extra_repr(self) -> str:
        kind = f"int{self.weight.bits}, group={self.weight.group}, activations={self.activations}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}, bias={self.bias is not None}"


class QuantizedEmbedding(nn.Module):
    """``nn.Embedding`` with a table of four or eight bits: indices of any shape give rows of ``dtype``."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.dtype = dtype

    def forward(self, indices: Tensor) -> Tensor:
        weight = self.weight
        panel, lane = indices // PANEL, indices % PANEL
        codes = weight.codes[panel, :, lane]  # [..., words, 4]
        if weight.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -2).to(torch.int8) - 8
        groups = codes.flatten(indices.dim()).unflatten(-1, (-1, weight.group)).float()
        rows = (groups * weight.scales[panel, :, lane].float().unsqueeze(-1)).flatten(-2)
        return rows[..., : weight.columns].to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.rows}, {self.weight.columns}, int{self.weight.bits}, group={self.weight.group}"


def pack_weight(codes: Tensor, scales: Tensor, weights: str, columns: int | None = None) -> QuantizedWeight:
    """Codes that are there already, as a weight.

    ``codes``: int8 ``[rows, padded]``, from -8 to 7 for "int4"; ``scales``: float16 or float32 ``[rows, groups]``;
    ``padded`` is ``groups`` times a multiple of 8 (of 4 for "int8"). ``columns`` of them count, the others are zeros.
    Raises: QuantizeError.
    """
    bits = BITS[weights]
    if codes.dim() != 2 or scales.dim() != 2 or codes.shape[0] != scales.shape[0] or codes.dtype is not torch.int8:
        raise QuantizeError(
            f"codes {codes.dtype} {tuple(codes.shape)} with scales {tuple(scales.shape)}: codes are int8 "
            "[rows, columns], and scales [rows, groups]"
        )
    rows, padded = codes.shape
    step = inputs_of_word(bits)
    if scales.shape[1] == 0 or padded % (scales.shape[1] * step):
        raise QuantizeError(
            f"{scales.shape[1]} groups of {padded} columns: a group has a multiple of {step} columns in {weights}; "
            "pad the codes with zeros, and give columns="
        )
    if scales.dtype not in (torch.float16, torch.float32):
        raise QuantizeError(f"scales of {scales.dtype}: they are float16 or float32; convert them")
    if bits == 4 and codes.numel() and (int(codes.min()) < -8 or int(codes.max()) > 7):
        raise QuantizeError(f"codes from {int(codes.min())} to {int(codes.max())}: int4 has -8 to 7")
    columns = padded if columns is None else columns
    if not padded - scales.shape[1] < columns + padded // scales.shape[1] or not 0 < columns <= padded:
        raise QuantizeError(f"columns={columns} of {padded}: they are those before the padding of the last group")
    return QuantizedWeight(to_panels(codes, bits), scales_to_panels(scales), rows, columns, bits)


def quantized_weight(weight: Tensor, weights: str, group: int) -> QuantizedWeight:
    """A weight ``[rows, columns]`` rounded to "int4" or "int8"; columns are padded with zeros to whole groups."""
    padded = nn.functional.pad(weight.detach(), (0, -weight.shape[1] % group))
    codes, scales = quantize_weight(padded, BITS[weights], group)
    return pack_weight(codes, scales, weights, weight.shape[1])


__all__ = ["WORD", "QuantizedEmbedding", "QuantizedLinear", "QuantizedWeight", "pack_weight", "quantized_weight"]
