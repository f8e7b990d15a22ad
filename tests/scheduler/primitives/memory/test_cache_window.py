"""cache_window: what sliding windows read, through a copy of each place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]

WINDOW = """
    @nest(outputs=["out0"])
    def window(in0: float32[3, {width}], in1: float32[3, 3], out0: float32[3, s0]):
        s0 = size(lower=1, hint=6)
        for b0_i0 in serial(3):
            for b0_i1 in serial(s0):
                for b0_r0 in serial(3):
                    with block("b0"):
                        i0 = spatial(3, b0_i0)
                        i1 = spatial(s0, b0_i1)
                        r0 = reduction(3, b0_r0)
                        out0[i0, i1] = sum.update(mul({read}, in1[i0, r0]))
    """
PADDED = """select(logical_and(ge(index(2 * i1 + r0 - 1, int64), int64(0)),
           lt(index(2 * i1 + r0 - 1, int64), index(2 * s0, int64))), exp(in0[i0, 2 * i1 + r0 - 1]), float32(0.0))"""


def text(read: str, width: str = "2 * s0") -> str:
    return WINDOW.format(read=" ".join(read.split()), width=width)


def test_a_padded_window_of_what_is_computed(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.cache_window("b0", "in0", ["i0", "i1"]) == "b0_in0"

    s = proved(parsed(text(PADDED)), build)
    assert s.get_blocks() == ["b0_in0", "b0"]
    assert [str(e) for e in s.nest.buffer("in0_window").shape] == ["3", "2*s0 + 1"]
    assert "select" not in str(s.block("b0").body).lower() and {ld.buffer for ld in s.block("b0").reads} == {
        "in0_window", "in1",
    }  # fmt: skip


def test_the_part_that_an_iteration_needs(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        tile, _ = s.split("b0_i1", [None, 4])
        s.compute_at(s.cache_window("b0", "in0", ["i0", "i1"]), tile)
        s.unroll("b0_r0")

    s = proved(parsed(text(PADDED)), build)
    assert s.extent(s.get_loops("b0_in0")[-1]) == 9


def test_windows_that_run_backwards(proved: Prove, parsed: Parse) -> None:
    read = "in0[i0, i1 - r0 + 2]"
    s = proved(parsed(text(read, "s0 + 2")), lambda s: s.cache_window("b0", "in0", ["i1", "i0"]))
    assert [str(e) for e in s.nest.buffer("in0_window").shape] == ["s0 + 2", "3"]


def test_two_parts_of_one_sum_are_no_window(parsed: Parse) -> None:
    s = Schedule(parsed(text("mul(in0[i0, i1 + r0], in0[i0, i1 + 2 * r0])", "s0 + 4")))
    with pytest.raises(ScheduleError, match="it reads in0 in several ways"):
        s.cache_window("b0", "in0", ["i0", "i1"])


@pytest.mark.parametrize(
    ("read", "order", "reason"),
    [
        ("in0[i0, i1 + r0]", ["i0"], "the dimensions of the copy are i1 + r0, i0"),
        ("in0[i0, i1 + r0]", ["i1", "r0"], "the dimensions of the copy are i1 + r0, i0"),
        ("in0[i0, i1]", ["i0", "i1"], "in0 is not read at a sum of axes alone"),
        ("in0[i0, (i1 + r0) % 3 + i1]", ["i0", "i1"], "in0 is not read at a sum of axes alone"),
    ],
)
def test_refusals(parsed: Parse, read: str, order: list[str], reason: str) -> None:
    s = Schedule(parsed(text(read, "s0 + 2")))
    with pytest.raises(ScheduleError) as caught:
        s.cache_window("b0", "in0", order)
    assert caught.value.reason == reason
    assert not s.trace.steps


def test_what_a_condition_outside_keeps_in_range_is_not_read_for_all(parsed: Parse) -> None:
    guarded = "select(lt(index(i1, int64), int64(2)), mul(in0[i0, i1 + r0], in1[i0, r0]), float32(0.0))"
    with pytest.raises(ScheduleError, match="elsewhere perhaps out of range"):
        Schedule(parsed(text(guarded, "4"))).cache_window("b0", "in0", ["i0", "i1"])
    Schedule(parsed(text(guarded, "s0 + 2"))).cache_window("b0", "in0", ["i0", "i1"])
