"""Formulas over value expressions, written with Python's operators.

A formula is a tree, and what it uses twice would be written out twice; ``Workspace.name`` makes a node of such a part,
which fusion keeps in the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Expr, Select, call, const
from ...ir.graph.graph import TensorType
from .context import ImportContext, Scalar, Tensor
from .terms import axes, convert


@dataclass(frozen=True, slots=True)
class Formula:
    """A value, or a condition. Numbers beside it become literals of its type."""

    value: Expr

    def call(self, fn: str, *others: Formula | float) -> Formula:
        """A function of the table of scalar functions, of this value and others."""
        return Formula(call(fn, self.value, *(self.like(x).value for x in others)))

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


def polynomial(x: Formula, coefficients: Sequence[float]) -> Formula:
    """Horner's rule, the highest power first. ``x`` is used once a coefficient and should have a name."""
    result = x.like(coefficients[0])
    for c in coefficients[1:]:
        result = result * x + c
    return result


def chebyshev(x: Formula, coefficients: Sequence[float]) -> Formula:
    """``c0 / 2 + c1 T1(x) + c2 T2(x) + …`` for ``x`` in [-1, 1], the last term first."""
    return polynomial(x, _powers(tuple(coefficients)))


@cache
def _powers(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The powers of a Chebyshev series: what makes that unwise in general is harmless for terms that fall so fast."""
    series = np.array(coefficients[::-1])
    series[0] /= 2
    return tuple(float(c) for c in np.polynomial.chebyshev.cheb2poly(series)[::-1])


class Workspace:
    """The formulas that make the current node's result, in ``dtype``."""

    def __init__(self, ctx: ImportContext, dtype: DType = DType.FLOAT64) -> None:
        self.ctx, self.dtype = ctx, dtype
        self.out = ctx.type()
        self.at = axes(len(self.out.shape))

    def operand(self, x: Tensor | Scalar) -> Formula:
        """An operand, rounded to the type in which eager computes; a name of its own where that costs anything."""
        kind = self.out.dtype.compute
        if isinstance(x, Tensor):
            x = self.ctx.local(x, self.out.device)
            value = convert(self.ctx.load(x, self.at, kind), self.dtype)
            return self.name(Formula(value), "wide")
        return Formula(convert(self.ctx.scalar(x, kind), self.dtype))

    def rounded(self, formula: Formula) -> Formula:
        """A formula's value rounded to the type in which eager computes."""
        return Formula(convert(convert(formula.value, self.out.dtype.compute), self.dtype))

    def name(self, formula: Formula, suffix: str = "part") -> Formula:
        """The formula as a node of its own, to be used more than once."""
        kind = formula.value.dtype
        like = TensorType(self.out.shape, self.out.strides, kind, self.out.device)
        made = self.ctx.compute(formula.value, like, self.ctx.fresh(suffix))
        return Formula(self.ctx.at(made, self.at))

    def result(self, formula: Formula) -> Tensor:
        """The current node's result."""
        return self.ctx.compute(formula.value)
