"""Quotients of extents: whole for all sizes, or none."""

from __future__ import annotations

import itertools

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.value import symbol
from torch_mlc.scheduler.facts.domain import quotient

N, M = symbol("s0"), symbol("s1")
HALF = FloorDiv(N + 1, 2)


@pytest.mark.parametrize(
    "a", [sympy.expand((N + 1) ** 2), sympy.expand(16 * (HALF + 1) ** 2), N * M + 4 * M, 6 * N * M]
)
@pytest.mark.parametrize("b", [sympy.Integer(16), sympy.Integer(3), N, N + 1, HALF + 1, M, 4 * M, N * M])
def test_a_quotient_is_whole_at_every_size(a: sympy.Expr, b: sympy.Expr) -> None:
    found = quotient(a, b)
    for n, m in itertools.product(range(1, 9), repeat=2):
        at = {N: n, M: m}
        if found is not None:
            assert found.xreplace(at) * b.xreplace(at) == a.xreplace(at) and found.xreplace(at).is_Integer
    assert found is not None or not all(
        int(a.xreplace({N: n, M: m})) % int(b.xreplace({N: n, M: m})) == 0 for n in range(1, 9) for m in range(1, 9)
    )
