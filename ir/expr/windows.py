"""Windows: dimensions of what a load reads in which the place is one that moves, and a tap that is added to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv

from .value import Load, index_exprs

Extents = Mapping[sympy.Symbol, sympy.Expr]
# Taps that are written out at most.
MOST_TAPS = 128


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of what is read: the axis ``along`` which its window slides, the ``tap``, and how many places two
    neighbours are apart (less than one where neighbours read the same)."""

    along: sympy.Symbol
    tap: sympy.Symbol
    step: sympy.Rational


def windows_of(load: Load, along: Extents, taps: Extents) -> list[Window]:
    """The windows of an access, those with the taps ``taps`` that slide along ``along``; none where an index moves
    otherwise with a tap."""
    found = []
    for i in index_exprs(load):
        mine, moving = ([v for v in axes if v in i.free_symbols] for axes in (taps, along))
        if not mine or not moving:
            continue
        expanded = sympy.expand(i)
        if len(mine) != 1 or len(moving) != 1 or not expanded.coeff(mine[0]).is_Integer:
            return []
        rest = expanded - expanded.coeff(mine[0]) * mine[0]
        step = _step(rest, moving[0])
        if mine[0] in rest.free_symbols or step is None:
            return []
        found.append(Window(moving[0], mine[0], step))
    return found


def _step(place: sympy.Expr, var: sympy.Symbol) -> sympy.Rational | None:
    """How far a place moves with an axis: by whole numbers, or by one after several steps."""
    quotients = [q for q in place.atoms(FloorDiv) if var in q.free_symbols]
    if not quotients:
        step = place.coeff(var)
        return step if step.is_Integer and step > 0 and var not in (place - step * var).free_symbols else None
    (quotient, *others) = quotients
    base, by = quotient.args
    if others or place.coeff(quotient) != 1 or var in (place - quotient).free_symbols or not by.is_Integer:
        return None
    return sympy.Rational(1, int(by)) if sympy.expand(base).coeff(var) == 1 else None


def windows_along_sum(load: Load, over: Extents, taps: Extents) -> list[Window]:
    """The windows of an access that slide along what is summed ``over`` by whole numbers: taps that move it less far
    than the sum does. What moves it further tells which piece of the sum it is."""
    found = []
    for i in index_exprs(load):
        if not i.free_symbols & over.keys() or not i.free_symbols & taps.keys():
            continue
        expanded = sympy.expand(i)
        for var in (v for v in over if expanded.coeff(v).is_Integer and expanded.coeff(v) > 0):
            step = expanded.coeff(var)
            reaches = {t: expanded.coeff(t) for t in taps if expanded.coeff(t).is_Integer and expanded.coeff(t) != 0}
            mine = [t for t, reach in reaches.items() if not (step * over[var] - abs(reach)).is_nonpositive]
            if len(mine) == 1:
                found.append(Window(var, mine[0], step))
    return found
