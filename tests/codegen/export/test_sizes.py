"""Sizes in LLVM IR against the same sizes computed by Python, also where they do not fit."""

from __future__ import annotations

import ctypes
import random

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, ModularIndexing

from torch_mlc.codegen.export.sizes import SizeWriter
from torch_mlc.codegen.kernel import EmitError
from torch_mlc.ir.expr.symbols import PositivePart
from torch_mlc.runtime.cpu import load_text

S = tuple(sympy.Symbol(f"s{k}", integer=True, nonnegative=True) for k in range(3))


def compiled(expr: sympy.Basic) -> tuple[object, object]:
    """``(sizes, values) -> whether it did not fit``, and what keeps it loaded."""
    writer = SizeWriter(S)
    if isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol:
        value = writer.value(f"zext i1 {writer.condition(expr)} to i64")
    else:
        value = writer.size(expr)
    body = "\n".join(writer.lines)
    text = (
        f"define i1 @f(ptr %sizes, ptr %out) {{\n{body}\n  store i64 {value}, ptr %out\n  ret i1 {writer.wrong}\n}}\n"
    )
    loaded = load_text(text, ["f"])
    kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)
    return kind(loaded.addresses["f"]), loaded


def run(expr: sympy.Basic, values: list[int]) -> int | None:
    function, kept = compiled(expr)
    sizes, out = (ctypes.c_int64 * 3)(*values), ctypes.c_int64()
    wrong = function(sizes, ctypes.byref(out))  # type: ignore[operator]
    del kept
    return None if wrong else out.value


def random_size(rng: random.Random, depth: int) -> sympy.Expr:
    if depth == 0:
        return rng.choice([*S, sympy.Integer(rng.randint(1, 70))])
    a, b = random_size(rng, depth - 1), random_size(rng, depth - 1)
    positive = Max(b, 1)
    plain = [a + b, a - b, a * b, a * 3 - 1, a**2, Max(a, b), Min(a, b), PositivePart(a - b)]
    divided = [
        FloorDiv(a, positive),
        CeilDiv(a, sympy.Integer(rng.randint(1, 9))),
        Mod(PositivePart(a), positive),
        ModularIndexing(PositivePart(a), 3, 5),
    ]
    return rng.choice(plain + divided)


@pytest.mark.parametrize("seed", range(40))
def test_sizes_are_those_of_python(seed: int) -> None:
    rng = random.Random(seed)
    expr = random_size(rng, rng.randint(1, 3))
    for _ in range(4):
        values = [rng.choice([0, 1, 2, 3, 17, 64, 1000]) for _ in S]
        wanted = sympy.sympify(expr).subs(dict(zip(S, values, strict=True)))
        assert run(expr, values) == int(wanted), (expr, values)


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        (sympy.Le(S[0], 5), lambda a, b: a <= 5),
        (sympy.And(sympy.Ne(S[0], 3), sympy.Lt(S[0], S[1])), lambda a, b: a != 3 and a < b),
        (sympy.Or(sympy.Eq(S[0], 2 * S[1]), sympy.Gt(S[1], 9)), lambda a, b: a == 2 * b or b > 9),
        (sympy.Not(sympy.Ge(S[0] + S[1], 4), evaluate=False), lambda a, b: a + b < 4),
        (sympy.true, lambda a, b: True),
        (sympy.false, lambda a, b: False),
    ],
)
def test_conditions(test: sympy.Basic, holds: object) -> None:
    for a in (0, 2, 3, 5, 6, 20):
        for b in (0, 1, 3, 10):
            assert run(test, [a, b, 0]) == holds(a, b)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("expr", "values"),
    [
        (S[0] * S[1], [1 << 40, 1 << 40, 0]),
        (S[0] * 8 + S[1], [(1 << 60), 1, 0]),
        (S[0] ** 3, [1 << 22, 0, 0]),
        (FloorDiv(S[0], S[1]), [5, 0, 0]),
        (Mod(S[0], S[1] - 3), [5, 2, 0]),
    ],
)
def test_what_does_not_fit_is_told(expr: sympy.Expr, values: list[int]) -> None:
    assert run(expr, values) is None


def test_what_has_no_code_is_refused() -> None:
    for expr, told in (
        (sympy.Symbol("u7", integer=True) + 1, "nothing gives the size u7; known are s0, s1, s2"),
        (sympy.sin(S[0]), "no code for the size sin"),
        (sympy.Integer(1 << 70), "has more than 64 bits"),
    ):
        with pytest.raises(EmitError, match=told):
            SizeWriter(S).size(expr)
