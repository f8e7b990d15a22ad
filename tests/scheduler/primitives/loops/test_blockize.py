"""blockize: units that later primitives do not enter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Build, Prove = Callable[[Schedule], None], Callable[..., Schedule]


def tiled(s: Schedule) -> None:
    s.split("b0_i0", [None, 4])
    s.split("b0_i1", [None, 4])
    s.reorder("b0_i0_0", "b0_i1_0", "b0_i0_1", "b0_i1_1")
    s.blockize("b0_i0_1")


def test_the_loops_outside_are_free(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        tiled(s)
        s.reorder("b0_i1_0", "b0_i0_0")
        s.parallel(s.fuse("b0_i1_0", "b0_i0_0"))
        s.annotate("b0", "operands", "float16")

    s = proved(nests["transpose"], build)
    assert s.loop("b0_i0_1").annotations == (("unit", True),)
    assert s.loop("b0_i1_0_b0_i0_0").kind is LoopKind.PARALLEL


@pytest.mark.parametrize(
    "enter",
    [
        lambda s: s.split("b0_i1_1", [2, 2]),
        lambda s: s.vectorize("b0_i1_1"),
        lambda s: s.reorder("b0_i1_1", "b0_i0_1"),
        lambda s: s.fuse("b0_i1_0", "b0_i0_1"),
        lambda s: s.reorder("b0_i0_1", "b0_i1_0"),
    ],
)
def test_inside_nothing_changes(nests: Mapping[str, LoopNest], enter: Build) -> None:
    s = Schedule(nests["transpose"])
    tiled(s)
    before = s.nest
    with pytest.raises(ScheduleError, match="it would change what is inside the unit b0_i0_1") as caught:
        enter(s)
    assert s.nest is before
    lines = str(caught.value).splitlines()
    at = next(k for k, line in enumerate(lines) if line.endswith("^ here"))
    assert lines[at - 1].strip().startswith("for b0_i0_1 in serial(4") and lines[-1] == "hint: do it before blockize"


def test_no_block_comes_in_and_none_goes(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["chain"])
    s.split("b1_i0", [None, 4])
    s.blockize("b1_i0_1")
    for step in (lambda: s.compute_at("b0", "b1_i0_1"), lambda: s.compute_inline("b0")):
        with pytest.raises(ScheduleError, match="it would change what is inside the unit b1_i0_1"):
            step()
    s.compute_at("b0", "b1_i0_0")


def test_units_do_not_nest(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["transpose"])
    tiled(s)
    for loop, reason in (("b0_i1_0", "the loop b0_i0_1 is a unit"), ("b0_i1_1", "the loop b0_i0_1 is a unit"),
                         ("b0_i0_1", "it is one already")):  # fmt: skip
        with pytest.raises(ScheduleError, match=reason):
            s.blockize(loop)


def test_a_tile_has_no_holes(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["plane"])
    s.split("b0_i0", [None, 4])
    s.reorder("b0_i0_1", "b0_i0_0")
    with pytest.raises(ScheduleError, match="b0 does not cover a dense tile of its axis i0"):
        s.blockize("b0_i0_0")
