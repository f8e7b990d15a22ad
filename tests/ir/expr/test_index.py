"""``simplify`` equals brute force, and reduces the forms that views of views leave."""

import itertools
import time

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, ModularIndexing, PythonMod

from torch_mlc.ir.expr.index import expanded, simplify
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.oracle.text import index_text

B, T, H, D, S = (symbol(n) for n in "BTHDS")
b, t, h, d, i, j, x = (symbol(n) for n in ("b", "t", "h", "d", "i", "j", "x"))
EXTENTS = {b: B, t: T, h: H, d: D, i: sympy.Integer(256), j: sympy.Integer(64)}
TABLE = SymbolTable((Size(B), Size(T, 2), Size(H, 1), Size(D, 1, 256, 8)))
LINEAR = b * T * H * D + t * H * D + h * D + d


def evaluate(expr: sympy.Expr, values: dict[sympy.Symbol, int]) -> int:
    names = {s.name: v for s, v in values.items()}
    return eval(index_text(expr, lambda s: s.name), {"max": max, "min": min, **names})


@pytest.mark.parametrize("table", [TABLE, SymbolTable()], ids=["known sizes", "unknown sizes"])
@pytest.mark.parametrize(
    "expr, wanted",
    [
        (FloorDiv(b * T + t, T), b),
        (ModularIndexing(b * T + t, 1, T), t),
        (PythonMod(b * T + t, T), t),
        (64 * FloorDiv(i, 64) + ModularIndexing(i, 1, 64), i),
        (FloorDiv(64 * i + j, 64), i),
        (FloorDiv(64 * i + j, 128), FloorDiv(i, 2)),
        (ModularIndexing(64 * i + j, 1, 128), 64 * ModularIndexing(i, 1, 2) + j),
        (FloorDiv(LINEAR, H * D), b * T + t),
        (FloorDiv(FloorDiv(LINEAR, D), H), b * T + t),
        (FloorDiv(LINEAR, T * H * D), b),
        (ModularIndexing(LINEAR, 1, H * D), h * D + d),
        (ModularIndexing(LINEAR, H * D, T), t),
        (ModularIndexing(LINEAR, D, H), h),
        (H * D * FloorDiv(LINEAR, H * D) + ModularIndexing(LINEAR, 1, H * D), LINEAR),
        (FloorDiv(b * (T + 1) + t, T + 1), b),
        (ModularIndexing(b * (T + 1) + t, 1, T + 1), t),
        (FloorDiv(b * T + (T - 1 - t), T), b),
        (ModularIndexing(b * T + (T - 1 - t), 1, T), T - 1 - t),
        (FloorDiv(8 * i + 7, 8), i),
        (ModularIndexing(ModularIndexing(i, 1, 64), 1, 8), ModularIndexing(i, 1, 8)),
        (FloorDiv(ModularIndexing(i, 1, 64), 8), ModularIndexing(i, 8, 8)),
    ],
    ids=str,
)
def test_views_of_views_cancel(expr: sympy.Expr, wanted: sympy.Expr, table: SymbolTable) -> None:
    assert simplify(expr, EXTENTS, table) == sympy.expand(wanted)


def test_a_flat_index_taken_apart_and_put_together() -> None:
    whole = T * H * FloorDiv(x, T * H) + H * ModularIndexing(x, H, T) + ModularIndexing(x, 1, H)
    assert simplify(whole, {x: B * T * H}) == x
    assert simplify(ModularIndexing(x, T * H, B), {x: B * T * H}) == FloorDiv(x, T * H)


def test_what_is_not_so_is_left() -> None:
    assert simplify(FloorDiv(x, T), {x: B * T}) == FloorDiv(x, T)
    assert simplify(ModularIndexing(i, 1, 64), EXTENTS) == ModularIndexing(i, 1, 64)
    assert simplify(ModularIndexing(b * T + i, 1, T), EXTENTS) != i


def test_loops_of_one_iteration() -> None:
    one = {i: sympy.S.One, j: sympy.Integer(64)}
    assert simplify(FloorDiv(64 * i + j, 64), one) == i
    assert simplify(ModularIndexing(i, 1, 8), one) == i


def test_it_is_quick_once_it_has_been_seen() -> None:
    expr = ModularIndexing(LINEAR, D, H) + FloorDiv(LINEAR, H * D)
    simplify(expr, EXTENTS, TABLE)
    seconds = min(_time(expr) for _ in range(20))
    assert seconds < 300e-6


