"""Numbers that are never negative, and those of which that is not known."""

from __future__ import annotations

import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.nonnegative import is_nonnegative
from torch_mlc.ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select

I64, I32, F32 = DType.INT64, DType.INT32, DType.FLOAT32
AT = sympy.Symbol("i0", integer=True, nonnegative=True)
PLACE = IndexValue(AT, I64)
DATA, SHORT, FLOAT = (Load(n, (AT,), d) for n, d in (("a", I64), ("b", I32), ("c", F32)))
ZERO, NONE = Const(0, I64), Const(0.0, F32)


def both(fn: str, a: Expr, b: Expr, dtype: DType = I64) -> Expr:
    return Call(fn, (a, b), dtype)


CLAMPED = Cast(Call("maximum", (FLOAT, NONE), F32), I64)
TOP = both("maximum", DATA, ZERO)

KNOWN = {
    "place": PLACE,
    "clamped": both("maximum", DATA, ZERO),
    "clamped before the conversion": CLAMPED,
    "window": both("minimum", both("add", CLAMPED, PLACE), Const(7, I64)),
    "either": Select(Call("lt", (DATA, ZERO), DType.BOOL), PLACE, Const(3, I64)),
    "sum of a number of few bits": both("add", Cast(both("maximum", SHORT, Const(0, I32), I32), I64), PLACE),
    "bytes": Cast(Load("d", (AT,), DType.UINT8), I64),
}
UNKNOWN = {
    "data": DATA,
    "difference": both("sub", PLACE, Const(1, I64)),
    "sum that may begin anew": both("add", TOP, TOP),
    "product that may begin anew": both("mul", TOP, TOP),
    "short sum that may begin anew": both("add", *[both("maximum", SHORT, Const(0, I32), I32)] * 2, I32),
    "lower bits": Cast(TOP, I32),
    "least": both("minimum", DATA, PLACE),
    "one of two": Select(Call("lt", (DATA, ZERO), DType.BOOL), PLACE, DATA),
    "least whole number": Call("abs", (DATA,), I64),
}


@pytest.mark.parametrize("value", KNOWN.values(), ids=KNOWN.keys())
def test_known(value: Expr) -> None:
    assert is_nonnegative(value)


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown(value: Expr) -> None:
    assert not is_nonnegative(value)
