"""Whole numbers: between which bounds a value lies, and whether a half type holds all of those."""

from __future__ import annotations

import math
from collections.abc import Callable

from .dtypes import DType
from .value import Call, Cast, Const, Expr, Select

_Range = tuple[float, float]
# Up to where each type holds all whole numbers.
_WHOLE = {DType.FLOAT16: 1 << 11, DType.BFLOAT16: 1 << 8}
# How far a whole number is followed to what it is made of.
_DEPTH = 8


def held(value: Expr, dtype: DType) -> bool:
    """Whether a half type holds every whole number that a value may be."""
    low, high = _range(value, _DEPTH)
    return -_WHOLE[dtype] <= low and high <= _WHOLE[dtype]


def _range(e: Expr, depth: int) -> _Range:
    """The least and the greatest that a whole number may be."""
    if e.dtype is DType.BOOL:
        return 0, 1
    if not e.dtype.is_int:
        return -math.inf, math.inf
    least = -(1 << (e.dtype.bits - 1)) if e.dtype.is_signed else 0
    every = (least, least + (1 << e.dtype.bits) - 1)
    found = _made(e, depth) if depth else every
    return found if every[0] <= found[0] and found[1] <= every[1] else every


def _made(e: Expr, depth: int) -> _Range:
    """What is known of a whole number from what it is made of; it may not fit its type, and then wraps."""
    match e:
        case Const(number):
            return number, number
        case Cast(value):
            return _range(value, depth - 1)
        case Select(_, if_true, if_false):
            (a, b), (c, d) = _range(if_true, depth - 1), _range(if_false, depth - 1)
            return min(a, c), max(b, d)
        case Call(fn, args) if fn in _RULES:
            return _RULES[fn](*(_range(a, depth - 1) for a in args))
    return -math.inf, math.inf


def _masked(a: _Range, b: _Range) -> _Range:
    """Bits of what is not negative are no more than it."""
    bounds = [high for low, high in (a, b) if low >= 0]
    return (0, min(bounds)) if bounds else (-math.inf, math.inf)


def _shifted(a: _Range, by: _Range) -> _Range:
    if by[0] != by[1] or not 0 <= by[0] < 64:
        return min(a[0], 0), max(a[1], 0)
    return a[0] // 2 ** by[0], a[1] // 2 ** by[0]


def _product(a: _Range, b: _Range) -> _Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


_RULES: dict[str, Callable[..., _Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "bit_and": _masked,
    "shr": _shifted,
}
