"""A reduced axis as digits: where values read quotients and remainders of it (groups, packed elements), it becomes one
axis a digit, and no index is left with a division."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Call, Const, Expr, IndexValue, const, index_exprs, rewrite, symbol, walk

Extents = Mapping[sympy.Symbol, sympy.Expr]
# How long the equal steps of joined parts are at least, a few tiles of a product, and how many there are at most.
LEAST_STEP, MOST_STEPS = 128, 8
DIVISIONS = (FloorDiv, ModularIndexing, Mod, PythonMod)


def refine(
    value: Expr, reduced: Extents, kept: Extents, table: SymbolTable
) -> tuple[dict[sympy.Symbol, sympy.Expr], Expr]:
    """The reduced axes (with their extents) and the value over them, each axis in as many as the value divides it in.

    Divisors must divide each other and the extent; an axis of which that is not so stays whole. New axes are named r0,
    r1, … in order.
    """
    axes: dict[sympy.Symbol, sympy.Expr] = {}
    moved: dict[sympy.Symbol, sympy.Expr] = {}
    for axis, extent in reduced.items():
        steps = _steps(value, axis, extent, table)
        position: sympy.Expr = sympy.S.Zero
        above = extent
        for step in steps:
            own = symbol(f"r{len(axes)}")
            axes[own] = _quotient(above, step)
            position, above = position + own * step, sympy.Integer(step)
        moved[axis] = position
    if len(axes) == len(reduced):
        return dict(reduced), value
    extents = {**kept, **axes}
    value = rewrite(value, lambda _: None, lambda i: simplify(sympy.expand(i.xreplace(moved)), extents, table))
    return axes, rewrite(value, lambda e: _compared(e, extents, table))


def _quotient(extent: sympy.Expr, step: int) -> sympy.Expr:
    if step == 1:
        return extent
    return sympy.Integer(int(extent) // step) if extent.is_Integer else sympy.cancel(extent / step)


def _steps(value: Expr, axis: sympy.Symbol, extent: sympy.Expr, table: SymbolTable) -> list[int]:
    """How much one of each digit counts, the most significant first; the last is 1."""
    divisors: set[int] = set()
    for index in index_exprs(value):
        if axis in index.free_symbols:
            for e in index.atoms(*DIVISIONS):
                divisors |= _divisors(e, axis)
    joints = {limit for e in walk(value) for limit in _threshold(e, axis)}
    for found in (divisors | joints, divisors | _common_step(joints, extent)):
        steps = sorted(d for d in found if d > 1 and d != extent)
        chain = [1, *steps]
        if all(b % a == 0 for a, b in zip(chain, steps)) and all(table.is_divisible(extent, d) for d in steps):
            return chain[::-1]
    return [1]


def _common_step(joints: set[int], extent: sympy.Expr) -> set[int]:
    """The longest step of which all parts of a joined axis have whole ones, where those are long and few: each of them
    is written out."""
    if not joints or not extent.is_Integer:
        return set()
    step = math.gcd(int(extent), *joints)
    return {step} if step >= LEAST_STEP and int(extent) // step <= MOST_STEPS else set()


def _divisors(e: sympy.Expr, axis: sympy.Symbol) -> set[int]:
    """Of ``(c * axis + rest) // d % m``: where the digits begin and end, counted in the axis."""
    base, divisor, *modulus = e.args
    if isinstance(e, (Mod, PythonMod)):
        divisor, modulus = sympy.S.One, [e.args[1]]
    scale = sympy.expand(base).coeff(axis)
    if not (divisor.is_Integer and scale.is_Integer and scale > 0) or any(not m.is_Integer for m in modulus):
        return set()
    marks = {int(divisor), *(int(divisor) * int(m) for m in modulus)}
    return {mark // int(scale) for mark in marks if mark % int(scale) == 0}


def _threshold(e: Expr, axis: sympy.Symbol) -> set[int]:
    """Of ``axis < c``: c, where what was joined begins anew."""
    match e:
        case Call("lt" | "ge", (IndexValue(index, _), Const(limit, _)), _) if index == axis:
            return {int(limit)}
    return set()


def _compared(e: Expr, extents: Extents, table: SymbolTable) -> Expr | None:
    """``c * digit + rest < c * d``, with ``rest < c``, is ``digit < d``; comparisons that always hold are literals."""
    match e:
        case Call("lt" | "ge" as fn, (IndexValue(index, dtype), Const(limit, _)), _) if dtype.is_int:
            low, high = table.bounds(index, extents)
            if (high is not None and high < limit) or low >= limit:
                return const((low < limit) == (fn == "lt"), DType.BOOL)
            for step in sorted((int(c) for c in _coefficients(index)), reverse=True):
                multiple = sum((t for t in sympy.Add.make_args(index) if _coefficient(t) % step == 0), sympy.S.Zero)
                least, most = table.bounds(index - multiple, extents)
                if step > 1 and int(limit) % step == 0 and least >= 0 and most is not None and most < step:
                    digit = IndexValue(sympy.expand(multiple / step), dtype)
                    return Call(fn, (digit, const(int(limit) // step, dtype)), DType.BOOL)
    return None


def _coefficients(index: sympy.Expr) -> set[sympy.Expr]:
    return {c for t in sympy.Add.make_args(index) if (c := _coefficient(t)) > 0}


def _coefficient(term: sympy.Expr) -> sympy.Expr:
    return term.as_coeff_Mul()[0]
