"""The proof that regions cover all sizes that there may be, and that no two of them overlap.

Conditions compare a size with a constant, or ask what it is a multiple of. So the sizes of one symbol fall into
finitely many classes that no condition tells apart: ranges between bounds, parted by what their members are multiples
of. One member of each class stands for the class, and one of each combination of classes for all sizes in it. The
regions are right where every one of these is in exactly one region. This is a proof, not a test: nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

import sympy

from ...ir.errors import MlcError
from ...ir.expr.size_regions import Below, Condition, Exactly, Multiple, SizeRegion
from ...ir.expr.symbols import Size, SymbolTable

# Combinations of classes that a proof looks at, and numbers that show what a size may be a multiple of: of more,
# nothing is proved.
MOST_CASES, MOST_RESIDUES = 4096, 1 << 12


class RegionError(MlcError):
    """Regions do not cover all sizes, or overlap, or cannot be shown to do neither; the text has such a size."""


@dataclass(frozen=True, slots=True)
class Class:
    """Sizes that no condition tells apart: ``member`` is the least of them, ``text`` says which they are."""

    member: int
    text: str


@dataclass(frozen=True, slots=True)
class Proof:
    """That each size is in exactly one of some regions: the classes of each symbol, and which region has which
    combination of them."""

    classes: tuple[tuple[sympy.Symbol, tuple[Class, ...]], ...]
    region_of: tuple[int, ...]

    @property
    def text(self) -> str:
        """The proof in one line."""
        if not self.classes:
            return "proof: there is one region, without a condition"
        told = "; ".join(f"{s} is in {', '.join(c.text for c in classes)}" for s, classes in self.classes)
        cases = f"{len(self.region_of)} {'classes' if len(self.classes) == 1 else 'combinations of classes'}"
        return f"proof: {told}; no condition tells sizes of a class apart; each of {cases} is in exactly one region"


def prove(regions: Sequence[SizeRegion], sizes: SymbolTable) -> Proof:
    """The proof for the ranges of some sizes.

    Raises:
        RegionError: a size is in no region, or in two; or there are too many cases to look at.
    """
    symbols = [s for s in sizes.sizes if any(s.symbol in r.symbols for r in regions)]
    unknown = {s for r in regions for s in r.symbols} - {s.symbol for s in symbols}
    if unknown:
        raise RegionError(f"conditions speak of {', '.join(sorted(map(str, unknown)))}, which the graph is not given")
    conditions = dict.fromkeys(c for r in regions for c, _ in r.literals)
    classes = [tuple(classes_of(s, [c for c in conditions if c.symbol == s.symbol])) for s in symbols]
    cases = [*product(*classes)]
    if len(cases) > MOST_CASES:
        raise RegionError(f"{len(cases)} combinations of sizes are to be looked at, {MOST_CASES} at most are")
    region_of = []
    for case in cases:
        values = {s.symbol: c.member for s, c in zip(symbols, case, strict=True)}
        found = [k for k, r in enumerate(regions) if r.holds(values)]
        if len(found) != 1:
            at = ", ".join(f"{s} = {v}" for s, v in values.items())
            told = "no region" if not found else " and ".join(f"({regions[k].text})" for k in found)
            raise RegionError(f"{at} is in {told}; each size has to be in exactly one region")
        region_of.append(found[0])
    return Proof(tuple((s.symbol, c) for s, c in zip(symbols, classes, strict=True)), tuple(region_of))


def classes_of(size: Size, conditions: Sequence[Condition]) -> Iterator[Class]:
    """The classes of one size that some conditions on it tell apart, none of them empty. Raises RegionError."""
    divisors = sorted({c.of for c in conditions if isinstance(c, Multiple)})
    cycle = lcm(size.divisor, *divisors)
    if cycle > MOST_RESIDUES * size.divisor:
        raise RegionError(f"multiples of {', '.join(map(str, divisors))} come together every {cycle} numbers only")
    end = None if size.upper is None else size.upper + 1
    bounds = {c.bound for c in conditions if isinstance(c, Below)}
    bounds |= {n for c in conditions if isinstance(c, Exactly) for n in (c.value, c.value + 1)}
    inside = sorted(b for b in bounds if b > size.lower and (end is None or b < end))
    for first, last in pairwise([size.lower, *inside, end]):
        assert first is not None
        seen: set[tuple[bool, ...]] = set()
        begin = -(-first // size.divisor) * size.divisor
        stop = begin + cycle if last is None else min(begin + cycle, last)
        for value in range(begin, stop, size.divisor):
            kind = tuple(value % d == 0 for d in divisors)
            if kind not in seen:
                seen.add(kind)
                yield Class(value, _told(first, last, divisors, kind))


def _told(first: int, last: int | None, divisors: Sequence[int], kind: Sequence[bool]) -> str:
    span = f"{first}.." if last is None else str(first) if last == first + 1 else f"{first}..{last - 1}"
    told = [f"{'' if is_multiple else 'not '}% {d}" for d, is_multiple in zip(divisors, kind, strict=True)]
    return f"{span} {' '.join(told)}".rstrip()
