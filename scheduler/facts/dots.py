"""Products whose operands are whole numbers of a byte, and lie in memory as instructions that add them up want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from ...ir.expr.codes import Codes, chosen, codes_of
from ...ir.expr.product import factors
from ...ir.expr.value import Expr, Load, free_symbols, is_value, loads
from ...ir.graph.graph import TensorType

# The neighbours of a lane, and the fewest lanes that any instruction has.
_DEPTH, _LANES = 4, 4


def codes_in(value: Expr, along: sympy.Symbol) -> Codes | None:
    """The factor of an operand that is a byte less a constant and varies along the sum; None where there is none, or
    several."""
    found = [c for f in factors(value) if (c := codes_of(f)) is not None and along in free_symbols(c.value)]
    return found[0] if len(found) == 1 else None


def lies_in_words(
    codes: Codes, column: sympy.Symbol, along: sympy.Symbol, types: Mapping[str, TensorType]
) -> bool:  # fmt: skip
    """Whether four neighbours along the sum are a word, and the words of neighbouring columns lie beside each other."""
    places = [_place(codes.value, {along: k, column: lane}, types) for lane in range(_LANES) for k in range(_DEPTH)]
    first = places[0]
    return first is not None and all(p is not None and p - first == n for n, p in enumerate(places))


def _place(value: Expr, at: Mapping[sympy.Symbol, int], types: Mapping[str, TensorType]) -> int | None:
    """Where the one byte lies that a value reads at a position; None where it reads none, or several."""
    known = {var: sympy.Integer(k) for var, k in at.items()}
    found = {p for ld in loads(chosen(value, known)) for p in [_offset(ld, known, types[ld.buffer].strides)]}
    return found.pop() if len(found) == 1 else None


def _offset(ld: Load, at: Mapping[sympy.Symbol, sympy.Expr], strides: Sequence[sympy.Expr]) -> int | None:
    if any(is_value(i) for i in ld.indices):
        return None
    total = sympy.Add(*(i.xreplace(at) * s for i, s in zip(ld.indices, strides, strict=True)))  # type: ignore[union-attr]
    return int(total) if total.is_Integer else None
