"""compute_at: a producer moves to its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def all_at(s: Schedule, loop: str, *blocks: str) -> None:
    for b in blocks:
        s.compute_at(b, loop)


def test_all_stages_of_a_row_come_to_the_last(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["softmax"], lambda s: all_at(s, "b3_i0", "b2", "b1", "b0"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def softmax(in0: float32[s0, 12], out0: float32[s0, 12]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            t1 = local(float32[s0, 12])
            t2 = local(float32[s0])
            for b3_i0 in serial(s0):
                for b0_r0 in serial(12):
                    with block("b0"):
                        i0 = spatial(s0, b3_i0)
                        r0 = reduction(12, b0_r0, dim=inner)
                        t0[i0] = max.update(in0[i0, r0])
                for b1_r0 in serial(12):
                    with block("b1"):
                        i0 = spatial(s0, b3_i0)
                        r0 = spatial(12, b1_r0, dim=inner)
                        t1[i0, r0] = exp(sub(in0[i0, r0], t0[i0]))
                for b2_r0 in serial(12):
                    with block("b2"):
                        i0 = spatial(s0, b3_i0)
                        r0 = reduction(12, b2_r0, dim=inner)
                        t2[i0] = sum.update(t1[i0, r0])
                for b3_r0 in serial(12):
                    with block("b3"):
                        i0 = spatial(s0, b3_i0)
                        r0 = spatial(12, b3_r0, dim=inner)
                        out0[i0, r0] = div(t1[i0, r0], t2[i0])
        """)


def test_the_predicate_of_a_tail_comes_along(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Bound, split, fused: the other stages are bound as the anchor is."""

    def build(s: Schedule) -> None:
        o, i = s.split("b3_i0", [None, 4])
        s.bind(o, "blockIdx.x")
        s.bind(i, "threadIdx.x")
        all_at(s, i, "b2", "b1", "b0")

    s = proved(nests["softmax"], build)
    for b in s.get_blocks():
        assert s.get_loops(b)[:2] == ["b3_i0_0", "b3_i0_1"]
        assert s.block(b).bindings[0] == s.block("b3").bindings[0]
        assert s.block(b).predicate == s.block("b3").predicate


def test_a_tile_needs_a_tile(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        o, _ = s.split("b1_i0", [None, 4])
        s.compute_at("b0", o)

    s = proved(nests["chain"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            for b1_i0_0 in serial((s0 + 3) // 4):
                for b0_i0 in serial(4):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0 + 4*b1_i0_0)
                        where(b0_i0 + 4*b1_i0_0 < s0)
                        t0[i0] = add(in0[i0], float32(1.0))
                for b1_i0_1 in serial(4):
                    with block("b1"):
                        i0 = spatial(s0, b1_i0_1 + 4*b1_i0_0)
                        where(b1_i0_1 + 4*b1_i0_0 < s0)
                        out0[i0] = mul(t0[i0], float32(2.0))
        """)


