"""Stores that leave an element as it is where a condition does not hold."""

from __future__ import annotations

from ..expr.dtypes import DType
from ..expr.value import Cast, Expr, Index, Load, Select
from .loops import Store


def is_element(value: Expr, name: str, indices: tuple[Index, ...], dtype: DType) -> bool:
    """Whether a value is an element of an array of ``dtype``, or that in a type that holds all of its values."""
    if isinstance(value, Cast) and value.dtype in (dtype.compute, DType.FLOAT32):
        value = value.value
    return value == Load(name, indices, dtype)


def changed_where(store: Store, dtype: DType) -> tuple[Expr, Expr] | None:
    """When a store to an array of ``dtype`` changes anything, and what it stores then. None where it always may."""
    value = store.value
    stored = value if isinstance(value, Cast) and value.dtype is dtype else None
    if stored is not None:
        value = stored.value
    if not isinstance(value, Select) or not is_element(value.if_false, store.buffer, store.indices, dtype):
        return None
    new = value.if_true
    return value.condition, Cast(new, dtype, stored.when_stored) if stored is not None else new
