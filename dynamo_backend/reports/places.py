"""Places that are computed, but not of data: mirrored and clamped indices say where they lead before a kernel runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import sympy
from torch.utils._sympy.functions import Max, Min

from ...ir.expr.value import Call, Cast, Const, Expr, Index, IndexValue, is_value

_FORMS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "abs": lambda a: Max(a, -a),
    "neg": operator.neg,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "minimum": Min,
    "maximum": Max,
})  # fmt: skip


def place_of(index: Index) -> sympy.Expr | None:
    """An index as an expression over the axes; None where data decide it, or a function that has no such form.

    Whole numbers are taken to fit their types.
    """
    return _place(index) if is_value(index) else index


def _place(value: Expr) -> sympy.Expr | None:
    if not value.dtype.is_int:
        return None
    match value:
        case Const(number):
            return sympy.Integer(number)
        case IndexValue(index):
            return index
        case Cast(inner):
            return _place(inner)
        case Call(fn, args) if fn in _FORMS:
            places = [_place(a) for a in args]
            return None if any(p is None for p in places) else _FORMS[fn](*places)
    return None
