"""decompose_reduction: the beginning of a reduction as a block of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_the_identity_and_then_the_rest(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.decompose_reduction("b0", "b0_r0") == "b0_init"

    s = proved(nests["column_sum"], build)
    expected = parsed("""
        @nest(outputs=["out0"])
        def column_sum(in0: float32[s0, 6], out0: float32[6]):
            s0 = size(lower=1)
            for b0_i0 in serial(6):
                with block("b0_init"):
                    i0 = spatial(6, b0_i0)
                    out0[i0] = float32(0.0)
                for b0_r0 in serial(s0):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        r0 = reduction(s0, b0_r0, dim=inner)
                        out0[i0] = sum.update(in0[r0, i0], begins=False)
        """)
    assert s.nest == expected and parse(show(s.nest)) == s.nest


def test_ahead_of_all_loops(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """The sum may then run over rows outside and columns inside, in lanes."""

    def build(s: Schedule) -> None:
        s.decompose_reduction("b0", "b0_i0")
        s.reorder("b0_r0", "b0_i0")
        _, lane = s.split("b0_i0", [None, 4])
        s.vectorize(lane)
        s.vectorize("b0_i0_init")

    s = proved(nests["column_sum"], build)
    assert s.get_loops("b0") == ["b0_r0", "b0_i0_0", "b0_i0_1"]
    assert s.loop("b0_i0_init").kind is LoopKind.VECTORIZED


def test_kinds_and_tails_of_spatial_loops(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.bind("mo", "blockIdx.x")
        s.decompose_reduction("b0", "ko")

    s = proved(nests["product"], build)
    loops = s.get_loops("b0_init")
    assert loops == ["mo", "m_init", "n_init"] and s.loop("m_init").kind is LoopKind.THREAD_X
    assert [str(b.lhs) for b in s.block("b0_init").predicate] == ["m_init + 4*mo"]


def test_tuples(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.decompose_reduction("b0", "b0_r0")
        s.split("b0_r1", [None, 3])
        s.reorder("b0_r1_0", "b0_r0")

    s = proved(nests["argmax"], build)
    assert [w.buffer for w in s.block("b0_init").writes] == ["out0", "out1"]


def test_what_comes_after(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Rows of both parts to a team, readers beside them, and partial results that join what was begun."""

    def build(s: Schedule) -> None:
        for k in (1, 2, 3):
            s.merge("b0_i0", f"b{k}_i0")
        s.decompose_reduction("b2", "b2_r0")
        _, lane = s.split("b2_r0", [None, 4])
        s.rfactor(lane)
        s.parallel("b0_i0")

    s = proved(nests["softmax"], build)
    assert s.get_blocks() == ["b0", "b1", "b2_init", "b2_rf", "b2", "b3"]


