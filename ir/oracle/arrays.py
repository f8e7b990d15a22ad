"""What the oracles compute on: logical arrays, and what they are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sympy

from ..errors import MlcError
from ..expr.dtypes import DType
from ..nest.loops import Buffer
from .text import index_text

Array: TypeAlias = "np.ndarray[Any, Any]"
Arrays: TypeAlias = Mapping[str, Array] | Sequence[Array]


class OracleError(MlcError):
    """The program is wrong: an access out of range, an axis bound past its extent, or arguments that do not fit."""


def poison(shape: tuple[int, ...], dtype: DType) -> Array:
    """An array of what nobody has written: NaN, or 0x5A bytes for integers and True for bool."""
    if dtype.is_float or dtype.is_complex:
        return np.full(shape, np.nan, np.float32).astype(dtype.numpy)
    if dtype is DType.BOOL:
        return np.ones(shape, np.bool_)
    return np.full(shape, int.from_bytes(b"\x5a" * dtype.itemsize, "little"), dtype.numpy)


def size(expr: sympy.Expr | int, sizes: Mapping[str, int]) -> int:
    """The value of an expression over size symbols. Raises OracleError where one is not given."""
    if isinstance(expr, int):
        return expr

    def value(s: sympy.Symbol) -> str:
        if s.name not in sizes:
            raise OracleError(f"no value for the size {s.name}; given are {', '.join(sizes) or 'none'}")
        return f"({int(sizes[s.name])})"

    return int(eval(index_text(expr, value), {"max": max, "min": min}))


def by_name(inputs: Arrays, names: list[str], where: str) -> dict[str, Array]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if len(inputs) != len(names):
        raise OracleError(f"{where} takes {len(names)} inputs ({', '.join(names)}), got {len(inputs)}")
    return dict(zip(names, inputs, strict=True))


def logical(buffer: Buffer, array: Array, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Array:
    if array.dtype != buffer.dtype.numpy:
        raise OracleError(f"{buffer.name}: elements are {buffer.dtype.value}, given {array.dtype}")
    if array.shape == shape:
        return array
    strides = tuple(size(s, sizes) for s in buffer.strides)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if array.ndim == 1 and array.size >= span:
        step = array.strides[0]
        return np.lib.stride_tricks.as_strided(array, shape, tuple(s * step for s in strides), writeable=False)
    raise OracleError(f"{buffer.name}: shape is {shape} ({span} elements of storage), given {array.shape}")
