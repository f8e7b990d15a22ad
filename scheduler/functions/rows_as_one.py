"""Functions whose rows are those of a matrix: leading dimensions that every access crosses as one become one."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.function.function import Dim, TensorFunction
from .lower import merge_pair, renumber


def rows_as_one(function: TensorFunction, rows: sympy.Expr) -> TensorFunction | None:
    """The function with ``rows`` points of its first dimension, into which those behind it may have gone; None where
    they are no such."""
    while function.rows and sympy.expand(function.rows[0].extent - rows) != 0:
        if len(function.rows) < 2:
            return None
        high, low, *others = function.rows
        merged = merge_pair(function, high, low)
        if merged is None:
            return None
        rows_now = (Dim(low.var, high.extent * low.extent), *others)
        function = renumber(replace(merged, rows=rows_now))
    return function if function.rows else None


__all__ = ["rows_as_one"]
