"""Windows of what a load reads: which axes slide them, which taps they have, how far neighbours are apart."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Load, symbol
from torch_mlc.ir.expr.windows import Window, windows_along_sum, windows_of

I0, I1, R0, R1, N = map(symbol, ("i0", "i1", "r0", "r1", "n"))
ALONG = {I0: sympy.Integer(8), I1: N}
TAPS = {R0: sympy.Integer(3), R1: sympy.Integer(2)}


@pytest.mark.parametrize(
    ("indices", "windows"),
    [
        ((I0, 2 * I1 + R0 - 1), [(I1, R0, 2)]),
        ((I0 + 3 * R1, I1 - R0), [(I0, R1, 1), (I1, R0, 1)]),
        ((FloorDiv(I1 + 1, 2) + R0,), [(I1, R0, sympy.Rational(1, 2))]),
        ((I0, R0), []),
        ((I0, I1), []),
        ((I0 + I1 + R0,), []),
        ((I0 + R0 + R1,), []),
        ((I0 * N + R0,), []),
        ((R0 - I0,), []),
        ((I0 + FloorDiv(R0, 2),), []),
        ((I0 + R0, I1 * N + R1), []),
    ],
    ids=str,
)
def test_windows_along_results(indices: tuple[sympy.Expr, ...], windows: list[tuple[object, ...]]) -> None:
    found = windows_of(Load("in0", indices, DType.FLOAT32), ALONG, TAPS)
    assert found == [Window(*w) for w in windows]


@pytest.mark.parametrize(
    ("index", "windows"),
    [
        (R0 + I0, [(R0, I0, 1)]),
        (2 * R0 - I0, [(R0, I0, 2)]),
        (100 * I0 + R0, []),  # which piece of the sum it is
        (R0, []),
        (I0, []),
    ],
    ids=str,
)
def test_windows_along_a_sum(index: sympy.Expr, windows: list[tuple[object, ...]]) -> None:
    found = windows_along_sum(Load("in0", (index,), DType.FLOAT32), {R0: sympy.Integer(100)}, {I0: sympy.Integer(3)})
    assert found == [Window(*w) for w in windows]
