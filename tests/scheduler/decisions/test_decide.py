"""Asking for decisions: the cost model's answer stands unless somebody chose otherwise, and all of it is recorded."""

from __future__ import annotations

import pytest

from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.decisions import (
    Alternative,
    ChosenFor,
    Decider,
    DecisionError,
    DecisionOverrides,
    parse_overrides,
)
from torch_mlc.scheduler.decisions.decide import flipped, table

WAYS = (Alternative("loops", 2000.0), Alternative("library", 3000.0))


def asked(decider: Decider | None, key: str = "k", at: str = "x", default: str = "loops") -> str:
    context = PassContext(decider=decider)
    return context.decide("product", lambda: key, WAYS, default, at=at, nbytes=1024, reason="why")


def test_without_anybody_the_default_stands_and_no_key_is_computed() -> None:
    def never() -> str:
        raise AssertionError("a key takes time")

    assert PassContext().decide("product", never, WAYS, "loops") == "loops"


def test_who_chose_goes_from_hand_to_search_to_record() -> None:
    library, loops = (parse_overrides({"product:k": way}) for way in ("library", "loops"))
    for decider, chosen, source in (
        (Decider(), "loops", ChosenFor.COST),
        (Decider(library, loops, loops), "library", ChosenFor.OVERRIDE),
        (Decider(measured=library, recorded=loops), "library", ChosenFor.MEASURED),
        (Decider(recorded=library), "library", ChosenFor.RECORDED),
    ):
        assert asked(decider) == chosen
        (record,) = decider.records
        assert (record.chosen, record.source, record.default) == (chosen, source, "loops")
        assert record.is_flipped is (chosen == "library")


def test_a_way_that_is_not_there_is_an_error_by_hand_and_passed_over_in_a_record() -> None:
    odd = parse_overrides({"product:k": "magic"})
    with pytest.raises(DecisionError, match="decision product:k has no way 'magic'; there are loops, library"):
        asked(Decider(odd))
    assert asked(Decider(recorded=odd)) == "loops"


def test_places_that_are_alike_are_one_entry() -> None:
    decider = Decider(parse_overrides({"product:other": "loops"}))
    for at in ("x", "y", "x"):
        asked(decider, at=at)
    (record,) = decider.records
    assert record.at == ("x", "y") and record.bytes == 2048 and record.nanoseconds == 4000.0
    assert [*flipped(record)] == [("library", 2000.0)]
    assert decider.unused == ("product:other",)


def test_overrides_are_plain_and_equal_ones_have_equal_texts() -> None:
    given = {"split:b": "whole", "product:a": "loops"}
    one, other = parse_overrides(given), parse_overrides(dict(reversed(given.items())))
    assert one == other and repr(one) == repr(other) and one.plain() == dict(sorted(given.items()))
    assert str(one) == "product:a=loops, split:b=whole" and not DecisionOverrides() and one
    assert one.having({("split", "b"): "split"}).chosen == {("product", "a"): "loops", ("split", "b"): "split"}
    for wrong in ({"product": "loops"}, {":a": "loops"}, {"product:": "loops"}, {"product:a": 3}):
        with pytest.raises(DecisionError, match="is no decision: give kind:key"):
            parse_overrides(wrong)  # type: ignore[arg-type]


def test_the_table_has_what_is_at_stake_first() -> None:
    decider = Decider(parse_overrides({"product:cd34": "library"}))
    asked(decider, "ab12", "x")
    asked(decider, "cd34", "y")
    asked(decider, "cd34", "z")
    context = PassContext(decider=decider)
    ways = (Alternative("split"), Alternative("whole"))
    context.decide("split", lambda: "ef56", ways, "split", at="s", nbytes=20 << 20)
    assert "\n".join(table(decider.records)) == TABLE
    assert table(decider.records, 1)[-1] == "… and 2 more" and table(()) == []


TABLE = """\
     time      bytes  places  decision      chosen   others
        ?     20 MiB       1  split:ef56    split    whole
   6.0 us     2048 B       2  product:cd34  library  loops (0.67x) (by hand; loops by cost)
   2.0 us     1024 B       1  product:ab12  loops    library (1.50x)"""