def _time(expr: sympy.Expr) -> float:
    start = time.perf_counter()
    simplify(expr, EXTENTS, TABLE)
    return time.perf_counter() - start


# --- against brute force ----------------------------------------------------------------------------------------------

VARS = (b, t, i)
SIZES = (T, S)


@st.composite
def divisors(draw: st.DrawFn) -> sympy.Expr:
    number = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    factors = draw(st.lists(st.sampled_from(SIZES), max_size=2))
    extra = draw(st.sampled_from([0, 0, 0, 1])) if factors else 0
    return sympy.Mul(number, *factors) + extra


def expressions() -> st.SearchStrategy[sympy.Expr]:
    leaves = st.one_of(st.sampled_from(VARS), st.sampled_from(SIZES), st.integers(0, 9).map(sympy.Integer))

    def grow(inner: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
        return st.one_of(
            st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
            st.tuples(inner, divisors()).map(lambda p: sympy.expand(p[0] * p[1])),
            st.tuples(inner, divisors()).map(lambda p: FloorDiv(*p)),
            st.tuples(inner, divisors(), divisors()).map(lambda p: ModularIndexing(*p)),
            st.tuples(inner, divisors()).map(lambda p: PythonMod(*p)),
            # Parts of one linear index, as reshapes make them.
            st.tuples(inner, divisors()).map(lambda p: p[1] * FloorDiv(*p) + ModularIndexing(p[0], 1, p[1])),
        )

    return st.recursive(leaves, grow, max_leaves=6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[sympy.Expr, dict[sympy.Symbol, sympy.Expr]]:
    extents = {}
    for v in VARS:
        extents[v] = draw(st.sampled_from([*map(sympy.Integer, (1, 2, 3, 4, 8)), T, S, T * S, 2 * T, T + 1]))
    return draw(expressions()), extents


@settings(max_examples=120)
@given(cases(), st.booleans())
def test_simplify_equals_brute_force(case: tuple[sympy.Expr, dict[sympy.Symbol, sympy.Expr]], known: bool) -> None:
    expr, extents = case
    table = SymbolTable((Size(T, 2, 3), Size(S, 1, 4))) if known else SymbolTable()
    simpler = simplify(expr, extents, table)
    for sizes in itertools.product((2, 3), (1, 4)):
        values = dict(zip(SIZES, sizes))
        ranges = [range(evaluate(extents[v], values)) for v in VARS]
        for point in itertools.islice(itertools.product(*ranges), 200):
            values.update(zip(VARS, point))
            assert evaluate(simpler, values) == evaluate(expr, values), f"{expr} -> {simpler} at {values}"


@settings(max_examples=80)
@given(cases())
def test_bounds_and_divisors_hold(case: tuple[sympy.Expr, dict[sympy.Symbol, sympy.Expr]]) -> None:
    expr, extents = case
    expr = expr - 3 * b  # a lower end below zero
    table = SymbolTable((Size(T, 2, 4, 2), Size(S, 1, None)))
    low, high = table.bounds(expr, extents)
    divisor = table.divisor(expr)
    for sizes in itertools.product((2, 4), (1, 3)):
        values = dict(zip(SIZES, sizes))
        ranges = [range(evaluate(extents[v], values)) for v in VARS]
        for point in itertools.islice(itertools.product(*ranges), 100):
            values.update(zip(VARS, point))
            value = evaluate(expr, values)
            assert low <= value and (high is None or value <= high)
            assert value % divisor == 0 if divisor else value == 0


@pytest.mark.parametrize(
    "expr",
    [
        i, sympy.Integer(3), 4 * i, i + 4 * j + 3, -i, i * j * 5 - T * D * b, i**2, (i + 1) ** 2, 2 * (i + j),
        T * (i + j), i * (j + 1) + 4, FloorDiv(2 * (i + j), 3), 1 + 4 * FloorDiv(T * (i + j), D),
        i * FloorDiv(j, 4), 0 * i,
    ],
    ids=str,
)  # fmt: skip
def test_expanded_is_what_sympy_expands_to(expr: sympy.Expr) -> None:
    assert expanded(expr) == sympy.expand(expr)
    assert sympy.srepr(expanded(expr)) == sympy.srepr(sympy.expand(expr))
