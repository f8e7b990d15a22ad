"""What a sum of products multiplies: the factors of a term, and the types in which matrix instructions take them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from .dtypes import DType
from .expr import Call, Cast, Expr, call

HALVES = (DType.BFLOAT16, DType.FLOAT16)
# Bytes, which are exact in either half type.
BYTES = (DType.INT8, DType.UINT8)


def factors(value: Expr) -> list[Expr]:
    """The factors of a product, of products of products too."""
    if isinstance(value, Call) and value.fn == "mul":
        return [f for a in value.args for f in factors(a)]
    return [value]


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


def product_of(parts: Sequence[Expr]) -> Expr:
    """The product of factors."""
    return reduce(lambda a, b: call("mul", a, b), parts)
