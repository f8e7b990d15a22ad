"""fuse (of loops)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_two_loops_become_one(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["plane"], lambda s: s.fuse("b0_i0", "b0_i1"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def plane(in0: tensor(float32, [s0, 8], strides=[16, 1]), in1: float32[8], out0: float32[s0, 8]):
            s0 = size(lower=4, divisor=4)
            for b0_i0_b0_i1 in serial(8*s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0_b0_i1 // 8)
                    i1 = spatial(8, b0_i0_b0_i1 % 8)
                    out0[i0, i1] = add(in0[i0, i1], in1[i1])
        """)


@pytest.mark.parametrize(("nest", "factors"), [("plane", [None, 4]), ("pointwise", [None, 4]), ("plane", [None, 3])])
def test_fuse_undoes_split(nests: Mapping[str, LoopNest], proved: Prove, nest: str, factors: list[int | None]) -> None:
    """The quotients and remainders cancel; only where there was a tail a longer loop and its bound remain."""
    s = proved(nests[nest], lambda s: s.fuse(*s.split("b0_i0", factors)))
    (loop, *_), block = s.get_loops("b0"), s.block("b0")
    assert str(block.bindings[0]) == loop
    assert (s.extent(loop) == block.axes[0].extent) == (not block.predicate)


def test_three_loops_and_a_reduction(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.fuse("b0_i0", *s.split("b0_r0", [None, 2]))

    s = proved(nests["column_sum"], build)
    assert len(s.get_loops("b0")) == 1


@pytest.mark.parametrize("shape", ["0, 0", "5, 0", "0, 5"])
def test_loops_that_never_run(parsed: Parse, shape: str) -> None:
    rows, columns = shape.split(", ")
    nest = parsed(f"""
        @nest(outputs=["out0"])
        def empty(in0: float32[{shape}], out0: float32[{shape}]):
            for i in serial({rows}):
                for j in serial({columns}):
                    with block("b0"):
                        i0 = spatial({rows}, i)
                        i1 = spatial({columns}, j)
                        out0[i0, i1] = add(in0[i0, i1], in0[i0, i1])
        """)
    s = Schedule(nest)
    assert s.extent(s.fuse("i", "j")) == 0


def test_a_loop_that_only_what_is_known_of_sizes_shows_to_be_empty(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def empty(in0: float32[3, s0], out0: float32[3, s0]):
            s0 = size(lower=2)
            for i in serial(3):
                for j in serial(Min(1, s0 - 1) - 1):
                    with block("b0"):
                        i0 = spatial(3, i)
                        i1 = spatial(Min(1, s0 - 1) - 1, j)
                        out0[i0, i1] = add(in0[i0, i1], in0[i0, i1])
        """)
    s = Schedule(nest)
    outer, inner = s.split("j", [None, 16])
    joined = s.fuse("i", outer)
    assert s.get_loops("b0") == [joined, inner]


def test_one_loop_stays_as_it_is(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["plane"])
    assert s.fuse("b0_i0") == "b0_i0" and s.nest is nests["plane"]


@pytest.mark.parametrize(
    ("nest", "loops", "reason"),
    [
        ("plane", ["b0_i1", "b0_i0"], "b0_i0 does not stand alone directly inside b0_i1"),
        ("chain", ["b0_i0", "b1_i0"], "b1_i0 does not stand alone directly inside b0_i0"),
        ("plane", [], "no loops were given"),
        ("plane", ["b0_i0", "b7"], "there is no loop b7"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, loops: list[str], reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).fuse(*loops)
    assert reason in caught.value.reason


def test_loops_with_more_in_them_are_not_fused(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["softmax"])
    s.merge("b0_i0", "b1_i0")
    with pytest.raises(ScheduleError, match="does not stand alone"):
        s.fuse("b0_i0", "b0_r0")


def test_bound_loops_are_not_fused(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["plane"])
    s.vectorize("b0_i1")
    with pytest.raises(ScheduleError, match="b0_i1 is vectorized already"):
        s.fuse("b0_i0", "b0_i1")


def test_a_reduction_that_may_be_empty_stays_apart_from_its_targets(parsed: Callable[[str], LoopNest]) -> None:
    text = """
        @nest(outputs=["out0"])
        def rows(in0: float32[4, s0], out0: float32[4]):
            s0 = size(lower={lower})
            for i in serial(4):
                for r in serial(s0):
                    with block("b0"):
                        a = spatial(4, i)
                        b = reduction(s0, r)
                        out0[a] = sum.update(in0[a, b])
        """
    with pytest.raises(ScheduleError, match="reduces over s0 elements, which may be none"):
        Schedule(parsed(text.format(lower=0))).fuse("i", "r")
    assert Schedule(parsed(text.format(lower=1))).fuse("i", "r") == "i_r"
