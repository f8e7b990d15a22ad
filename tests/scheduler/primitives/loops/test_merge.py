"""merge: loop fusion of siblings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def rows(s: Schedule, last: int) -> None:
    for k in range(1, last + 1):
        s.merge("b0_i0", f"b{k}_i0")


def test_elements_pass_from_one_stage_to_the_next(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["chain"], lambda s: s.merge("b0_i0", "b1_i0"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            for b0_i0 in serial(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    t0[i0] = add(in0[i0], float32(1.0))
                with block("b1"):
                    i0 = spatial(s0, b0_i0)
                    out0[i0] = mul(t0[i0], float32(2.0))
        """)


def test_a_sum_rides_along_with_what_it_sums(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        rows(s, 3)
        s.merge("b1_r0", "b2_r0")

    s = proved(nests["softmax"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def softmax(in0: float32[s0, 12], out0: float32[s0, 12]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            t1 = local(float32[s0, 12])
            t2 = local(float32[s0])
            for b0_i0 in serial(s0):
                for b0_r0 in serial(12):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(12, b0_r0, dim=inner)
                        t0[i0] = max.update(in0[i0, r0])
                for b1_r0 in serial(12):
                    with block("b1"):
                        i0 = spatial(s0, b0_i0)
                        r0 = spatial(12, b1_r0, dim=inner)
                        t1[i0, r0] = exp(sub(in0[i0, r0], t0[i0]))
                    with block("b2"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(12, b1_r0, dim=inner)
                        t2[i0] = sum.update(t1[i0, r0])
                for b3_r0 in serial(12):
                    with block("b3"):
                        i0 = spatial(s0, b0_i0)
                        r0 = spatial(12, b3_r0, dim=inner)
                        out0[i0, r0] = div(t1[i0, r0], t2[i0])
        """)


def test_sibling_reductions_share_a_pass(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        rows(s, 1)
        s.merge("b0_r0", "b1_r0")

    s = proved(nests["siblings"], build)
    assert s.get_loops("b0") == s.get_loops("b1") == ["b0_i0", "b0_r0"]


def test_split_loops_merge_level_by_level(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for b in ("b0", "b1"):
            s.split(f"{b}_i0", [None, 4])
        s.merge("b0_i0_0", "b1_i0_0")
        s.merge("b0_i0_1", "b1_i0_1")

    s = proved(nests["chain"], build)
    assert s.get_loops("b1") == ["b0_i0_0", "b0_i0_1"]


def test_what_stands_between_goes_behind(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """b1 and b3 of the row need the sum, b2 and b4 its mean: the element-wise loops meet over the second sum."""

    def build(s: Schedule) -> None:
        rows(s, 4)
        s.merge("b2_r0", "b3_r0")

    s = proved(nests["layer_norm"], build)
    assert s.get_blocks() == ["b0", "b1", "b2", "b3", "b4"]
    with pytest.raises(ScheduleError, match="b1 stands between them"):
        s.merge("b0_r0", "b2_r0")


def test_an_unrelated_loop_is_passed(proved: Prove, parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[4]):
            t0 = local(float32[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = neg(in0[i0])
            for b1_i0 in serial(4):
                with block("b1"):
                    i0 = spatial(4, b1_i0)
                    out1[i0] = in0[i0 + 1]
            for b2_i0 in serial(6):
                with block("b2"):
                    i0 = spatial(6, b2_i0)
                    out0[i0] = exp(t0[i0])
        """)
    s = proved(nest, lambda s: s.merge("b0_i0", "b2_i0"))
    assert s.get_blocks() == ["b0", "b2", "b1"]


@pytest.mark.parametrize(
    ("nest", "last", "loops", "reason"),
    [
        ("softmax", 1, ("b0_r0", "b1_r0"), "b1 reads t0, which b0 reduces over b0_r0"),
        ("softmax", 3, ("b1_r0", "b3_r0"), "b2 stands between them"),
        ("stencil", 0, ("b0_i0", "b1_i0"), "the extents 18 and 16 differ"),
        ("lookup", 0, ("b0_i1", "b1_i1"), "b1_i1 does not stand in the same body as b0_i1"),
        ("chain", 0, ("b1_i0", "b0_i0"), "b0_i0 stands before b1_i0"),
        ("chain", 0, ("b0_i0", "b0_i0"), "does not stand in the same body"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, last: int, loops: tuple[str, str], reason: str) -> None:
    s = Schedule(nests[nest])
    rows(s, last)
    with pytest.raises(ScheduleError) as caught:
        s.merge(*loops)
    assert reason in caught.value.reason


def test_neighbours_of_an_element_are_not_there_yet(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            t0 = local(float32[7])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0 + 1] = in0[i0]
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = select(lt(index(i0, int64), int64(5)), t0[i0 + 2], float32(0.0))
        """)
    with pytest.raises(ScheduleError, match="from other iterations than those in which b0 writes it"):
        Schedule(nest).merge("b0_i0", "b1_i0")


def test_what_is_overwritten_must_have_been_read(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[6]):
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    out1[i0] = out0[5 - i0]
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = in0[i0]
        """)
    with pytest.raises(ScheduleError, match="b1 overwrites out0, which b0 uses"):
        Schedule(nest).merge("b0_i0", "b1_i0")


def test_kinds_must_agree(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["chain"])
    s.parallel("b0_i0")
    with pytest.raises(ScheduleError, match="b0_i0 is parallel, b1_i0 is serial"):
        s.merge("b0_i0", "b1_i0")
