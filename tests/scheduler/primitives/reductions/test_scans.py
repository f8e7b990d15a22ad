"""What primitives make of a scan: an order that is kept, lanes and copies that hand one state on, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]

TEXT = """
@nest(outputs=["out0"])
def running(in0: float32[6, 20], in1: float32[6, 20], out0: float32[6, 20]):
    t0 = local(float32[6, 20])
    t1_state = local(float32[6])
    t1 = local(float32[6, 20])
    for b0_i0 in serial(6):
        for b0_r0 in serial(20):
            with block("b0"):
                i0 = spatial(6, b0_i0)
                r0 = spatial(20, b0_r0)
                t0[i0, r0] = exp(in0[i0, r0])
    for b1_i0 in serial(6):
        for b1_r0 in serial(20):
            with block("b1"):
                i0 = spatial(6, b1_i0)
                r0 = scan(20, b1_r0)
                t1_state[i0] = sum.update(t0[i0, r0])
                t1[i0, r0] = t1_state[i0]
    for b2_i0 in serial(6):
        for b2_r0 in serial(20):
            with block("b2"):
                i0 = spatial(6, b2_i0)
                r0 = spatial(20, b2_r0)
                out0[i0, r0] = mul(t1[i0, r0], in1[i0, r0])
"""


@pytest.fixture
def running(parsed: Parse) -> LoopNest:
    return parsed(TEXT)


def merged(s: Schedule) -> None:
    s.merge("b0_i0", "b1_i0")
    s.merge("b0_r0", "b1_r0")
    s.merge("b0_i0", "b2_i0")
    s.merge("b0_r0", "b2_r0")


def test_what_is_made_before_and_after_shares_its_loops(running: LoopNest, proved: Prove) -> None:
    s = proved(running, merged)
    assert {tuple(s.get_loops(b)) for b in s.get_blocks()} == {("b0_i0", "b0_r0")}


def test_lanes_and_copies_along_it(running: LoopNest, proved: Prove) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        _, copies, lanes = s.split("b0_r0", [None, 2, 3])
        s.vectorize(lanes)
        s.unroll(copies)
        s.parallel("b0_i0")

    proved(running, build)


def test_rows_go_inside(running: LoopNest, proved: Prove) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        outer, lanes = s.split("b0_i0", [None, 4])
        s.reorder(outer, "b0_r0", lanes)
        s.vectorize(lanes)

    proved(running, build)


def test_its_loops_keep_their_order(running: LoopNest) -> None:
    s = Schedule(running)
    outer, inner = s.split("b1_r0", [None, 4])
    with pytest.raises(ScheduleError, match=f"b1 scans along {outer}, {inner} in that order"):
        s.reorder(inner, outer)


def test_no_team_along_it(running: LoopNest) -> None:
    s = Schedule(running)
    s.reorder("b1_r0", "b1_i0")
    with pytest.raises(ScheduleError, match="b1 reduces over it"):
        s.parallel("b1_r0")


def test_a_tile_holds_its_neighbours(running: LoopNest, proved: Prove) -> None:
    """So that no loop along it stands inside."""
    s = Schedule(running)
    outer, _ = s.split("b1_r0", [4, None])
    with pytest.raises(ScheduleError, match="b1 scans along loops inside it too"):
        s.bind(outer, "threadIdx.x")

    def build(s: Schedule) -> None:
        merged(s)
        _, lanes = s.split("b0_r0", [None, 8])
        s.bind(lanes, "threadIdx.x")
        s.bind("b0_i0", "blockIdx.x")

    proved(running, build)


def test_the_state_is_whole_only_after_its_loop(parsed: Parse) -> None:
    s = Schedule(parsed(TEXT.replace("mul(t1[i0, r0], in1[i0, r0])", "mul(t1_state[i0], in1[i0, r0])")))
    s.merge("b1_i0", "b2_i0")
    with pytest.raises(ScheduleError, match="b2 reads t1_state, which b1 reduces over b1_r0"):
        s.merge("b1_r0", "b2_r0")


def test_it_is_not_cut_joined_or_computed_elsewhere(running: LoopNest) -> None:
    s = Schedule(running)
    with pytest.raises(ScheduleError, match="each of its elements needs all before it"):
        s.compute_at("b1", "b2_r0")
    outer, _ = s.split("b1_r0", [None, 4])
    with pytest.raises(ScheduleError):
        s.rfactor(outer)
    with pytest.raises(ScheduleError):
        s.decompose_reduction("b1", "b1_i0")
    with pytest.raises(ScheduleError):
        s.compute_inline("b1")


def test_two_of_them_stay_two_blocks(parsed: Parse) -> None:
    again = TEXT.replace("t1", "t2").replace("b1", "b3").replace('"b2"', '"b4"').replace("b2_", "b4_")
    start, end = again.index("    for b3_i0"), again.index("    for b4_i0")
    own = "    t2_state = local(float32[6])\n    t2 = local(float32[6, 20])\n"
    text = TEXT.replace("    t1_state =", own + "    t1_state =", 1)
    s = Schedule(parsed(text.replace("    for b2_i0", again[start:end] + "    for b2_i0", 1)))
    s.merge("b1_i0", "b3_i0")
    s.merge("b1_r0", "b3_r0")
    with pytest.raises(ScheduleError, match="b1 is a scan"):
        s.fuse_reductions("b1", "b3")