def test_both_parts_in_one_loop_with_more_inside(proved: Prove, parsed: Parse) -> None:
    """Iterations of the loop that they share are apart though each touches a whole row."""
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6, s0, 5], out0: float32[6, 5]):
            s0 = size(lower=1)
            for i in serial(6):
                for k in serial(s0):
                    for j in serial(5):
                        with block("b0"):
                            i0 = spatial(6, i)
                            i1 = spatial(5, j)
                            r0 = reduction(s0, k, dim=inner)
                            out0[i0, i1] = sum.update(in0[i0, r0, i1])
        """)

    def build(s: Schedule) -> None:
        s.decompose_reduction("b0", "k")
        s.split("i", [None, 4])
        s.parallel("i_0")
        s.vectorize("j_init")

    s = proved(nest, build)
    assert s.get_loops("b0_init") == ["i_0", "i_1", "j_init"]


def test_the_beginning_can_be_moved(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.decompose_reduction("b0", "b0_i0")
        with pytest.raises(ScheduleError, match="b0 overwrites out0, which b0_init uses"):
            s.compute_at("b0_init", "b0_r0")
        s.compute_at("b0_init", "b0_i0")

    s = proved(nests["column_sum"], build)
    assert s.get_loops("b0_init") == ["b0_i0"]


def test_an_empty_reduction(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["column_sum"])
    s.decompose_reduction("b0", "b0_r0")
    out = run_nest(s.nest, {"in0": np.zeros((0, 6), np.float32)}, {"s0": 0})["out0"]
    np.testing.assert_array_equal(out, np.zeros(6, np.float32))


def test_what_it_continues_counts(nests: Mapping[str, LoopNest], parsed: Parse) -> None:
    """The flag is part of the nest: of its key, of its meaning, and of what the verifier asks."""
    s = Schedule(nests["column_sum"])
    s.decompose_reduction("b0", "b0_r0")
    text = show(s.nest)
    other = parsed(text.replace(", begins=False", ""))
    assert other != s.nest and structural_key(other) != structural_key(s.nest)
    doubled = parsed(text.replace("float32(0.0)", "float32(2.0)"))
    ones = {"in0": np.ones((3, 6), np.float32)}
    assert run_nest(doubled, ones, {"s0": 3})["out0"].tolist() == [5.0] * 6
    never = parsed(show(nests["softmax"]).replace("sum.update(t1[i0, r0])", "sum.update(t1[i0, r0], begins=False)"))
    with pytest.raises(VerifyError, match="t2 is updated before anything writes it"):
        verify(never)


@pytest.mark.parametrize(
    ("nest", "block", "loop", "reason"),
    [
        ("softmax", "b1", "b1_i0", "it is no reduction"),
        ("softmax", "b0", "b2_i0", "b2_i0 is no loop around it"),
        ("argmax", "b0", "b0_r1", "the loop b0_r0, outside of b0_r1, carries the reduction"),
        ("softmax", "b0", "x", "there is no loop x"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, block: str, loop: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).decompose_reduction(block, loop)
    assert caught.value.reason == reason


def test_loops_of_both_kinds(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["column_sum"])
    both = s.fuse("b0_i0", "b0_r0")
    with pytest.raises(ScheduleError, match="b0_i0_b0_r0 carries the reduction and another axis at once"):
        s.decompose_reduction("b0", both)


def test_it_is_done_once_and_stays(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["softmax"])
    s.decompose_reduction("b0", "b0_r0")
    with pytest.raises(ScheduleError, match="it does not begin by itself any more"):
        s.decompose_reduction("b0", "b0_r0")
    with pytest.raises(ScheduleError, match="it goes on from what another block has begun") as caught:
        s.compute_at("b0", "b1_i0")
    lines = str(caught.value).splitlines()
    at = next(k for k, line in enumerate(lines) if line.endswith("^ here"))
    assert "with block('b0')" in lines[at - 1] and lines[-1] == "hint: move it before decompose_reduction"


def masked_sum(condition: str) -> str:
    return f"""
        @nest(outputs=["out0"])
        def masked(in0: float32[24, 24], in1: float32[24], out0: float32[24]):
            t0 = local(float32[24, 24])
            for b0_i0 in serial(24):
                for b0_r0 in serial(24):
                    with block("b0"):
                        i0 = spatial(24, b0_i0)
                        r0 = spatial(24, b0_r0, dim=inner)
                        t0[i0, r0] = exp(sub(select({condition}, in0[i0, r0], float32(float("-inf"))), in1[i0]))
            for b1_i0 in serial(24):
                for b1_r0 in serial(24):
                    with block("b1"):
                        i0 = spatial(24, b1_i0)
                        r0 = reduction(24, b1_r0, dim=inner)
                        out0[i0] = sum.update(mul(t0[i0, r0], in0[i0, r0]))
        """


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("le(index(r0, int64), index(i0, int64))", 1),
        ("ge(index(r0, int64), index(i0, int64))", 1),
        ("lt(index(i0 - r0, int64), int64(5))", 1),
        ("lt(in0[i0, r0], in1[r0])", 0),
    ],
)
def test_zeros_are_skipped(parsed: Parse, proved: Prove, condition: str, bounds: int) -> None:
    """Tiles that a mask of positions empties are left out, with what is made for them alone."""

    def build(s: Schedule) -> None:
        outer = []
        for b in ("b0", "b1"):
            i, r = s.get_loops(b)
            io, ii = s.split(i, [None, 4])
            ro, ri = s.split(r, [None, 8])
            s.reorder(io, ro, ii, ri)
            outer.append((io, ro))
        s.merge(outer[0][0], outer[1][0])
        s.merge(outer[0][1], outer[1][1])
        s.decompose_reduction("b1", outer[0][1], skip=True)

    s = proved(parsed(masked_sum(condition)), build)
    assert len(s.block("b1").predicate) == len(s.block("b0").predicate) == bounds


@pytest.mark.parametrize("subtracted", ["in1[i0]", "in1[r0]", "in0[i0, r0]"])
def test_what_is_left_out_is_no_number_where_it_was_none(
    parsed: Parse, subtracted: str, unchanged: Callable[[LoopNest, LoopNest], None]
) -> None:
    """An exponential of minus infinity is zero, but not less an infinity or NaN: of that the sum begins."""
    nest = parsed(f"""
        @nest(outputs=["out0"])
        def weights(in0: float32[24, 24], in1: float32[24], out0: float32[24]):
            for b0_i0 in serial(24):
                for b0_r0 in serial(24):
                    with block("b0"):
                        i0 = spatial(24, b0_i0)
                        r0 = reduction(24, b0_r0, dim=inner)
                        out0[i0] = sum.update(exp(sub(select(le(index(r0, int64), index(i0, int64)), in0[i0, r0],
                            float32(float("-inf"))), {subtracted})))
        """)
    s = Schedule(nest)
    io, ii = s.split("b0_i0", [None, 4])
    ro, ri = s.split("b0_r0", [None, 8])
    s.reorder(io, ro, ii, ri)
    assert s.decompose_reduction("b0", ro, skip=True) == "b0_init"
    if subtracted == "in0[i0, r0]":  # as much would be read for what is left out as was left out
        assert s.get_blocks() == ["b0_init", "b0"] and not s.block("b0").predicate
        return
    assert len(s.block("b0").predicate) == 1 and s.get_blocks()[0] == "b0_left_out"
    assert len(s.get_loops("b0_left_out")) == (3 if subtracted == "in1[i0]" else 2)
    unchanged(nest, s.nest)
    ones = np.ones((24, 24), np.float32)
    for place in (0, 9, 23):
        for odd in (np.nan, -np.inf, np.inf):
            given = {"in0": ones, "in1": np.where(np.arange(24) == place, odd, 0.5).astype(np.float32)}
            with np.errstate(all="ignore"):
                before, after = (run_nest(n, given, {})["out0"] for n in (nest, s.nest))
            np.testing.assert_array_equal(after, before)


def test_choices_that_limits_decide_are_made(parsed: Parse, proved: Prove) -> None:
    """What is the same for all that is left of an iteration is no choice there; what differs within it stays one."""
    nest = parsed("""
        @nest(outputs=["out0"])
        def banded(in0: float32[6, 9], out0: float32[6]):
            for b0_i0 in serial(6):
                for b0_r0 in serial(9):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        r0 = reduction(9, b0_r0, dim=inner)
                        out0[i0] = sum.update(select(lt(index(i0, int64), index(r0 + 3, int64)), select(
                            lt(index(r0, int64), index(i0 + 2, int64)), in0[i0, r0], float32(0.0)), float32(0.0)))
        """)
    s = proved(nest, lambda s: s.decompose_reduction("b0", "b0_r0", skip=True))
    assert len(s.block("b0").predicate) == 2 and "select" not in show(s.nest)

    def build(s: Schedule) -> None:
        outer, _ = s.split("b0_r0", [None, 3])
        s.decompose_reduction("b0", outer, skip=True)

    s = proved(nest, build)
    assert len(s.block("b0").predicate) == 2 and show(s.nest).count("select") == 2


def test_only_sums_are_skipped(nests: Mapping[str, LoopNest], parsed: Parse) -> None:
    nest = parsed(masked_sum("le(index(r0, int64), index(i0, int64))").replace("sum.update", "max.update"))
    with pytest.raises(ScheduleError, match="it is not one sum"):
        Schedule(nest).decompose_reduction("b1", "b1_r0", skip=True)
