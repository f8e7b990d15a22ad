"""The sizes of an exported function: off which dimension each is read, and what has to hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from ...codegen.export.library import Guard
from ...codegen.host.steps.step import BindSize
from ...ir.expr.symbols import Interval, interval
from ...ir.expr.value import symbol
from .errors import ExportError

_SAID = {
    sympy.Eq: "has to be", sympy.Ne: "must not be", sympy.Le: "has to be at most", sympy.Lt: "has to be less than",
    sympy.Ge: "has to be at least", sympy.Gt: "has to be more than",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SizesOf:
    """``bindings`` tell off which dimension each size of the program is read, ``symbols`` the same of the sizes that
    callers know, (input, dimension), and ``ranges`` which values those have.

    Where a dimension is a size times a number, or shifted, that dimension is what callers know.
    """

    bindings: tuple[BindSize, ...]
    symbols: Mapping[sympy.Symbol, tuple[int, int]]
    ranges: Mapping[sympy.Symbol, Interval]
    known: Mapping[sympy.Symbol, sympy.Expr]
    told: Mapping[sympy.Symbol, str]
    whole: tuple[Guard, ...] = ()

    @classmethod
    def of(
        cls,
        bindings: Sequence[BindSize],
        inputs: Mapping[str, int],
        ranges: Mapping[sympy.Symbol, Interval],
        made: Mapping[sympy.Symbol, sympy.Expr],
    ) -> SizesOf:
        """From where a program reads its sizes; ``inputs`` are the places of its tensors by name, and ``made`` what
        sizes are that it makes of others, in the order in which it does."""
        symbols, known, told, whole, seen = {}, {}, {}, [], {}
        for b in bindings:
            source = str(b.source)
            if b.dim is None or b.stride or source not in inputs:
                raise ExportError(
                    f"no dimension of an input is the size {b.symbol}; only a stride or a weight tells it"
                )
            plain = b.scale == 1 and b.shift == 0
            read = b.symbol if plain else symbol(f"{b.symbol.name}_read")
            symbols[read] = inputs[source], b.dim
            known[b.symbol] = read if plain else FloorDiv(read - b.shift, sympy.Integer(b.scale))
            low, high = ranges.get(b.symbol, (0, None))
            seen[read] = b.scale * low + b.shift, None if high is None else b.scale * high + b.shift
            told[read] = f"dimension {b.dim} of {source}"
            if b.scale != 1:
                rest = f", and {b.shift} more" if b.shift else ""
                sentence = f"{read} ({told[read]}) has to be a multiple of {b.scale}{rest}"
                whole.append(Guard(sympy.Eq(Mod(read - b.shift, sympy.Integer(b.scale)), 0), sentence))
        for size, expr in made.items():
            known[size] = expr.xreplace(known)
        return cls(tuple(bindings), symbols, seen, known, told, tuple(whole))

    def seen(self, exprs: Iterable[sympy.Expr]) -> tuple[sympy.Expr, ...]:
        """Expressions in the sizes that callers know."""
        return tuple(self._seen(e) for e in exprs)

    def _seen(self, expr: sympy.Expr) -> sympy.Expr:
        whole = {b.scale * b.symbol + b.shift: read for b, read in zip(self.bindings, self.symbols, strict=True)}
        return whole.get(expr, expr.xreplace(dict(self.known)))


def guards_of(conditions: Iterable[sympy.Basic], sizes: SizesOf) -> tuple[Guard, ...]:
    """What has to hold beside the ranges of sizes; what these say already is left out."""
    found = dict.fromkeys(c.xreplace(dict(sizes.known)) for c in conditions)
    asked = [c for c in found if c != sympy.true and not _follows(c, sizes.ranges)]
    return (*sizes.whole, *(Guard(c, _sentence(c, sizes)) for c in asked if c.free_symbols <= sizes.symbols.keys()))


def _follows(condition: sympy.Basic, ranges: Mapping[sympy.Symbol, Interval]) -> bool:
    """Whether ranges of sizes alone say so."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return False
    try:
        low, high = interval(sympy.expand(condition.lhs - condition.rhs), ranges)
    except Exception:
        return False
    match condition:
        case sympy.Ge():
            return low >= 0
        case sympy.Gt():
            return low > 0
        case sympy.Le():
            return high is not None and high <= 0
        case sympy.Lt():
            return high is not None and high < 0
        case sympy.Ne():
            return low > 0 or (high is not None and high < 0)
    return False


def _sentence(condition: sympy.Basic, sizes: SizesOf) -> str:
    names = sorted(condition.free_symbols, key=str)
    where = ", ".join(f"{s} is {sizes.told[s]}" for s in names)
    said = _SAID.get(type(condition))
    if said is None:
        return f"{condition} has to hold, where {where}"
    left, right = condition.args
    if left.is_Symbol and not right.free_symbols:
        return f"{left} ({sizes.told[left]}) {said} {right}"
    return f"{left} {said} {right}, where {where}"
