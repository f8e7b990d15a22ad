"""cache_read: a block reads a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest, Scope
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_copy_before_the_reader(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.cache_read("b0", "in0", "local") == "in0_local"

    s = proved(nests["transpose"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def transpose(in0: float32[12, 10], in1: float32[10, 12], out0: float32[10, 12]):
            in0_local = local(float32[12, 10])
            for in0_local_i0 in serial(12):
                for in0_local_i1 in serial(10):
                    with block("in0_local"):
                        i0 = spatial(12, in0_local_i0)
                        i1 = spatial(10, in0_local_i1)
                        in0_local[i0, i1] = in0[i0, i1]
            for b0_i0 in serial(10):
                for b0_i1 in serial(12):
                    with block("b0"):
                        i0 = spatial(10, b0_i0)
                        i1 = spatial(12, b0_i1)
                        out0[i0, i1] = add(in0_local[i1, i0], in1[i0, i1])
        """)


def test_only_the_tile_that_is_needed(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """A tile of the transposed operand, with tails in both directions, is copied in its own order of elements."""

    def build(s: Schedule) -> None:
        s.cache_read("b0", "in0", "shared")
        outer, inner = s.split("b0_i0", [None, 4])
        wide, lane = s.split("b0_i1", [None, 8])
        s.reorder(outer, wide, inner, lane)
        s.compute_at("in0_shared", wide)
        s.parallel(outer)

    s = proved(nests["transpose"], build)
    assert s.nest.buffer("in0_shared").scope is Scope.SHARED
    copy = s.get_loops("in0_shared")
    assert copy[:2] == ["b0_i0_0", "b0_i1_0"] and [int(s.extent(lp)) for lp in copy[2:]] == [8, 4]
    assert len(s.block("in0_shared").predicate) == 2


def test_a_tile_of_a_symbolic_product(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.split("b0_i0", [None, 4])
        s.split("b0_r0", [None, 5])
        s.reorder("b0_i0_0", "b0_r0_0", "b0_i0_1", "b0_r0_1")
        s.cache_read("b0", "in0")
        s.compute_at("in0_local", "b0_r0_0")

    s = proved(nests["siblings"], build)
    assert [str(s.extent(lp)) for lp in s.get_loops("in0_local")[2:]] == ["4", "5"]
    assert {ld.buffer for ld in s.block("b1").reads} == {"in0"}


def test_neighbours_of_a_tile(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.compute_inline("b0")
        s.split("b1_i0", [None, 4])
        s.cache_read("b1", "in0")
        s.compute_at("in0_local", "b1_i0_0")

    s = proved(nests["stencil"], build)
    assert int(s.extent(s.get_loops("in0_local")[-1])) == 6


def test_reads_that_a_condition_leaves_out(parsed: Parse, proved: Prove) -> None:
    """Padding: the first tile would begin before the first element, so the copy is of all."""
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    out0[i0] = select(lt(index(0, int64), index(i0, int64)), in0[i0 - 1], float32(0.0))
        """)

    def build(s: Schedule) -> None:
        s.cache_read("b0", "in0")
        s.split("b0_i0", [None, 4])
        s.compute_at("in0_local", "b0_i0_0")

    proved(nest, build)


def test_places_that_are_looked_up(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Both the table and the numbers of its rows."""

    def build(s: Schedule) -> None:
        s.cache_read("b1", "t0")
        s.cache_read("b1", "in1")
        s.compute_at("t0_local", "b1_i0")
        s.compute_at("in1_local", "b1_i0")

    s = proved(nests["lookup"], build)
    assert {ld.buffer for ld in s.block("b1").reads} == {"t0_local", "in1_local"}


def test_two_copies_of_one_buffer(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        assert s.cache_read("b0", "in0") == "in0_local"
        assert s.cache_read("b1", "in0") == "in0_local_1"
        assert s.cache_read("in0_local", "in0", "shared") == "in0_shared"

    s = proved(nests["softmax"], build)
    assert s.get_blocks()[:3] == ["in0_shared", "in0_local", "b0"]


def test_what_has_no_dimensions(nests: Mapping[str, LoopNest], parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: tensor(float32, []), out0: float32[5]):
            for b0_i0 in serial(5):
                with block("b0"):
                    i0 = spatial(5, b0_i0)
                    out0[i0] = in0[()]
        """)
    proved(nest, lambda s: s.cache_read("b0", "in0"))


@pytest.mark.parametrize(
    ("block", "buffer", "scope", "reason"),
    [
        ("b0", "in1", "local", "it does not read in1"),
        ("b0", "in0", "global", "a cache lives in scope local or shared, not 'global'"),
        ("b9", "in0", "local", "there is no block b9"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], block: str, buffer: str, scope: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests["softmax"]).cache_read(block, buffer, scope)
    assert caught.value.reason == reason


def test_a_writer_in_the_same_loop(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["chain"])
    s.merge("b0_i0", "b1_i0")
    with pytest.raises(ScheduleError, match="b0, in the same loop b0_i0, writes t0") as caught:
        s.cache_read("b1", "t0")
    lines = str(caught.value).splitlines()
    at = next(k for k, line in enumerate(lines) if line.endswith("^^ here"))
    assert "with block('b0')" in lines[at - 1] and lines[-1] == "hint: cache_read before the loops are merged"
