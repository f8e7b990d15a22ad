"""The layout of a quantized weight, and what its numbers are.

Four bytes of one output are a word, and 64 outputs a panel, whose words lie beside each other: a register has one word
of each of as many outputs as it has lanes, an instruction that multiplies four bytes a lane takes it as it is, and what
a few registers of a panel need comes as one stream. A byte is a number of eight bits, or two of four: the low halves of
a word are four neighbours along the inputs, the high halves the next four.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Outputs of a panel; bytes of a word.
PANEL, WORD = 64, 4
# What is subtracted from the halves of a byte.
ZERO = 8
BITS = {"int4": 4, "int8": 8}


def inputs_of_word(bits: int) -> int:
    """How many numbers along the inputs a word has."""
    return WORD * 8 // bits


def to_panels(codes: Tensor, bits: int) -> Tensor:
    """Codes int8 ``[outputs, inputs]`` as panels ``[ceil(outputs / 64), inputs / step, 64, 4]`` of int8, or of uint8
    that each hold two numbers of four bits; ``step`` is 4 or 8, and divides the inputs. Missing outputs are zeros."""
    outputs, inputs = codes.shape
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -outputs % PANEL))
    panels = codes.reshape(-1, PANEL, inputs // inputs_of_word(bits), 8 // bits, WORD)
    if bits == 8:
        return panels[:, :, :, 0].transpose(1, 2).contiguous()
    halves = (panels + ZERO).to(torch.uint8).transpose(1, 2)
    return (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).contiguous()


def from_panels(panels: Tensor, outputs: int, bits: int) -> Tensor:
    """The codes int8 ``[outputs, inputs]`` of panels."""
    if bits == 4:
        halves = torch.stack([panels & 15, panels >> 4], 2).to(torch.int8) - ZERO
        return halves.permute(0, 3, 1, 2, 4).reshape(-1, panels.shape[1] * 2 * WORD)[:outputs]
    return panels.transpose(1, 2).reshape(-1, panels.shape[1] * WORD)[:outputs]


def scales_to_panels(scales: Tensor) -> Tensor:
    """Scales ``[outputs, groups]`` as ``[ceil(outputs / 64), groups, 64]``. Those of missing outputs are zero."""
    outputs, groups = scales.shape
    scales = torch.nn.functional.pad(scales, (0, 0, 0, -outputs % PANEL))
    return scales.reshape(-1, PANEL, groups).transpose(1, 2).contiguous()


def scales_from_panels(scales: Tensor, outputs: int) -> Tensor:
    """The scales ``[outputs, groups]`` of panels."""
    return scales.transpose(1, 2).reshape(-1, scales.shape[1])[:outputs]
