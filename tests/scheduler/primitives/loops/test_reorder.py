"""reorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_two_loops_change_places(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["column_sum"], lambda s: s.reorder("b0_r0", "b0_i0"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def column_sum(in0: float32[s0, 6], out0: float32[6]):
            s0 = size(lower=1)
            for b0_r0 in serial(s0):
                for b0_i0 in serial(6):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        r0 = reduction(s0, b0_r0, dim=inner)
                        out0[i0] = sum.update(in0[r0, i0])
        """)


def test_loops_that_are_not_named_keep_their_places(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        i, j = s.split("b0_i0", [None, 5])
        k, m = s.split("b0_i1", [None, 4])
        s.reorder(m, i)
        assert s.get_loops("b0") == [m, j, k, i]

    proved(nests["transpose"], build)


def test_the_same_order_changes_nothing(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["transpose"])
    s.reorder("b0_i0", "b0_i1")
    assert s.nest is nests["transpose"]


def test_reduction_loops_change_places(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Equal elements: the index of the first must win in any order."""
    proved(nests["argmax"], lambda s: s.reorder("b0_r1", "b0_r0"))


def test_several_blocks_on_the_same_element(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.merge("b0_i0", "b1_i0")
        o, i = s.split("b0_i0", [None, 4])
        s.reorder(i, o)

    proved(nests["chain"], build)


def merged_rows(s: Schedule) -> None:
    for k in (1, 2, 3):
        s.merge("b0_i0", f"b{k}_i0")


def test_a_stencil_in_one_loop_keeps_its_order(nests: Mapping[str, LoopNest]) -> None:
    """Each iteration makes six elements for the next stage; the last two of them are the next iteration's too."""
    s = Schedule(nests["stencil"])
    o, i = s.split("b1_i0", [None, 4])
    s.compute_at("b0", o)
    a, b = s.split(o, [None, 2])
    s.reorder(b, a)
    assert s.get_loops("b1") == [b, a, i]


@pytest.mark.parametrize(
    ("nest", "prepare", "loops", "reason"),
    [
        ("transpose", None, ["b0_i0", "b0_i0"], "named twice"),
        ("chain", None, ["b1_i0", "b0_i0"], "the body of b1_i0 is more than one loop"),
        ("softmax", merged_rows, ["b0_r0", "b0_i0"], "the body of b0_i0 is more than one loop"),
        ("transpose", lambda s: s.vectorize("b0_i1"), ["b0_i1", "b0_i0"], "which is vectorized"),
        ("transpose", lambda s: s.parallel("b0_i0"), ["b0_i1", "b0_i0"], "a team of threads runs outermost loops"),
    ],
)
def test_refusals(
    nests: Mapping[str, LoopNest],
    nest: str,
    prepare: Callable[[Schedule], None] | None,
    loops: list[str],
    reason: str,
) -> None:
    s = Schedule(nests[nest])
    if prepare:
        prepare(s)
    before = s.nest
    with pytest.raises(ScheduleError) as caught:
        s.reorder(*loops)
    assert reason in caught.value.reason
    assert s.nest is before


def test_a_loop_that_carries_a_reduction_and_an_axis_stays(nests: Mapping[str, LoopNest]) -> None:
    """Otherwise the first element of a reduction, which begins it, would no longer come first."""
    s = Schedule(nests["column_sum"])
    s.split("b0_r0", [None, 3])
    both = s.fuse("b0_i0", "b0_r0_0")
    o, i = s.split(both, [None, 4])
    with pytest.raises(ScheduleError, match="carries a reduction of b0 and another axis"):
        s.reorder(i, o)


def test_no_loops_are_refused(nests: Mapping[str, LoopNest]) -> None:
    with pytest.raises(ScheduleError, match="no loops were given"):
        Schedule(nests["plane"]).reorder()
