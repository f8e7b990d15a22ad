"""Conditions on one symbolic size, regions that are conjunctions of them, and the tree that says which region holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import TypeAlias

import sympy

from .symbols import Size


@dataclass(frozen=True, slots=True)
class Below:
    """``symbol < bound``."""

    symbol: sympy.Symbol
    bound: int

    def holds(self, value: int) -> bool:
        return value < self.bound

    def text(self, holds: bool = True) -> str:
        """As an expression of Python's, or of the opposite."""
        return f"{self.symbol} < {self.bound}" if holds else f"{self.symbol} >= {self.bound}"


@dataclass(frozen=True, slots=True)
class Multiple:
    """``symbol`` is a multiple of ``of``."""

    symbol: sympy.Symbol
    of: int

    def holds(self, value: int) -> bool:
        return value % self.of == 0

    def text(self, holds: bool = True) -> str:
        """As an expression of Python's, or of the opposite."""
        return f"{self.symbol} % {self.of} {'==' if holds else '!='} 0"


@dataclass(frozen=True, slots=True)
class Exactly:
    """``symbol == value``."""

    symbol: sympy.Symbol
    value: int

    def holds(self, value: int) -> bool:
        return value == self.value

    def text(self, holds: bool = True) -> str:
        """As an expression of Python's, or of the opposite."""
        return f"{self.symbol} {'==' if holds else '!='} {self.value}"


Condition: TypeAlias = Below | Multiple | Exactly


