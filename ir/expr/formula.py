"""Formulas over value expressions, written with Python's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .dtypes import DType
from .ops import OPS
from .value import Expr, Select, call, cast, const


def convert(value: Expr, dtype: DType) -> Expr:
    """Conversion between any two types; to and from the half types it goes through float32, as torch does."""
    if value.dtype is dtype:
        return value
    if value.dtype.is_half and dtype is not DType.FLOAT32:
        value = cast(value, DType.FLOAT32)
    if dtype.is_half and value.dtype is not DType.FLOAT32:
        value = cast(value, DType.FLOAT32)
    return cast(value, dtype)


@dataclass(frozen=True, slots=True)
class Formula:
    """A value, or a condition. Numbers beside it become literals of its type.

    Every function of the table of scalar functions (``ir/expr/ops.py``) is a method: ``x.exp()``, ``x.maximum(0)``.
    """

    value: Expr

    def call(self, fn: str, *others: Formula | float) -> Formula:
        """A function of the table of scalar functions, of this value and others."""
        return Formula(call(fn, self.value, *(self.like(x).value for x in others)))

    def __getattr__(self, name: str) -> Callable[..., Formula]:
        if name not in OPS:
            raise AttributeError(f"a formula has no {name!r}, and it is no scalar function of the table either")
        return partial(self.call, name)

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    def to(self, dtype: DType) -> Formula:
        """The value in another type."""
        return Formula(convert(self.value, dtype))

    def like(self, x: Formula | float) -> Formula:
        """A number as a literal of this formula's type."""
        return x if isinstance(x, Formula) else Formula(const(x, self.value.dtype))

    def __add__(self, other: Formula | float) -> Formula:
        return self.call("add", other)

    def __radd__(self, other: float) -> Formula:
        return self.like(other).call("add", self)

    def __sub__(self, other: Formula | float) -> Formula:
        return self.call("sub", other)

    def __rsub__(self, other: float) -> Formula:
        return self.like(other).call("sub", self)

    def __mul__(self, other: Formula | float) -> Formula:
        return self.call("mul", other)

    def __rmul__(self, other: float) -> Formula:
        return self.like(other).call("mul", self)

    def __truediv__(self, other: Formula | float) -> Formula:
        return self.call("div", other)

    def __rtruediv__(self, other: float) -> Formula:
        return self.like(other).call("div", self)

    def __neg__(self) -> Formula:
        return self.call("neg")

    def __abs__(self) -> Formula:
        return self.call("abs")

    def __lt__(self, other: Formula | float) -> Formula:
        return self.call("lt", other)

    def __le__(self, other: Formula | float) -> Formula:
        return self.call("le", other)

    def __gt__(self, other: Formula | float) -> Formula:
        return self.call("gt", other)

    def __ge__(self, other: Formula | float) -> Formula:
        return self.call("ge", other)

    def equals(self, other: Formula | float) -> Formula:
        return self.call("eq", other)

    def __and__(self, other: Formula) -> Formula:
        return self.call("logical_and", other)

    def __or__(self, other: Formula) -> Formula:
        return self.call("logical_or", other)

    def __invert__(self) -> Formula:
        return self.call("logical_not")

    def where(self, if_true: Formula, if_false: Formula | float) -> Formula:
        """``if_true`` where this condition holds."""
        return Formula(Select(self.value, if_true.value, if_true.like(if_false).value))
