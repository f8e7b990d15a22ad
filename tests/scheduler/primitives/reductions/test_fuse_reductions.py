"""fuse_reductions: two reductions, one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def merged(s: Schedule) -> None:
    s.merge("b0_i0", "b1_i0")
    s.merge("b0_r0", "b1_r0")


def test_siblings(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        s.fuse_reductions("b0", "b1")

    s = proved(nests["siblings"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0", "out1"])
        def siblings(in0: float32[s0, 6], out0: float32[s0], out1: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                for b0_r0 in serial(6):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(6, b0_r0, dim=inner)
                        out0[i0] = sum.update(in0[i0, r0])
                        out1[i0] = max.update(in0[i0, r0])
        """)


def test_what_comes_after_is_done_to_both(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        _, lane = s.split("b0_r0", [None, 4])
        s.fuse_reductions("b0", "b1")
        s.vectorize(lane)
        s.decompose_reduction("b0", "b0_r0_0")
        s.parallel("b0_i0")

    s = proved(nests["siblings"], build)
    assert [w.buffer for w in s.block("b0_init").writes] == ["out0", "out1"]


def test_axes_by_other_names_and_in_another_order(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6, 5], in1: float32[5, 6], out0: float32[6], out1: float32[6]):
            for i in serial(6):
                for k in serial(5):
                    with block("b0"):
                        i0 = spatial(6, i)
                        r0 = reduction(5, k, dim=inner)
                        out0[i0] = sum.update(in0[i0, r0])
                    with block("b1"):
                        red = reduction(5, k)
                        row = spatial(6, i)
                        out1[row] = min.update(mul(in1[red, row], cast(index(red, int64), float32)))
        """)
    s = proved(nest, lambda s: s.fuse_reductions("b0", "b1"))
    assert len(s.block("b0").body) == 2 and len(s.block("b0").axes) == 2


def test_what_stands_between(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1", "out2"])
        def f(in0: float32[6, 5], out0: float32[6], out1: float32[6], out2: float32[6, 5]):
            t0 = local(float32[6, 5])
            for i in serial(6):
                for k in serial(5):
                    with block("b0"):
                        i0 = spatial(6, i)
                        r0 = reduction(5, k, dim=inner)
                        out0[i0] = sum.update(in0[i0, r0])
                    with block("b1"):
                        i0 = spatial(6, i)
                        i1 = spatial(5, k)
                        t0[i0, i1] = neg(in0[i0, i1])
                    with block("b2"):
                        i0 = spatial(6, i)
                        r0 = reduction(5, k, dim=inner)
                        out1[i0] = sum.update(t0[i0, r0])
                    with block("b3"):
                        i0 = spatial(6, i)
                        i1 = spatial(5, k)
                        out2[i0, i1] = t0[i0, i1]
        """)
    with pytest.raises(ScheduleError, match="b2 reads t0, which b1 uses"):
        Schedule(nest).fuse_reductions("b0", "b2")

    def build(s: Schedule) -> None:
        s.compute_inline("b1")
        s.fuse_reductions("b0", "b2")

    proved(nest, build)


@pytest.mark.parametrize(
    ("nest", "first", "second", "reason"),
    [
        ("softmax", "b0", "b2", "b2 does not stand in the same loop as b0"),
        ("softmax", "b0", "b1", "b1 is no reduction"),
        ("softmax", "b0", "b0", "the two are one block"),
        ("softmax", "b0", "b8", "there is no block b8"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, first: str, second: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).fuse_reductions(first, second)
    assert caught.value.reason == reason


def test_order_axes_and_bounds(nests: Mapping[str, LoopNest], parsed: Parse) -> None:
    s = Schedule(nests["siblings"])
    merged(s)
    with pytest.raises(ScheduleError, match="b0 stands before b1") as caught:
        s.fuse_reductions("b1", "b0")
    assert str(caught.value).splitlines()[-1] == "hint: fuse_reductions(b0, b1)"
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6, 5], out0: float32[6], out1: float32[5]):
            for i in serial(6):
                for k in serial(5):
                    with block("b0"):
                        i0 = spatial(6, i)
                        r0 = reduction(5, k, dim=inner)
                        out0[i0] = sum.update(in0[i0, r0])
                    with block("b1"):
                        i0 = spatial(5, k)
                        r0 = reduction(6, i, dim=inner)
                        out1[i0] = sum.update(in0[r0, i0])
        """)
    with pytest.raises(ScheduleError, match="b0 has no spatial axis like i0 of b1"):
        Schedule(nest).fuse_reductions("b0", "b1")
