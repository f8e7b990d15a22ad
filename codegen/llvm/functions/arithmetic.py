"""Arithmetic on vectors of one width, in which functions that are written inline are spelled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val


class Arithmetic(ABC):
    """Values of type ``floats``, and of ``ints``, whose bits are as many."""

    floats: ClassVar[DType]
    ints: ClassVar[DType]

    def __init__(self, b: Builder, lanes: int) -> None:
        self.b, self.lanes = b, lanes

    def f(self, value: float) -> Val:
        return self.b.const(value, self.floats, self.lanes)

    def i(self, value: int) -> Val:
        return self.b.const(value, self.ints, self.lanes)

    @abstractmethod
    def fma(self, x: Val, y: Val, z: Val) -> Val:
        """``x * y + z``."""

    def add(self, x: Val, y: Val) -> Val:
        return self.b.binary("fadd", x, y)

    def sub(self, x: Val, y: Val) -> Val:
        return self.b.binary("fsub", x, y)

    def mul(self, x: Val, y: Val) -> Val:
        return self.b.binary("fmul", x, y)

    def div(self, x: Val, y: Val) -> Val:
        return self.b.binary("fdiv", x, y)

    def abs(self, x: Val) -> Val:
        return self.b.intrinsic("fabs", x)

    def poly(self, x: Val, coefficients: Sequence[float]) -> Val:
        """Horner's rule, lowest coefficient first."""
        result = self.f(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            result = self.fma(result, x, self.f(c))
        return result

    def bits(self, x: Val) -> Val:
        return self.b.convert("bitcast", x, self.ints)

    def real(self, x: Val) -> Val:
        return self.b.convert("bitcast", x, self.floats)
