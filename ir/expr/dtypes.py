"""Element types, and their names in torch and NumPy."""

from __future__ import annotations

import enum
import math
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import dtype as TorchDType

from ..errors import IRError


class DType(enum.Enum):
    """An element type. The value is torch's name for it."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"

    # Enum hashes by name through a Python-level call; types are hashed millions of times in structural keys.
    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> DType:
        return self

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def bits(self) -> int:
        """Bits of the value (1 for bool, which is stored in a byte)."""
        return 1 if self is DType.BOOL else _ITEMSIZE[self] * 8

    @property
    def is_float(self) -> bool:
        return self.value.startswith(("float", "bfloat")) and self not in _CARRIED

    @property
    def is_half(self) -> bool:
        """Stored in less than 32 bits and computed in float32."""
        return self.is_float and _ITEMSIZE[self] < 4

    @property
    def may_stay_wide(self) -> bool:
        """Whether what is rounded to it may stay in float32 within a kernel. Eight bits are quantised on purpose."""
        return self.is_half and _ITEMSIZE[self] == 2

    @property
    def is_int(self) -> bool:
        return "int" in self.value

    @property
    def is_signed(self) -> bool:
        return not self.value.startswith("u") and self is not DType.BOOL

    @property
    def is_complex(self) -> bool:
        return self.value.startswith("complex")

    @property
    def is_carried(self) -> bool:
        """Graphs hold tensors of it for library calls, and no kernel computes with it."""
        return self.is_complex or self in _CARRIED

    @property
    def compute(self) -> DType:
        """The type in which values of this type are computed inside a kernel."""
        return DType.FLOAT32 if self.is_half else self

    @property
    def torch(self) -> TorchDType:
        return _TORCH[self]

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(_NUMPY.get(self.value, self.value))

    @property
    def limit(self) -> float | None:
        """The number that stands for all numbers beyond it and the infinity; None where they are infinite or NaN."""
        return 448.0 if self is DType.FLOAT8_E4M3FN and _E4M3_SATURATES else None

    def rounded(self, value: float) -> float:
        """The number of this float type that is nearest; beyond its largest that or an infinity, as torch has it."""
        if self is DType.FLOAT64:
            return value
        if self.limit is not None and abs(value) > self.limit:
            return math.copysign(self.limit, value)
        with np.errstate(over="ignore"):
            return float(self.numpy.type(value))

    @staticmethod
    def from_torch(dtype: TorchDType) -> DType:
        """The DType of a torch dtype. Raises IRError for types that no graph holds (quantised, sub-byte)."""
        try:
            return _FROM_TORCH[dtype]
        except KeyError:
            raise IRError(f"{dtype} has no element type in the IR") from None

    def __repr__(self) -> str:
        return self.value


_NUMPY: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
# Which of both depends on the version of torch.
_E4M3_SATURATES = bool(torch.tensor(1e3).to(torch.float8_e4m3fn).float() == 448)
_CARRIED = frozenset({DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ, DType.FLOAT8_E8M0FNU})
_ITEMSIZE: dict[DType, int] = {d: getattr(torch, d.value).itemsize for d in DType}
_TORCH: dict[DType, TorchDType] = {d: getattr(torch, d.value) for d in DType}
_FROM_TORCH: dict[TorchDType, DType] = {t: d for d, t in _TORCH.items()}
