"""Products of plain matrices, as libraries of the BLAS kind compute them."""

from __future__ import annotations

from ..expr.dtypes import DType
from .graph import TensorType

PLAIN_PRODUCTS = {
    "aten::mm.default": False, "aten::bmm.default": False, "aten::addmm.default": True, "aten::baddbmm.default": True,
}  # fmt: skip
"""Ops that are one such product, or one a matrix of a batch, and whether they add it to something."""


def is_plain_product(op: str, a: TensorType, b: TensorType, out: TensorType) -> bool:
    """Whether an op of operands and a result of these types is a product of matrices of float32 or float64, each of
    which has its rows or its columns in a row."""
    kinds = {a.dtype, b.dtype, out.dtype}
    if op not in PLAIN_PRODUCTS or len(kinds) != 1 or kinds.isdisjoint((DType.FLOAT32, DType.FLOAT64)):
        return False
    return all(is_turned(t) is not None for t in (a, b)) and is_turned(out) is False


def is_turned(kind: TensorType) -> bool | None:
    """Whether a matrix, or each one of a batch, has its columns in a row instead of its rows; None where neither."""
    rows, columns = kind.shape[-2:]
    outer, inner = kind.strides[-2:]
    # Rows may be longer than what is read of them, but not shorter: a library checks that.
    if inner == 1 and (rows == 1 or _covers(outer, columns)):
        return False
    return True if outer == 1 and (columns == 1 or _covers(inner, rows)) else None


def _covers(step: object, extent: object) -> bool:
    return bool(step == extent or (step - extent).is_nonnegative)  # type: ignore[operator]
