"""Regions of sizes: exactly those are proved that cover every size once, and trees are such by construction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from torch_mlc.ir.expr.size_regions import (
    Below,
    Condition,
    Exactly,
    Fork,
    Leaf,
    Multiple,
    SizeRegion,
    Tree,
    at_cuts,
    number_at,
    regions_of,
)
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.scheduler.regions.proof import RegionError, classes_of, prove

S, T = symbol("s0"), symbol("s1")
# Sizes that are tried one by one are below these; conditions speak of none beyond.
REACH, MOST = 14, 60


def conditions(symbols: Sequence[sympy.Symbol]) -> st.SearchStrategy[Condition]:
    one = st.sampled_from(symbols)
    return st.one_of(
        st.builds(Below, one, st.integers(0, REACH)),
        st.builds(Exactly, one, st.integers(0, REACH)),
        st.builds(Multiple, one, st.integers(2, 5)),
    )


def trees(symbols: Sequence[sympy.Symbol]) -> st.SearchStrategy[Tree]:
    shapes = st.recursive(st.just(Leaf(0)), lambda part: st.builds(Fork, conditions(symbols), part, part), max_leaves=7)
    return shapes.map(_numbered)


def _numbered(tree: Tree) -> Tree:
    numbers = iter(range(100))

    def walk(part: Tree) -> Tree:
        if isinstance(part, Leaf):
            return Leaf(next(numbers))
        yes = walk(part.yes)
        return Fork(part.condition, yes, walk(part.no))

    return walk(tree)


def sizes(lower: int, upper: int | None, divisor: int = 1) -> SymbolTable:
    return SymbolTable(tuple(Size(s, lower, upper, divisor) for s in (S, T)))


def values_of(table: SymbolTable) -> list[dict[sympy.Symbol, int]]:
    """Every combination of sizes, as far as they are tried."""
    ranges = [
        [n for n in range(s.lower, (MOST if s.upper is None else s.upper) + 1) if n % s.divisor == 0]
        for s in table.sizes
    ]
    return [dict(zip((s.symbol for s in table.sizes), row, strict=True)) for row in product(*ranges)]


@given(trees((S,)), st.sampled_from([(0, None), (2, None), (1, 40), (3, 9)]), st.sampled_from([1, 2, 6]))
def test_trees_cover_every_size_once_and_say_which_region(tree: Tree, bounds: tuple[int, int | None], by: int) -> None:
    table, regions = SymbolTable((Size(S, *bounds, by),)), regions_of(tree)
    proof = prove(regions, table)
    for values in values_of(table):
        assert [k for k, r in enumerate(regions) if r.holds(values)] == [number_at(tree, values)]
    members = [c.member for _, classes in proof.classes for c in classes]
    assert list(proof.region_of) == [number_at(tree, {S: m}) for m in members] or not members


@given(trees((S, T)))
def test_trees_of_two_sizes_are_proved(tree: Tree) -> None:
    table, regions = sizes(0, 12), regions_of(tree)
    prove(regions, table)
    assert all(sum(r.holds(v) for r in regions) == 1 for v in values_of(table))


@given(trees((S,)), st.data())
def test_what_is_no_partition_is_found_and_what_is_one_is_proved(tree: Tree, data: st.DataObject) -> None:
    """Regions with one of them changed: the proof says what trying every size says."""
    regions = list(regions_of(tree))
    place = data.draw(st.integers(0, len(regions) - 1))
    literals = list(regions[place].literals)
    if literals and data.draw(st.booleans()):
        k = data.draw(st.integers(0, len(literals) - 1))
        literals[k] = (data.draw(conditions((S,))), literals[k][1])
        regions[place] = SizeRegion(tuple(literals))
    else:
        del regions[place]
    table = SymbolTable((Size(S, 0, MOST),))
    right = all(sum(r.holds(v) for r in regions) == 1 for v in values_of(table))
    if right:
        prove(regions, table)
    else:
        with pytest.raises(RegionError):
            prove(regions, table)


@pytest.mark.parametrize(
    "wrong",
    [
        ((Below(S, 16), True), (Below(S, 17), False)),  # 16 is in none
        ((Below(S, 17), True), (Below(S, 16), False)),  # 16 is in both
        ((Below(S, 16), True), (Below(S, 15), True)),
    ],
)
def test_an_error_names_a_size(wrong: tuple[tuple[Condition, bool], ...]) -> None:
    with pytest.raises(RegionError, match=r"s0 = \d+ is in .*each size has to be in exactly one region"):
        prove([SizeRegion((literal,)) for literal in wrong], SymbolTable((Size(S, 1),)))


def test_a_condition_on_a_size_that_nobody_gives_is_refused() -> None:
    with pytest.raises(RegionError, match="s1, which the graph is not given"):
        prove([SizeRegion(((Below(T, 3), True),)), SizeRegion(((Below(T, 3), False),))], SymbolTable((Size(S),)))


def test_too_many_residues_are_refused() -> None:
    asked = [Multiple(S, p) for p in (67, 71, 73)]
    with pytest.raises(RegionError, match="come together every"):
        list(classes_of(Size(S), asked))


def test_the_proof_reads_as_one_line() -> None:
    tree = Fork(Exactly(S, 1), Leaf(0), Fork(Below(S, 16), Leaf(1), Fork(Multiple(S, 8), Leaf(2), Leaf(3))))
    regions = regions_of(tree)
    assert [r.text for r in regions] == [
        "s0 == 1", "s0 < 16 and s0 != 1", "s0 >= 16 and s0 % 8 == 0", "s0 >= 16 and s0 % 8 != 0"
    ]  # fmt: skip
    told = prove(regions, SymbolTable((Size(S, 1),))).text
    assert told == (
        "proof: s0 is in 1 not % 8, 2..15 not % 8, 2..15 % 8, 16.. % 8, 16.. not % 8; no condition tells sizes of a "
        "class apart; each of 5 classes is in exactly one region"
    )


@given(trees((S,)), st.sampled_from([(0, None), (2, None), (1, 40)]))
def test_what_is_told_of_a_size_in_a_region_is_so(tree: Tree, bounds: tuple[int, int | None]) -> None:
    size = Size(S, *bounds, 1, 20)
    for region in regions_of(tree):
        inside = [v[S] for v in values_of(SymbolTable((size,))) if region.holds(v)]
        for known in (region.narrowed(size), region.told(size)):
            assert all(known.lower <= v and (known.upper is None or v <= known.upper) for v in inside)
            assert all(v % known.divisor == 0 for v in inside)
        only = region.value_of(size)
        assert only is None or set(inside) <= {only}


def test_typical_sizes_lie_in_their_region() -> None:
    for hint in (None, 5, 64, 1000):
        for region in regions_of(at_cuts(S, (2, 16, 256))):
            size = Size(S, 1, None, 1, hint)
            assert region.holds({S: region.narrowed(size).hint or -1}), region.text
