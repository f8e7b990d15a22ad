"""What a sum of products multiplies: the factors of a term, and the types in which matrix instructions take them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

import sympy

from .dtypes import DType
from .value import Call, Cast, Expr, call, free_symbols, loads

HALVES = (DType.BFLOAT16, DType.FLOAT16)
# Bytes, which are exact in either half type.
BYTES = (DType.INT8, DType.UINT8)


def factors(value: Expr) -> list[Expr]:
    """The factors of a product, of products of products too."""
    if isinstance(value, Call) and value.fn == "mul":
        return [f for a in value.args for f in factors(a)]
    return [value]


def operands(value: Expr, over: Collection[sympy.Symbol]) -> list[Expr]:
    """The factors of a term that are read along what is summed ``over``."""
    return [f for f in factors(value) if not free_symbols(f).isdisjoint(over) and any(True for _ in loads(f))]


def bare(factor: Expr) -> Expr:
    """A factor without the conversion that matrix instructions do themselves: from a half type or bytes to float32, in
    which they add, or from signed bytes to int32."""
    if isinstance(factor, Cast):
        narrow = factor.value.dtype
        if factor.dtype is DType.FLOAT32 and narrow in (*HALVES, *BYTES):
            return factor.value
        if factor.dtype is DType.INT32 and narrow is DType.INT8:
            return factor.value
    return factor


def multiplied(left: DType, right: DType, total: DType) -> DType:
    """The type in which operands of these types are multiplied where their products add up to ``total``: the half type
    of one if the other is of it too, or of bytes; bytes where integers are added; else float32."""
    kinds = {left, right}
    if total is DType.INT32 and kinds == {DType.INT8}:
        return DType.INT8
    halves = kinds & set(HALVES)
    if len(halves) == 1 and kinds - halves <= set(BYTES):
        return halves.pop()
    return DType.FLOAT32


def weighing(
    value: Expr, features: Collection[sympy.Symbol], rows: Collection[sympy.Symbol]
) -> tuple[Expr | None, Expr]:
    """A vector's weight of its own for each row, and the vector: the factors of ``value`` without an axis of the
    ``features``, and those with one.

    No weight (None) where the former are the same for all ``rows`` that the vector itself is the same for.
    """
    parts = factors(value)
    vector = [f for f in parts if not free_symbols(f).isdisjoint(features)]
    rest = [f for f in parts if free_symbols(f).isdisjoint(features)]
    own = set(rows) - {s for f in vector for s in free_symbols(f)}
    if not vector or all(free_symbols(f).isdisjoint(own) for f in rest):
        return None, value
    return product_of(rest), product_of(vector)


def product_of(parts: Sequence[Expr]) -> Expr:
    """The product of factors."""
    return reduce(lambda a, b: call("mul", a, b), parts)