@dataclass(frozen=True, slots=True)
class SizeRegion:
    """The sizes for which each condition holds, or does not, as ``literals`` say; all sizes where there are none."""

    literals: tuple[tuple[Condition, bool], ...] = ()

    def holds(self, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether some sizes are in it."""
        return all(c.holds(values[c.symbol]) == wanted for c, wanted in self.literals)

    def having(self, condition: Condition, holds: bool) -> SizeRegion:
        """The part of it where a condition holds, or does not."""
        return SizeRegion((*self.literals, (condition, holds)))

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The sizes that it speaks of."""
        return {c.symbol for c, _ in self.literals}

    def told(self, size: Size) -> Size:
        """What a program for this region is told of a size: a typical value that it has here, the most that it is, what
        it is a multiple of, and its bounds where they leave it one number.

        Other bounds stay those of all sizes: no schedule goes by them, and kernels of several regions could not be one.
        """
        known = self.narrowed(size)
        if known.lower == known.upper:
            return known
        return replace(size, divisor=known.divisor, hint=known.hint, most=known.upper)

    def narrowed(self, size: Size) -> Size:
        """What is so of a size in this region; its typical value is one that it may have here."""
        lower, upper, divisor = size.lower, size.upper, size.divisor
        own = [(c, wanted) for c, wanted in self.literals if c.symbol == size.symbol]
        for condition, wanted in own:
            match condition, wanted:
                case Below(bound=bound), True:
                    upper = bound - 1 if upper is None else min(upper, bound - 1)
                case Below(bound=bound), False:
                    lower = max(lower, bound)
                case Multiple(of=of), True:
                    divisor = lcm(divisor, of)
                case Exactly(value=value), True:
                    lower, upper = max(lower, value), value if upper is None else min(upper, value)
        for condition, wanted in own:
            if isinstance(condition, Exactly) and not wanted:
                lower += lower == condition.value
                upper = upper - (upper == condition.value) if upper is not None else None
        lower = -(-lower // divisor) * divisor
        upper = None if upper is None else upper // divisor * divisor
        found = replace(size, lower=lower, upper=upper, divisor=divisor)
        return replace(found, hint=typical(found)) if own else found

    def value_of(self, size: Size) -> int | None:
        """The number that a size is here, where the region leaves it no other."""
        known = self.narrowed(size)
        return known.lower if known.lower == known.upper and size.symbol in self.symbols else None

    def renamed(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> SizeRegion:
        """The same of sizes that are called otherwise."""
        return SizeRegion(tuple((replace(c, symbol=names.get(c.symbol, c.symbol)), w) for c, w in self.literals))

    @property
    def text(self) -> str:
        """Its condition as one line: ``2 <= s0 < 16``; "always" where it has none."""
        return " and ".join(_lines(self)) or "always"


def _lines(region: SizeRegion) -> Iterator[str]:
    """Of each size its bounds together, then what it is a multiple of."""
    for symbol in dict.fromkeys(c.symbol for c, _ in region.literals):
        own = [(c, wanted) for c, wanted in region.literals if c.symbol == symbol]
        lower = max((c.bound for c, wanted in own if isinstance(c, Below) and not wanted), default=None)
        upper = min((c.bound for c, wanted in own if isinstance(c, Below) and wanted), default=None)
        if (only := next((c for c, wanted in own if isinstance(c, Exactly) and wanted), None)) is not None:
            yield only.text()
            continue
        if lower is not None and upper is not None:
            yield f"{symbol} == {lower}" if upper == lower + 1 else f"{lower} <= {symbol} < {upper}"
        elif upper is not None:
            yield Below(symbol, upper).text()
        elif lower is not None:
            yield Below(symbol, lower).text(holds=False)
        for c, wanted in own:
            told = isinstance(c, Exactly) and (lower is None or c.value >= lower) and (upper is None or c.value < upper)
            if told or isinstance(c, Multiple):
                yield c.text(wanted)


# A region without an upper bound is typically so many times as large as its least size; a size of which nothing is
# known is as large as kernels expect it.
OPEN, USUAL = 8, 64


def typical(size: Size) -> int:
    """A value in the middle of a size's range, by ratios; that which it has, where that is in the range. Where there is
    no upper bound, not the least ones: who comes with those comes with larger ones."""
    lower, upper, hint, step = size.lower, size.upper, size.hint, size.divisor
    if upper is not None:
        if hint is not None and lower <= hint <= upper and hint % step == 0:
            return hint
        middle = 1 << round((max(lower, 1) * max(upper, 1)).bit_length() / 2 - 0.5)
    else:
        middle = max(lower * OPEN, USUAL, hint or 0)
    middle = max(middle // step * step, lower)
    return middle if upper is None else min(middle, upper)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The region of a number holds."""

    number: int


@dataclass(frozen=True, slots=True)
class Fork:
    """``yes`` is asked where a condition holds, ``no`` where it does not."""

    condition: Condition
    yes: Tree
    no: Tree


Tree: TypeAlias = Leaf | Fork


def regions_of(tree: Tree) -> tuple[SizeRegion, ...]:
    """The regions of a tree by their numbers, which are those of its leaves from the left."""
    found: dict[int, SizeRegion] = {}

    def walk(part: Tree, region: SizeRegion) -> None:
        match part:
            case Leaf(number):
                assert number not in found, f"two leaves have the number {number}"
                found[number] = region
            case Fork(condition, yes, no):
                walk(yes, region.having(condition, True))
                walk(no, region.having(condition, False))

    walk(tree, SizeRegion())
    assert [*found] == [*range(len(found))], f"leaves are numbered {[*found]}"
    return tuple(found.values())


def number_at(tree: Tree, values: Mapping[sympy.Symbol, int]) -> int:
    """The number of the region that some sizes are in."""
    while isinstance(tree, Fork):
        tree = tree.yes if tree.condition.holds(values[tree.condition.symbol]) else tree.no
    return tree.number


def at_cuts(symbol: sympy.Symbol, cuts: tuple[int, ...]) -> Tree:
    """Regions of one size: below the first cut, from each cut to the next, from the last on. The tree is even, so that
    few comparisons tell."""

    def among(first: int, last: int) -> Tree:
        if first == last:
            return Leaf(first)
        middle = (first + last) // 2
        return Fork(Below(symbol, cuts[middle]), among(first, middle), among(middle + 1, last))

    assert [*cuts] == sorted(set(cuts)), f"cuts are in no order: {cuts}"
    return among(0, len(cuts))


# Nothing is known of any size.
ANYWHERE = SizeRegion()