def test_neighbours_are_computed_again(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        o, _ = s.split("b1_i0", [None, 4])
        s.compute_at("b0", o)

    s = proved(nests["stencil"], build)
    assert s.extent("b0_i0") == 6 and not s.block("b0").predicate


def test_a_stencil_at_its_reader(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    assert proved(nests["stencil"], lambda s: s.compute_at("b0", "b1_i0")).extent("b0_i0") == 3


def test_rows_that_are_looked_up_are_needed_whole(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["lookup"], lambda s: s.compute_at("b0", "b1_i1"))
    assert s.get_loops("b0") == ["b1_i0", "b1_i1", "b0_i0"]


def test_loops_that_the_reader_leaves_open_keep_their_kinds(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for b in ("b0", "b1", "b2"):
            s.vectorize(s.split(f"{b}_r0", [None, 8])[1])
        all_at(s, "b3_i0", "b2", "b1", "b0")

    s = proved(nests["softmax"], build)
    for b in ("b0", "b1", "b2"):
        assert s.get_loops(b) == ["b3_i0", f"{b}_r0_0", f"{b}_r0_1"]
        assert s.loop(f"{b}_r0_1").kind is LoopKind.VECTORIZED and len(s.block(b).predicate) == 1


def test_a_reduction_whose_loops_stood_outside(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.reorder("b0_r0", "b0_i0")
        o, _ = s.split("b3_i0", [None, 4])
        all_at(s, o, "b2", "b1", "b0")

    s = proved(nests["softmax"], build)
    assert s.get_loops("b0") == ["b3_i0_0", "b0_r0", "b0_i0"]


def test_a_result_that_also_leaves_the_kernel(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """b1 stores an output; its reader goes through all rows, so nothing of it is lost."""
    s = proved(nests["layer_norm"], lambda s: all_at(s, "b4_i0", "b3", "b2", "b1", "b0"))
    assert all(s.get_loops(b)[0] == "b4_i0" for b in s.get_blocks())


def test_the_reader_goes_through_a_part_of_an_output(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[3]):
            t0 = local(float32[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = neg(in0[i0])
                    out0[i0] = t0[i0]
            for b1_i0 in serial(3):
                with block("b1"):
                    i0 = spatial(3, b1_i0)
                    out1[i0] = t0[2*i0]
        """)
    with pytest.raises(ScheduleError, match="it writes an output, of whose axis i0 its readers need a part only"):
        Schedule(nest).compute_at("b0", "b1_i0")


def test_a_tail_that_is_read_backwards(proved: Prove, parsed: Parse) -> None:
    """What the last iterations would need lies before the first element: no copy may begin there."""
    nest = parsed("""
        @nest(outputs=["out0"])
        def flip(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    out0[i0] = in0[s0 - i0 - 1]
        """)

    def build(s: Schedule) -> None:
        copy = s.cache_read("b0", "in0")
        outer, _ = s.split("b0_i0", [None, 8])
        s.compute_at(copy, outer)

    proved(nest, build)


@pytest.mark.parametrize("tail", [False, True])
def test_all_of_a_readers_axis_may_be_a_part_of_the_dimension(proved: Prove, parsed: Parse, tail: bool) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def head(in0: float32[s0, 96], out0: float32[s0, 32]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                for b0_i1 in serial(32):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(32, b0_i1)
                        out0[i0, i1] = exp(in0[i0, i1])
        """)

    def build(s: Schedule) -> None:
        copy = s.cache_read("b0", "in0")
        s.compute_at(copy, s.split("b0_i0", [None, 4])[0] if tail else "b0_i0")

    s = proved(nest, build)
    assert s.extent(s.get_loops("in0_local")[-1]) == 32


def test_an_output_is_computed_whole_though_only_a_part_is_read_inside(proved: Prove, parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def head(in0: float32[8, 96], out0: float32[8, 96], out1: float32[8, 32]):
            for b0_i0 in serial(8):
                for b0_i1 in serial(96):
                    with block("b0"):
                        i0 = spatial(8, b0_i0)
                        i1 = spatial(96, b0_i1)
                        out0[i0, i1] = exp(in0[i0, i1])
            for b1_i0 in serial(8):
                for b1_i1 in serial(32):
                    with block("b1"):
                        i0 = spatial(8, b1_i0)
                        i1 = spatial(32, b1_i1)
                        out1[i0, i1] = neg(out0[i0, i1])
        """)
    s = proved(nest, lambda s: s.compute_at("b0", "b1_i0"))
    assert s.extent(s.get_loops("b0")[-1]) == 96


def test_unit_loops_remain_if_asked(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["softmax"], lambda s: s.compute_at("b2", "b3_i0", preserve_unit_loops=True))
    assert s.get_loops("b2") == ["b3_i0", "b2_i0", "b2_r0"] and s.extent("b2_i0") == 1


def test_from_one_loop_deeper_into_another(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for k in (1, 2, 3):
            s.merge("b0_i0", f"b{k}_i0")
        s.compute_at("b2", "b3_r0")

    assert proved(nests["softmax"], build).get_loops("b2") == ["b0_i0", "b3_r0", "b2_r0"]


def test_the_axis_of_a_fused_loop(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        both = s.fuse("b1_i0", "b1_i1")
        s.compute_at("b0", both)

    s = proved(nests["lookup"], build)
    assert str(s.block("b0").bindings[1]) == str(s.block("b1").bindings[1])


@pytest.mark.parametrize(
    ("nest", "block", "loop", "reason"),
    [
        ("softmax", "b0", "b3_i0", "b1 reads it and is not in that loop"),
        ("softmax", "b3", "b2_i0", "nothing reads it"),
        ("softmax", "b1", "b2_i0", "b3 reads it and is not in that loop"),
        ("softmax", "b0", "b0_i0", "it is inside that loop already"),
        ("softmax", "b9", "b3_i0", "there is no block b9"),
        ("softmax", "b2", "b9", "there is no loop b9"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, block: str, loop: str, reason: str) -> None:
    s = Schedule(nests[nest])
    with pytest.raises(ScheduleError) as caught:
        s.compute_at(block, loop)
    assert reason in caught.value.reason and s.nest is nests[nest]


def test_a_reduction_is_not_torn_apart(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["softmax"])
    s.fuse("b2_i0", "b2_r0")
    with pytest.raises(ScheduleError, match="carries its reduction and another axis"):
        s.compute_at("b2", "b3_i0")


def test_an_output_is_not_computed_in_a_loop_that_may_not_run(parsed: Callable[[str], LoopNest]) -> None:
    text = """
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[4], out0: float32[4], out1: float32[4, s0]):
            s0 = size(lower={lower})
            t0 = local(float32[4])
            for i in serial(4):
                with block("b0"):
                    a = spatial(4, i)
                    t0[a] = exp(in0[a])
                    out0[a] = t0[a]
            for j in serial(4):
                for k in serial(s0):
                    with block("b1"):
                        a = spatial(4, j)
                        b = spatial(s0, k)
                        out1[a, b] = t0[a]
        """
    with pytest.raises(ScheduleError, match="k runs s0 times, which may be none: then b0 would not write its output"):
        Schedule(parsed(text.format(lower=0))).compute_at("b0", "k")
    Schedule(parsed(text.format(lower=0))).compute_at("b0", "j")
    Schedule(parsed(text.format(lower=1))).compute_at("b0", "k")
