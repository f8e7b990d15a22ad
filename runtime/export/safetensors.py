"""Weights as a file in the format of safetensors: a length, a header of JSON, then data, each tensor at a multiple of
64 bytes.

The format allows no holes between tensors, so that what lies between two of ours is a tensor of bytes as well, named
``_padding.…``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...codegen.export.library import Weight
from ...codegen.export.runtime import PlacedWeights
from ...ir.errors import MlcError
from ...ir.expr.dtypes import DType

ALIGNMENT = 64
_NAMES = {
    DType.FLOAT64: "F64", DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16", DType.INT64: "I64",
    DType.INT32: "I32", DType.INT16: "I16", DType.INT8: "I8", DType.UINT64: "U64", DType.UINT32: "U32",
    DType.UINT16: "U16", DType.UINT8: "U8", DType.BOOL: "BOOL", DType.COMPLEX64: "C64", DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E5M2: "F8_E5M2", DType.FLOAT8_E8M0FNU: "F8_E8M0",
}  # fmt: skip


class WeightError(MlcError):
    """A weight that cannot be written as the model describes it."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What a file of weights will hold. ``order`` gives the dimensions of each weight by falling strides, which is how
    its elements lie in the file; ``paddings`` the zeros behind each."""

    weights: tuple[Weight, ...]
    placed: PlacedWeights
    order: tuple[tuple[int, ...], ...]
    paddings: tuple[int, ...]

    def write(self, path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write the elements of ``arrays``, which have the shapes of the model and any strides.

        Raises: WeightError where an array is missing, or has another shape or type.
        """
        with path.open("wb") as file:
            file.write(len(self.placed.header).to_bytes(8, "little"))
            file.write(self.placed.header)
            for weight, order, padding in zip(self.weights, self.order, self.paddings, strict=True):
                array = _checked(weight, arrays)
                # Types that NumPy does not know itself are written as bytes.
                dense = np.ascontiguousarray(array.transpose(order) if array.ndim else array)
                file.write(dense.reshape(-1).view(np.uint8).data)
                file.write(bytes(padding))


def plan_weights(weights: Sequence[Weight]) -> WeightFile:
    """Where each weight lies. Raises: WeightError for strides with gaps or overlaps, and types without a name."""
    entries: dict[str, Any] = {}
    order, paddings, starts = [], [], []
    at = 0
    for k, weight in enumerate(weights):
        dims = _order(weight)
        order.append(dims)
        name = _NAMES.get(weight.dtype)
        if name is None:
            raise WeightError(f"{weight.name}: safetensors has no name for elements of {weight.dtype.value}")
        size = weight.dtype.itemsize * _count(weight.shape)
        entries[weight.name] = {
            "dtype": name,
            "shape": [weight.shape[d] for d in dims],
            "data_offsets": [at, at + size],
        }
        starts.append((at, size))
        padding = -size % ALIGNMENT
        paddings.append(padding)
        at += size
        if padding:
            pad = {"dtype": "U8", "shape": [padding], "data_offsets": [at, at + padding]}
            entries[f"_padding.{k}"] = pad
            at += padding
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header = text + b" " * (-(8 + len(text)) % ALIGNMENT)
    first = 8 + len(header)
    places = tuple((first + start, size) for start, size in starts)
    return WeightFile(tuple(weights), PlacedWeights(header, at, places), tuple(order), tuple(paddings))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _order(weight: Weight) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost."""
    if len(weight.shape) != len(weight.strides):
        raise WeightError(
            f"{weight.name} has the {len(weight.shape)} dimensions {weight.shape} and the strides {weight.strides}"
        )
    # Dimensions of one element have strides that mean nothing: they go where they stand.
    dims = sorted(range(len(weight.shape)), key=lambda d: (-weight.strides[d], d))
    if 0 in weight.shape:
        return tuple(range(len(weight.shape)))
    dense = 1
    for d in reversed(dims):
        if weight.shape[d] == 1:
            continue
        if weight.strides[d] != dense:
            raise WeightError(
                f"{weight.name} of shape {weight.shape} has the strides {weight.strides}, which leave gaps or overlap; "
                "a file of weights holds each element once: make the tensor contiguous"
            )
        dense *= weight.shape[d]
    return tuple(dims)


def _checked(weight: Weight, arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    array = arrays.get(weight.name)
    if array is None:
        raise WeightError(f"the weight {weight.name} is missing among {', '.join(sorted(arrays)) or 'none'}")
    if array.shape != weight.shape or array.dtype != weight.dtype.numpy:
        raise WeightError(
            f"the weight {weight.name} is {array.dtype}{list(array.shape)}; the model has "
            f"{weight.dtype.value}{list(weight.shape)}"
        )
    return array
