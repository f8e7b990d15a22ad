"""Which regions get a program of their own, by the times of programs at sizes."""

from __future__ import annotations

import pytest

from torch_mlc.ir.expr.size_regions import regions_of
from torch_mlc.ir.expr.symbols import Size
from torch_mlc.ir.expr.value import symbol
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.cost.regions import LEAST_SAVED, pays
from torch_mlc.scheduler.regions.choose import Cuts, RegionGroup, TimeAt, crossing, cuts_of, grouped, tree_of

S = symbol("s0")


def texts(size: Size, cuts: Cuts) -> list[str]:
    return [r.text for r in regions_of(tree_of(size, cuts))]


def test_regions_that_no_size_is_in_are_left_out() -> None:
    cuts = Cuts((16, 256), (1,), 8)
    assert texts(Size(S, 2), cuts) == [
        "s0 < 16", "16 <= s0 < 256", "s0 >= 256 and s0 % 8 == 0", "s0 >= 256 and s0 % 8 != 0"
    ]  # fmt: skip
    assert texts(Size(S, 1), cuts)[:2] == ["s0 == 1", "s0 < 16 and s0 != 1"]
    assert texts(Size(S, 20, 100), cuts) == ["s0 % 8 == 0", "s0 % 8 != 0"]
    assert texts(Size(S, 20, 100, 8), cuts) == ["always"]
    assert texts(Size(S, 1, 1), cuts) == ["always"]


def test_a_program_pays_by_share_and_by_what_it_saves() -> None:
    assert pays(1e5, 1e5 + LEAST_SAVED, LEAST_SAVED) and not pays(1e5, 1e5 + LEAST_SAVED - 1, LEAST_SAVED)
    assert not pays(1e9, 1.02e9, LEAST_SAVED)


def times(first_per_row: float, second_per_row: float, start: float) -> TimeAt:
    """Two programs: one begins at once and takes long for each row, the other begins late."""
    return lambda number, size: size * first_per_row if number == 0 else start + size * second_per_row


def test_neighbours_share_where_neither_loses_what_a_program_is_worth() -> None:
    assert grouped([4, 64, 1024], lambda number, size: 1e6 * size, LEAST_SAVED) == (RegionGroup(0, 3, 0),)
    slow = times(1e5, 1e4, 5e5)
    assert grouped([1, 64, 1024], slow, LEAST_SAVED) == (RegionGroup(0, 1, 0), RegionGroup(1, 3, 1))
    assert grouped([1, 64, 1024], slow, LEAST_SAVED, preferred=2) == (RegionGroup(0, 1, 0), RegionGroup(1, 3, 2))


def test_no_more_groups_than_there_may_be() -> None:
    def own_is_best(number: int, size: int) -> float:
        return 1e6 * (1 + abs(number - size))

    assert len(grouped([0, 1, 2, 3, 4, 5], own_is_best, LEAST_SAVED, most=3)) == 3
    assert len(grouped([0, 1, 2, 3, 4, 5], own_is_best, LEAST_SAVED, most=6)) == 6


def test_a_cut_lies_where_the_program_for_larger_sizes_is_no_slower() -> None:
    slow = times(1e5, 1e4, 9e5)  # as fast at 10 rows
    at = crossing(0, 1, 2, 64, slow, LEAST_SAVED)
    assert 8 <= at <= 12
    assert crossing(0, 1, 2, 6, slow, LEAST_SAVED) == 6
    cuts, size = Cuts((16, 256), (1,)), Size(S, 1)
    groups = (RegionGroup(0, 1, 0), RegionGroup(1, 2, 1), RegionGroup(2, 4, 2))
    found = cuts_of(size, cuts, groups, [1, 4, 64, 2048], lambda n, s: slow(n - 1, s), LEAST_SAVED)
    assert found.alone == (1,) and len(found.bounds) == 1 and 8 <= found.bounds[0] <= 12
    assert len(regions_of(tree_of(size, found))) == len(groups)


@pytest.mark.parametrize("given", ["=1,16,%8", "16", "=1", "2,16,256"])
def test_cuts_read_as_they_are_given(given: str) -> None:
    chosen = Options.resolve(None, {"regions": given}, {}).regions
    assert str(chosen) == given
    assert Options.resolve(None, {"regions": given.split(",")}, {}).regions == chosen
