"""pack: operands through copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]

PRODUCT = """
    @nest(outputs=["out0"])
    def product(in0: bfloat16[s0, 4], in1: float32[s1, 4], out0: float32[s0, s1]):
        s0 = size(lower=1)
        s1 = size(lower=1)
        for b0_i0 in serial(s0):
            for b0_i1 in serial(s1):
                for b0_r0 in serial(4):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(s1, b0_i1)
                        r0 = reduction(4, b0_r0)
                        out0[i0, i1] = sum.update(mul(mul(cast(in0[i0, r0], float32), float32(0.5)), in1[i1, r0]))
    """


def test_a_transposed_copy_of_the_converted_operand(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.pack("b0", "in0", ["r0", "i0"]) == "b0_in0"

    s = proved(parsed(PRODUCT), build)
    assert s.get_blocks() == ["b0_in0", "b0"]
    assert s.get_loops("b0_in0") == ["b0_in0_r0", "b0_in0_i0"]
    assert [str(e) for e in s.nest.buffer("in0_packed").shape] == ["4", "s0"]
    assert {ld.buffer for ld in s.block("b0").reads} == {"in0_packed", "in1"}
    assert s.nest.buffer("in0_packed").dtype.value == "float32"


def test_the_part_that_an_iteration_needs(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        outer, _ = s.split("b0_i0", [None, 4])
        copy = s.pack("b0", "in0", ["r0", "i0"])
        s.compute_at(copy, outer)
        s.pack("b0", "in1", ["i1", "r0"])
        s.parallel(outer)

    s = proved(parsed(PRODUCT), build)
    assert s.get_loops("b0_in0")[0] == "b0_i0_0" and len(s.get_loops("b0_in0")) == 3


@pytest.mark.parametrize(
    ("buffer", "order", "reason"),
    [
        ("in0", ["i0"], "in0 is read along i0, r0"),
        ("in0", ["i0", "r0", "i1"], "in0 is read along i0, r0"),
        ("out0", ["i0", "i1"], "out0 is no input of the nest"),
        ("in9", ["i0"], "in9 is no input of the nest"),
    ],
)
def test_refusals(parsed: Parse, buffer: str, order: list[str], reason: str) -> None:
    s = Schedule(parsed(PRODUCT))
    with pytest.raises(ScheduleError) as caught:
        s.pack("b0", buffer, order)
    assert caught.value.reason == reason
    assert not s.trace.steps


def test_two_ways_to_read_it(parsed: Parse) -> None:
    s = Schedule(parsed(PRODUCT.replace("in1[i1, r0]", "mul(in1[i1, r0], cast(in0[i0, 0], float32))")))
    with pytest.raises(ScheduleError, match="it reads in0 in 2 ways"):
        s.pack("b0", "in0", ["r0", "i0"])


def test_what_a_condition_keeps_in_range_is_not_read_for_all(parsed: Callable[[str], LoopNest]) -> None:
    text = """
        @nest(outputs=["out0"])
        def padded(in0: float32[{extent}], in1: float32[8], out0: float32[8]):
            for i in serial(8):
                with block("b0"):
                    a = spatial(8, i)
                    out0[a] = select(lt(index(a, int64), int64(6)), in0[a], in1[a])
        """
    with pytest.raises(ScheduleError, match="read where a condition holds, and elsewhere perhaps out of range"):
        Schedule(parsed(text.format(extent=6))).pack("b0", "in0", ["a"])
    Schedule(parsed(text.format(extent=8))).pack("b0", "in0", ["a"])
