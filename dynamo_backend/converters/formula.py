"""Formulas that make the results of one node.

A formula is a tree, and what it uses twice would be written out twice; ``Workspace.name`` makes a node of such a part,
which fusion keeps in the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ...ir.expr.dtypes import DType
from ...ir.expr.formula import Formula, convert
from ...ir.graph.graph import TensorType
from .context import ImportContext, Scalar, Tensor
from .terms import axes


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
