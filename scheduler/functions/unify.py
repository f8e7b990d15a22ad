"""Functions that agree but for constants in their extents and strides: one function of further sizes.

The rotation of queries and that of keys differ in the number of heads, and so in strides that are multiples of it.
Where each constant that differs is a multiple of a few numbers, these are sizes that a call passes. Functions of rows,
as the products of one vector with several matrices, may differ in how many rows they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.symbols import Size, SymbolTable
from ...ir.expr.value import is_value, symbol
from ...ir.function.function import TensorFunction
from ...ir.nest.loops import Buffer
from .scalars import is_elementwise

# Numbers that may differ from one function to the other beyond what their sizes are already.
MOST = 2
# Divisors beyond a vector of any machine tell schedules nothing more.
_LARGEST_DIVISOR = 64
_ANY = symbol("any_constant")


@dataclass(frozen=True, slots=True)
class Unified:
    """One function for several, and for each of these the values of the sizes that it has more than they."""

    function: TensorFunction
    values: tuple[tuple[int, ...], ...]


def has_rows(function: TensorFunction) -> bool:
    """Whether a function reduces, and each of its rows by itself and whole."""
    stages = function.stages
    reduces = any(s.monoid is not None for s in stages) and bool(function.rows) and bool(function.inner)
    return reduces and not function.extra and all(s.axes is None and s.over is None and not s.scan for s in stages)


def skeleton(function: TensorFunction) -> TensorFunction | None:
    """What functions must have in common to be one: all but extents and strides. None for one with reductions other
    than of rows."""
    if not (is_elementwise(function) or has_rows(function)):
        return None
    if function.table or any(o.buffer in function.inputs for o in function.outputs):
        return None
    return with_constants(function, [_ANY] * len(constants_of(function)))


def unify(functions: Sequence[TensorFunction], *, any_vectors: bool = False) -> Unified | None:
    """Functions of one skeleton as one; None where their constants are not multiples of few numbers, or rows differ in
    length, but for sums of columns. With ``any_vectors`` the caller knows that vectors are the same in all."""
    first = functions[0]
    if not any_vectors and not _have_one_vector(functions):
        return None
    rows = [constants_of(f) for f in functions]
    known: dict[tuple[int, ...], sympy.Symbol] = {}
    merged: list[sympy.Expr] = []
    for k, value in enumerate(rows[0]):
        found = _common([row[k] for row in rows], value, known, len(first.symbols.sizes))
        if found is None:
            return None
        merged.append(found)
    sizes = tuple(
        Size(s, min(base), max(base), _divisor(base), max(base)) for base, s in known.items()
    )  # fmt: skip
    table = SymbolTable((*first.symbols.sizes, *sizes))
    values = tuple(tuple(base[n] for base in known) for n in range(len(functions)))
    return Unified(replace(with_constants(first, merged), symbols=table), values)


def reads_columns(function: TensorFunction) -> bool:
    """Whether elements that lie side by side belong to rows side by side, so that no register holds a whole row."""
    if not has_rows(function):
        return False
    arrays, along = {b.name: b for b in function.inputs}, function.rows[-1].var
    loads = [e for e in function.loads if e.buffer in arrays]
    over = {d.var for d in function.inner}
    steps = [sympy.expand(arrays[e.buffer].offset(e.indices)) for e in loads if not any(map(is_value, e.indices))]
    inner = [s for s in steps if not over.isdisjoint(s.free_symbols)]
    return len(steps) == len(loads) and bool(inner) and all(s.coeff(along) == 1 for s in inner)


def _have_one_vector(functions: Sequence[TensorFunction]) -> bool:
    """Whether vectors and registers are the same in all: those run along the last dimension, and these hold a row.
    Where columns are summed vectors run along the columns, and need not know more than that they end nowhere within."""
    if len({f.inner for f in functions}) == 1:
        return len({f.dims[-1].extent for f in functions if f.dims}) <= 1
    columns = [f.rows[-1].extent for f in functions if reads_columns(f)]
    if len(columns) < len(functions):
        return False
    return len(set(columns)) == 1 or all(n.is_Integer and int(n) % _LARGEST_DIVISOR == 0 and n > 0 for n in columns)


@dataclass(slots=True)
class Families:
    """Functions sorted into families, whose nodes are one function where constants are sizes."""

    known: dict[TensorFunction, list[list[TensorFunction]]] = field(default_factory=dict)

    def find(self, function: TensorFunction) -> TensorFunction | None:
        """The first node of the family of a function, which joins it; None for one that is of none."""
        form = skeleton(function)
        if form is None:
            return None
        families = self.known.setdefault(form, [])
        for family in families:
            if function in family:
                return family[0]
            if unify([*family, function]) is not None:
                family.append(function)
                return family[0]
        families.append([function])
        return function


def _common(
    values: list[sympy.Expr], first: sympy.Expr, known: dict[tuple[int, ...], sympy.Symbol], taken: int
) -> sympy.Expr | None:
    """What all of the values are in terms of numbers that differ; ``known`` are those, with the sizes that they are."""
    if all(v == first for v in values):
        return first
    if any(v == 0 for v in values):
        return None
    if all(v.is_Integer for v in values):
        numbers = tuple(map(int, values))
        common = math.gcd(*numbers)
        return _multiple(tuple(n // common for n in numbers), sympy.Integer(common), known, taken)
    ratios = [sympy.cancel(v / first) for v in values]
    if not all(r.is_Rational for r in ratios):
        return None
    scale = math.lcm(*(int(r.q) for r in ratios))
    base = tuple(int(r * scale) for r in ratios)
    common = math.gcd(*base)
    base = tuple(b // common for b in base)
    rest = sympy.cancel(first / base[0])
    return None if rest.as_numer_denom()[1] != 1 else _multiple(base, rest, known, taken)


def _multiple(
    base: tuple[int, ...], rest: sympy.Expr, known: dict[tuple[int, ...], sympy.Symbol], taken: int
) -> sympy.Expr | None:
    """``rest`` times the numbers ``base``, which become a size where they are none yet."""
    if any(b < 1 for b in base):
        return None
    if base not in known:
        if len(known) == MOST:
            return None
        known[base] = symbol(f"s{taken + len(known)}")
    return sympy.expand(rest * known[base])


def _divisor(base: tuple[int, ...]) -> int:
    common = math.gcd(*base)
    return min(common & -common, _LARGEST_DIVISOR)


def constants_of(function: TensorFunction) -> list[sympy.Expr]:
    """Extents, shapes and strides, in a fixed order."""
    found = [d.extent for d in (*function.rows, *function.inner)]
    for b in (*function.inputs, *(o.buffer for o in function.outputs)):
        found += [*b.shape, *b.strides]
    return found


def with_constants(function: TensorFunction, constants: Sequence[sympy.Expr]) -> TensorFunction:
    """A function with other extents, shapes and strides, in the order of ``constants_of``."""
    rest = iter(constants)

    def buffer(b: Buffer) -> Buffer:
        return replace(b, shape=tuple(next(rest) for _ in b.shape), strides=tuple(next(rest) for _ in b.strides))

    return replace(
        function,
        rows=tuple(replace(d, extent=next(rest)) for d in function.rows),
        inner=tuple(replace(d, extent=next(rest)) for d in function.inner),
        inputs=tuple(buffer(b) for b in function.inputs),
        outputs=tuple(replace(o, buffer=buffer(o.buffer)) for o in function.outputs),
    )


__all__ = [
    "Families", "Unified", "constants_of", "has_rows", "reads_columns", "skeleton", "unify", "with_constants",
]  # fmt: skip
