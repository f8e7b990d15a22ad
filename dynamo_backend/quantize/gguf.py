"""Exchange with GGUF: blocks of Q4_0 and Q8_0 as codes and scales and back, bit by bit, and the tensors of a file.

A block has 32 numbers and one scale of float16 in front of them. Q8_0: 32 bytes. Q4_0: 16 bytes, of which the low half
of byte k is number k less 8, and the high half number k + 16. Tensors of a file are named and lie at offsets behind a
header of keys and values; sizes are innermost first. Layout: "GGUF specification", version 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import QuantizeError
from .modules import QuantizedWeight, pack_weight
from .panels import ZERO, from_panels, scales_from_panels

# Numbers of a block; bytes of its scale.
BLOCK, _SCALE = 32, 2
_BYTES = {"int4": _SCALE + BLOCK // 2, "int8": _SCALE + BLOCK}
_MAGIC, _ALIGNMENT = b"GGUF", 32


def from_gguf_blocks(data: Tensor, rows: int, columns: int, weights: str) -> QuantizedWeight:
    """A weight ``[rows, columns]`` of the bytes (uint8) of blocks of Q4_0 ("int4") or Q8_0 ("int8"), row after row.

    Raises: QuantizeError where the bytes are not as many as the sizes say.
    """
    if weights not in _BYTES or columns % BLOCK or data.dtype is not torch.uint8:
        raise QuantizeError(
            f"blocks of {weights} for {columns} columns of {data.dtype}: weights are 'int4' (Q4_0) or 'int8' (Q8_0), "
            f"rows have a multiple of {BLOCK} numbers, and data are bytes"
        )
    size = rows * columns // BLOCK * _BYTES[weights]
    if data.numel() != size:
        raise QuantizeError(f"{data.numel()} bytes for {rows} x {columns} numbers of {weights}, which take {size}")
    blocks = data.reshape(-1, _BYTES[weights])
    scales = blocks[:, :_SCALE].contiguous().view(torch.float16).reshape(rows, -1)
    numbers = blocks[:, _SCALE:].contiguous()
    if weights == "int4":
        codes = torch.cat([numbers & 15, numbers >> 4], 1).to(torch.int8) - ZERO
    else:
        codes = numbers.view(torch.int8)
    return pack_weight(codes.reshape(rows, columns), scales, weights)


def to_gguf_blocks(weight: QuantizedWeight) -> Tensor:
    """The bytes (uint8) of a weight as Q4_0 or Q8_0 blocks. Raises: QuantizeError for other groups, or scales that are
    not float16."""
    if weight.group != BLOCK or weight.padded != weight.columns or weight.scales.dtype is not torch.float16:
        raise QuantizeError(
            f"a weight with groups of {weight.group}, {weight.columns} columns and scales of {weight.scales.dtype}: a "
            f"block of GGUF has {BLOCK} numbers and a scale of float16; quantize with group={BLOCK}, and columns that "
            "it divides"
        )
    codes = from_panels(weight.codes, weight.rows, weight.bits).reshape(-1, BLOCK)
    if weight.bits == 4:
        halves = (codes + ZERO).to(torch.uint8)
        codes = halves[:, : BLOCK // 2] | halves[:, BLOCK // 2 :] << 4
    scales = scales_from_panels(weight.scales, weight.rows).reshape(-1, 1).contiguous().view(torch.uint8)
    return torch.cat([scales, codes.contiguous().view(torch.uint8)], 1).flatten()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: its shape, outermost first, and its type ("F32", "Q4_0", …; a number where that has no name
    here)."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: Tensor

    def read(self) -> Tensor | QuantizedWeight:
        """The numbers of a float tensor, or a quantized matrix. Raises: QuantizeError for other types."""
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if self.type in kinds:
            return self.data.view(kinds[self.type]).reshape(self.shape)
        if self.type in _QUANTIZED and len(self.shape) == 2:
            return from_gguf_blocks(self.data, *self.shape, _QUANTIZED[self.type])
        raise QuantizeError(
            f"{self.name} is of type {self.type} with shape {self.shape}: F32, F16, BF16 and matrices of Q4_0 and Q8_0 "
            "are read; convert it to one of them"
        )


_QUANTIZED = {"Q4_0": "int4", "Q8_0": "int8"}
# By the number of a type: its name, the numbers of a block, and their bytes.
_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34)}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufFile:
    """A GGUF file of version 2 or 3, mapped: ``keys`` are its keys and values, ``tensors`` its tensors by name.

    Raises: QuantizeError for a file that is none, or ends early.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError:
                raise self._damaged("it is empty") from None
        self._at = 0
        try:
            self.keys, self.tensors = self._read()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise self._damaged(f"it ends early or is damaged near byte {self._at} ({error})") from None

    def _read(self) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
        if self._bytes[: len(_MAGIC)] != _MAGIC:
            raise self._damaged("it does not begin with 'GGUF'")
        self._at = len(_MAGIC)
        version, tensors, count = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3):
            raise self._damaged(f"it has version {version}, and 2 and 3 are read")
        keys = {self._string(): self._value(self._number("I")) for _ in range(count)}
        heads = [(self._string(), tuple(self._sizes()), self._number("I"), self._number("Q")) for _ in range(tensors)]
        alignment = int(keys.get("general.alignment", _ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        return keys, {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in heads}

    def _sizes(self) -> Iterator[int]:
        sizes = [self._number("Q") for _ in range(self._number("I"))]
        return reversed(sizes)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, at: int) -> GgufTensor:
        known, numbers, size = _TYPES.get(kind, (str(kind), 1, 0))
        count = 1
        for extent in shape:
            count *= extent
        length = count // numbers * size
        if at + length > len(self._bytes) or count % numbers:
            raise self._damaged(f"tensor {name} of {shape} does not fit into it")
        data = torch.frombuffer(self._bytes, dtype=torch.uint8, count=length, offset=at) if length else torch.empty(
            0, dtype=torch.uint8
        )  # fmt: skip
        return GgufTensor(name, shape, known, data)

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        if self._at + length > len(self._bytes):
            raise IndexError(f"a text of {length} bytes")
        text = self._bytes[self._at : self._at + length].decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if count > len(self._bytes):
                raise IndexError(f"a list of {count} values")
            return [self._value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise IndexError(f"a value of type {kind}")
        return self._number(_NUMBERS[kind])

    def _damaged(self, why: str) -> QuantizeError:
        return QuantizeError(f"{self.path} is no GGUF file that can be read: {why}")
