"""Terms that formulas of many families are made of: axes, conversions, positions and conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import sympy
import torch

from ...ir.expr.dtypes import DType
from ...ir.expr.formula import convert
from ...ir.expr.monoid import highest
from ...ir.expr.value import Const, Expr, IndexValue, Select, call, const, symbol
from ...ir.nest.loops import contiguous_strides


@cache
def axes(rank: int) -> tuple[sympy.Symbol, ...]:
    """The axis symbols ``i0, i1, …`` that every node uses."""
    return tuple(symbol(f"i{k}") for k in range(rank))


def rounded(value: Expr, dtype: DType) -> Expr:
    """What ``dtype`` holds of a value, in the type in which it is computed with: for formulas that eager evaluates in a
    half type itself. Half types are widened and narrowed without rounding in between otherwise.
    """
    kind = dtype.compute
    held = convert(value, dtype)
    return convert(call("bitcast", held, dtype=dtype) if dtype.is_half else held, kind)


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Dims as sorted non-negative numbers; None or nothing means all of them."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    listed = [int(dims)] if isinstance(dims, (int, sympy.Integer)) else [int(d) for d in dims]  # type: ignore[union-attr]
    return sorted({d % rank if rank else 0 for d in listed}) if rank else []


def index_value(expr: sympy.Expr | int, dtype: DType = DType.INT64) -> Expr:
    """An index as a value."""
    expr = sympy.sympify(expr)
    return const(int(expr), dtype) if expr.is_Integer else IndexValue(expr, dtype)


def linear_offset(shape: Sequence[sympy.Expr], indices: Sequence[sympy.Expr]) -> sympy.Expr:
    """The row-major position of ``indices`` in ``shape``."""
    return sympy.Add(*(i * s for i, s in zip(indices, contiguous_strides(tuple(shape)))))


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Their conjunction; true for none."""
    if not conditions:
        return const(True, DType.BOOL)
    result = conditions[0]
    for c in conditions[1:]:
        result = call("logical_and", result, c)
    return result


def within(expr: sympy.Expr, low: sympy.Expr | int | None, high: sympy.Expr | int | None) -> list[Expr]:
    """The conditions ``low <= expr`` and ``expr < high``, those that are given."""
    conditions = []
    if low is not None:
        conditions.append(call("ge", index_value(expr), index_value(low)))
    if high is not None:
        conditions.append(call("lt", index_value(expr), index_value(high)))
    return conditions


def select(condition: Expr, if_true: Expr, if_false: Expr) -> Expr:
    """A ``Select``, folded where the condition is a literal."""
    if isinstance(condition, Const):
        return if_true if condition.value else if_false
    return Select(condition, if_true, if_false)


def unwritten(dtype: DType) -> Const:
    """What elements hold that nothing has been written to: any value, or that which torch fills them with where
    algorithms are to be deterministic."""
    if not (torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory):
        return const(0, dtype)
    return const(math.nan, dtype) if dtype.is_float else highest(dtype)
