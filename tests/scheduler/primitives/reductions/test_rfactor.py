"""rfactor: partial results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_partial_results_and_their_combination(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.rfactor("b0_r1") == "b0_rf"

    s = proved(nests["argmax"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0", "out1"])
        def argmax(in0: tensor(float32, [5, 7], strides=[9, 1]), out0: tensor(float32, []), out1: tensor(int64, [])):
            out0_rf = local(float32[7])
            out1_rf = local(int64[7])
            for b0_r0 in serial(5):
                for b0_r1 in serial(7):
                    with block("b0_rf"):
                        rf = spatial(7, b0_r1, dim=inner)
                        rf_0 = reduction(5, b0_r0, dim=inner)
                        (out0_rf[rf], out1_rf[rf]) = argmax.update(in0[rf_0, rf], index(rf + 7*rf_0, int64))
            for b0_r1_c in serial(7):
                with block("b0"):
                    rf = reduction(7, b0_r1_c, dim=inner)
                    (out0[()], out1[()]) = argmax.update(out0_rf[rf], out1_rf[rf])
        """)


def test_pieces_of_a_column_side_by_side(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """The usual split reduction: a team over pieces, each summed on its own, then the pieces together."""

    def build(s: Schedule) -> None:
        piece, rest = s.split("b0_r0", [4, None])
        partial = s.rfactor(piece)
        s.reorder(piece, rest, "b0_i0")
        s.set_scope("out0_rf", "global")
        s.parallel(piece)
        s.parallel(s.get_loops("b0")[0])
        assert s.get_loops(partial) == [piece, rest, "b0_i0"]

    proved(nests["column_sum"], build)


def test_lanes_that_a_tail_leaves_empty(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """With fewer elements than lanes, a lane's result is the identity and not what memory held."""

    def build(s: Schedule) -> None:
        _, lane = s.split("b0_r0", [None, 8])
        s.rfactor(lane)
        s.vectorize(lane)

    s = proved(nests["column_sum"], build)
    assert not s.block("b0_rf").predicate


def test_once_more(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        _, b, c = s.split("b0_r0", [None, 2, 3])
        assert s.rfactor(c) == "b0_rf"
        assert s.rfactor(b) == "b0_rf_rf"
        s.rfactor(s.get_loops("b0")[-1])

    s = proved(nests["column_sum"], build)
    assert len(s.get_blocks()) == 4


def test_every_element_a_partial_result(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    proved(nests["column_sum"], lambda s: s.rfactor("b0_r0"))


def test_in_the_row_of_other_stages(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for k in (1, 2, 3):
            s.merge("b0_i0", f"b{k}_i0")
        _, lane = s.split("b2_r0", [None, 8])
        s.rfactor(lane)

    s = proved(nests["softmax"], build)
    assert s.get_blocks() == ["b0", "b1", "b2_rf", "b2", "b3"]
    assert s.get_loops("b2")[0] == "b0_i0"


def test_the_pieces_can_be_bound(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.rfactor("b0_r1")
        s.reorder("b0_r1", "b0_r0")
        s.parallel("b0_r1")

    s = proved(nests["argmax"], build)
    assert s.loop("b0_r1").kind is LoopKind.PARALLEL


@pytest.mark.parametrize(
    ("nest", "loop", "reason"),
    [
        ("column_sum", "b0_i0", "b0 does not reduce over it"),
        ("chain", "b0_i0", "exactly one reduction must be inside the loop"),
        ("column_sum", "r0", "there is no loop r0"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, loop: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).rfactor(loop)
    assert reason in caught.value.reason


def test_a_loop_of_both_kinds_is_refused(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["column_sum"])
    both = s.fuse("b0_i0", "b0_r0")
    with pytest.raises(ScheduleError, match="carries the reduction and another axis at once"):
        s.rfactor(both)


def test_a_loop_with_other_blocks_is_refused(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["siblings"])
    s.merge("b0_i0", "b1_i0")
    s.merge("b0_r0", "b1_r0")
    with pytest.raises(ScheduleError, match="exactly one reduction must be inside the loop"):
        s.rfactor("b0_r0")
