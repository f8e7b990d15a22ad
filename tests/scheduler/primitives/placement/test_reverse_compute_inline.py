"""reverse_compute_inline: a reader goes into its producer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_the_producer_keeps_its_loops(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        s.parallel("b0_i0")
        s.reverse_compute_inline("b1")

    s = proved(nests["chain"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in parallel(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    out0[i0] = mul(add(in0[i0], float32(1.0)), float32(2.0))
        """)


def test_tails_of_the_producer_stay(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        _, lane = s.split("b0_i0", [None, 8])
        s.vectorize(lane)
        s.split("b1_i0", [None, 3])
        s.reverse_compute_inline("b1")

    s = proved(nests["chain"], build)
    assert s.get_loops("b0") == ["b0_i0_0", "b0_i0_1"] and s.loop("b0_i0_1").kind is LoopKind.VECTORIZED


def test_axes_in_another_order(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6, s0], in1: float32[s0], out0: float32[s0, 6], out1: float32[6, s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(6):
                for b0_i1 in serial(s0):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        i1 = spatial(s0, b0_i1)
                        out1[i0, i1] = neg(in0[i0, i1])
            for b1_i0 in serial(s0):
                for b1_i1 in serial(6):
                    with block("b1"):
                        i0 = spatial(s0, b1_i0)
                        i1 = spatial(6, b1_i1)
                        out0[i0, i1] = add(out1[i1, i0], mul(in1[i0], cast(index(i0 + 2*i1, int64), float32)))
        """)
    s = proved(nest, lambda s: s.reverse_compute_inline("b1"))
    assert [str(w) for w in s.block("b0").writes[1].indices] == ["i1", "i0"]


def test_a_half_type_rounds_on_the_way(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            t0 = local(bfloat16[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = cast(div(in0[i0], float32(3.0)), bfloat16)
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = cast(t0[i0], float32)
        """)
    proved(nest, lambda s: s.reverse_compute_inline("b1"))


def test_a_finished_sum_through_its_copy(nests: Mapping[str, LoopNest], parsed: Parse, proved: Prove) -> None:
    nest = parsed(
        """
        @nest(outputs=["out0"])
        def f(in0: float32[s0, 6], out0: float32[s0]):
            s0 = size(lower=1)
            t0 = global(float32[s0])
            for b0_i0 in serial(s0):
                for b0_r0 in serial(6):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(6, b0_r0)
                        t0[i0] = sum.update(in0[i0, r0])
            for b1_i0 in serial(s0):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    out0[i0] = exp(t0[i0])
        """.replace("t0 = global(float32[s0])", "t0 = local(float32[s0])")
    )

    def build(s: Schedule) -> None:
        with pytest.raises(ScheduleError, match="b0 is a reduction, whose value is not finished"):
            s.reverse_compute_inline("b1")
        s.cache_write("b0", "t0")
        s.reverse_compute_at("t0_local", "b0_i0")
        s.reverse_compute_inline("b1")

    s = proved(nest, build)
    assert s.get_blocks() == ["b0", "t0_local"] and "t0" not in s.nest.buffers


@pytest.mark.parametrize(
    ("nest", "block", "reason"),
    [
        ("softmax", "b0", "it is a reduction"),
        ("pointwise", "b0", "it reads nothing that the nest makes"),
        ("stencil", "b1", "its axis i0 is not the one at which b0 writes t0"),
        ("lookup", "b1", "it reads t0 at other places than b0 writes"),
        ("softmax", "b1", "b0 is a reduction"),
        ("layer_norm", "b2", "it reads nothing of b1 at its axis r0"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, block: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).reverse_compute_inline(block)
    assert reason in caught.value.reason
    assert any(line.strip().startswith("^") and line.endswith("^ here") for line in str(caught.value).splitlines())


def test_what_else_it_reads_comes_later(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            t0 = local(float32[6])
            t1 = local(float32[1])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = exp(in0[i0])
            for b1_r0 in serial(6):
                with block("b1"):
                    r0 = reduction(6, b1_r0)
                    t1[0] = sum.update(t0[r0])
            for b2_i0 in serial(6):
                with block("b2"):
                    i0 = spatial(6, b2_i0)
                    out0[i0] = div(t1[0], t0[i0])
        """)
    with pytest.raises(ScheduleError, match="b1 is a reduction"):
        Schedule(nest).reverse_compute_inline("b2")
