"""Which regions of a size get a program of their own: neighbours share one unless either loses too much by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...ir.expr.size_regions import Condition, Exactly, Fork, Leaf, Multiple, Tree, at_cuts, regions_of
from ...ir.expr.symbols import Size
from ..cost.regions import CUTS, MOST_VARIANTS, pays
from .proof import classes_of

# The decision, and the way in which there is one program.
REGIONS, ONE = "regions", "one"
# Sizes between which is looked where one program takes over: each is larger than the last by such a part.
STEP = 6
# Nanoseconds of the program of a number at a size.
TimeAt = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where one size is cut: a region begins at each of ``bounds``; numbers in ``alone`` have a region each; and in the
    region of the largest sizes multiples of ``divisor`` are told from the others."""

    bounds: tuple[int, ...] = CUTS
    alone: tuple[int, ...] = (1,)
    divisor: int = 1

    def __str__(self) -> str:
        told = [*(f"={n}" for n in self.alone), *map(str, self.bounds)]
        return ",".join([*told, f"%{self.divisor}"] if self.divisor > 1 else told) or ONE


def tree_of(size: Size, cuts: Cuts) -> Tree:
    """The regions of a size that some cuts make, the smallest sizes first, without those that no size is in. Raises
    RegionError where it cannot be told whether one is empty."""
    bounds = tuple(b for b in cuts.bounds if b > size.lower and (size.upper is None or b <= size.upper))
    tree: Tree = at_cuts(size.symbol, bounds)
    for value in sorted(cuts.alone, reverse=True):
        regions = regions_of(tree)
        number = next((k for k, r in enumerate(regions) if r.holds({size.symbol: value})), None)
        if number is not None:
            tree = _parted(tree, number, size, Exactly(size.symbol, value))
    if cuts.divisor > 1:
        tree = _parted(tree, len(regions_of(tree)) - 1, size, Multiple(size.symbol, cuts.divisor))
    return tree


def _parted(tree: Tree, number: int, size: Size, condition: Condition) -> Tree:
    """The tree with one region in two, where neither is empty."""
    region = regions_of(tree)[number]
    members = [c.member for c in classes_of(size, [*(c for c, _ in region.literals), condition])]
    inside = [condition.holds(m) for m in members if region.holds({size.symbol: m})]
    if all(inside) or not any(inside):
        return tree
    return _numbered(_replaced(tree, number, Fork(condition, Leaf(-1), Leaf(-1))))


def _replaced(tree: Tree, number: int, part: Tree) -> Tree:
    match tree:
        case Leaf(own):
            return part if own == number else tree
        case Fork(condition, yes, no):
            return Fork(condition, _replaced(yes, number, part), _replaced(no, number, part))


def _numbered(tree: Tree) -> Tree:
    """The tree with its leaves numbered from the left."""
    numbers = iter(range(1 << 16))

    def walk(part: Tree) -> Tree:
        match part:
            case Leaf():
                return Leaf(next(numbers))
            case Fork(condition, yes, no):
                first = walk(yes)
                return Fork(condition, first, walk(no))

    return walk(tree)


@dataclass(frozen=True, slots=True)
class RegionGroup:
    """Neighbouring regions, from ``first`` to before ``end``, that share the program made for ``home``."""

    first: int
    end: int
    home: int


def grouped(
    sizes: Sequence[int], time_at: TimeAt, least: float, preferred: int | None = None, most: int = MOST_VARIANTS
) -> tuple[RegionGroup, ...]:
    """Neighbouring regions together, as few groups as there may be without a loss that a program would be worth.

    ``sizes`` are the typical sizes of the regions, in order; each has a program of its number, which ``time_at`` asks
    about. All regions begin alone. Two neighbouring groups become one, with the program of either, where that loses
    least; until what is left would lose too much, and there are ``most`` groups at most. The ``preferred`` program is
    taken where another is not faster by so much that it counts. A program has to spare ``least`` nanoseconds.
    """
    groups = [RegionGroup(k, k + 1, k) for k in range(len(sizes))]
    own = [time_at(k, size) for k, size in enumerate(sizes)]
    while True:
        best: tuple[bool, bool, float, int, RegionGroup] | None = None
        for k, (one, other) in enumerate(pairwise(groups)):
            for home in (one.home, other.home):
                times = [time_at(home, sizes[i]) for i in range(one.first, other.end)]
                before = own[one.first : other.end]
                costs = any(pays(a, b, least) for a, b in zip(before, times, strict=True))
                loss = max(b / a if a else 1.0 for a, b in zip(before, times, strict=True))
                lacks = not costs and preferred in (one.home, other.home) and home != preferred
                found = costs, lacks, loss, k, RegionGroup(one.first, other.end, home)
                best = found if best is None or found[:4] < best[:4] else best
        if best is None or (best[0] and len(groups) <= most):
            return tuple(groups)
        groups[best[3] : best[3] + 2] = [best[4]]


def crossing(first: int, second: int, low: int, high: int, time_at: TimeAt, least: float) -> int:
    """Where between two sizes the program ``second`` is no slower any more than counts: one that was made for larger
    sizes loses less between them than one made for smaller sizes. A multiple of 4, or an end."""
    size = low
    while size < high:
        if not pays(time_at(first, size), time_at(second, size), least):
            return size
        size = (size + max(size // STEP, 1) + 3) // 4 * 4
    return high


def cuts_of(
    size: Size, cuts: Cuts, groups: Sequence[RegionGroup], sizes: Sequence[int], time_at: TimeAt, least: float
) -> Cuts:
    """The cuts between groups of the regions that some cuts make: where one program becomes faster than the other."""
    regions = regions_of(tree_of(size, cuts))
    alone, bounds = [], []
    for before, group in pairwise(groups):
        value = regions[before.first].value_of(size)
        if before.end == before.first + 1 and value in cuts.alone and value is not None:
            alone.append(value)
        else:
            low, high = sizes[before.end - 1] + 1, max(sizes[group.first], regions[group.first].narrowed(size).lower)
            bounds.append(crossing(before.home, group.home, low, high, time_at, least))
    return Cuts(tuple(sorted(set(bounds))), tuple(alone))


__all__ = ["ONE", "REGIONS", "Cuts", "RegionGroup", "TimeAt", "crossing", "cuts_of", "grouped", "tree_of"]
