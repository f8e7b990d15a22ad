"""reverse_compute_at: a reader moves to its producers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_all_stages_of_a_row_come_to_the_first(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        o, i = s.split("b0_i0", [None, 4])
        s.parallel(o)
        for b in ("b1", "b2", "b3"):
            s.reverse_compute_at(b, i)

    s = proved(nests["softmax"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def softmax(in0: float32[s0, 12], out0: float32[s0, 12]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            t1 = local(float32[s0, 12])
            t2 = local(float32[s0])
            for b0_i0_0 in parallel((s0 + 3) // 4):
                for b0_i0_1 in serial(4):
                    for b0_r0 in serial(12):
                        with block("b0"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0)
                            r0 = reduction(12, b0_r0, dim=inner)
                            where(b0_i0_1 + 4*b0_i0_0 < s0)
                            t0[i0] = max.update(in0[i0, r0])
                    for b1_r0 in serial(12):
                        with block("b1"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0)
                            r0 = spatial(12, b1_r0, dim=inner)
                            where(b0_i0_1 + 4*b0_i0_0 < s0)
                            t1[i0, r0] = exp(sub(in0[i0, r0], t0[i0]))
                    for b2_r0 in serial(12):
                        with block("b2"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0)
                            r0 = reduction(12, b2_r0, dim=inner)
                            where(b0_i0_1 + 4*b0_i0_0 < s0)
                            t2[i0] = sum.update(t1[i0, r0])
                    for b3_r0 in serial(12):
                        with block("b3"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0)
                            r0 = spatial(12, b3_r0, dim=inner)
                            where(b0_i0_1 + 4*b0_i0_0 < s0)
                            out0[i0, r0] = div(t1[i0, r0], t2[i0])
        """)


def test_a_sum_under_the_loop_of_its_elements(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """The reduction then runs over the loops of its producer, tail included."""

    def build(s: Schedule) -> None:
        _, i = s.split("b1_r0", [None, 5])
        s.reverse_compute_at("b2", i)

    s = proved(nests["softmax"], build)
    assert s.get_loops("b2") == s.get_loops("b1") == ["b1_i0", "b1_r0_0", "b1_r0_1"]
    assert s.block("b2").predicate == s.block("b1").predicate


def test_a_tile_of_what_a_tile_makes(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        o, _ = s.split("b0_i0", [None, 4])
        s.reverse_compute_at("b1", o)

    s = proved(nests["chain"], build)
    assert s.get_loops("b1") == ["b0_i0_0", "b1_i0"] and s.extent("b1_i0") == 4


def test_loops_of_its_own_keep_their_kinds(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for k in (1, 2):
            s.reverse_compute_at(f"b{k}", "b0_i0")
        s.vectorize(s.split("b3_r0", [None, 8])[1])
        s.reverse_compute_at("b3", "b0_i0")

    s = proved(nests["softmax"], build)
    assert s.get_loops("b3") == ["b0_i0", "b3_r0_0", "b3_r0_1"]
    assert s.loop("b3_r0_1").kind is LoopKind.VECTORIZED


def test_unit_loops_remain_if_asked(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["chain"], lambda s: s.reverse_compute_at("b1", "b0_i0", preserve_unit_loops=True))
    assert s.get_loops("b1") == ["b0_i0", "b1_i0"] and s.extent("b1_i0") == 1


@pytest.mark.parametrize(
    ("nest", "block", "loop", "reason"),
    [
        ("softmax", "b1", "b0_r0", "it would be computed again in each iteration of b0_r0"),
        ("softmax", "b3", "b0_i0", "it reads nothing that is made in that loop"),
        ("softmax", "b2", "b0_i0", "it reads nothing that is made in that loop"),
        ("softmax", "b3", "b1_i0", "it would come before b2 and has to stay after it"),
        ("softmax", "b0", "b0_i0", "it is inside that loop already"),
        ("softmax", "b0", "b3_i0", "it reads nothing that is made in that loop"),
        ("stencil", "b1", "b0_i0", "it reads t0 at another part of axis i0 than is made there"),
        ("lookup", "b1", "b0_i0", "it would be computed again in each iteration of b0_i0"),
        ("lookup", "b1", "b0_i1", "it would be computed again in each iteration of b0_i0"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, block: str, loop: str, reason: str) -> None:
    s = Schedule(nests[nest])
    with pytest.raises(ScheduleError) as caught:
        s.reverse_compute_at(block, loop)
    assert reason in caught.value.reason and s.nest is nests[nest]


def test_a_partial_sum_is_not_read(nests: Mapping[str, LoopNest]) -> None:
    """The row's maximum is complete only behind the loop that looks for it."""
    s = Schedule(nests["softmax"])
    s.split("b0_r0", [None, 4])
    s.reorder("b0_r0_0", "b0_i0", "b0_r0_1")
    with pytest.raises(ScheduleError, match="computed again in each iteration of b0_r0_0"):
        s.reverse_compute_at("b1", "b0_i0")


def test_a_read_beside_what_is_made(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            t0 = local(float32[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = neg(in0[i0])
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = add(t0[i0], t0[5 - i0])
        """)
    with pytest.raises(ScheduleError, match="b1 reads t0 from other iterations than those in which b0 writes it"):
        Schedule(nest).reverse_compute_at("b1", "b0_i0")
