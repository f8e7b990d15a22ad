"""cache_write: a block writes nearer by, and a copy writes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest, Scope
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_copy_behind_the_writer(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        assert s.cache_write("b0", "out0", "local") == "out0_local"

    s = proved(nests["column_sum"], build)
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def column_sum(in0: float32[s0, 6], out0: float32[6]):
            s0 = size(lower=1)
            out0_local = local(float32[6])
            for b0_i0 in serial(6):
                for b0_r0 in serial(s0):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        r0 = reduction(s0, b0_r0, dim=inner)
                        out0_local[i0] = sum.update(in0[r0, i0])
            for out0_local_i0 in serial(6):
                with block("out0_local"):
                    i0 = spatial(6, out0_local_i0)
                    out0[i0] = out0_local[i0]
        """)


def test_a_tile_is_written_out_when_it_is_made(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.cache_write("b0", "out0", "shared")
        s.bind("mo", "blockIdx.x")
        s.reverse_compute_at("out0_shared", "mo")

    s = proved(nests["product"], build)
    assert s.get_loops("out0_shared")[0] == "mo" and s.nest.buffer("out0_shared").scope is Scope.SHARED
    assert [int(s.extent(lp)) for lp in s.get_loops("out0_shared")[1:]] == [4, 16]


def test_readers_of_an_output_read_the_cache(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[6]):
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    out0[i0] = neg(in0[i0])
                with block("b1"):
                    i0 = spatial(6, b0_i0)
                    out1[i0] = exp(out0[i0])
        """)
    s = proved(nest, lambda s: s.cache_write("b0", "out0"))
    assert [ld.buffer for ld in s.block("b1").reads] == ["out0_local"]


def test_a_workspace(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """What others read is still where they read it."""

    def build(s: Schedule) -> None:
        s.set_scope("t0", "global")
        s.cache_write("b0", "t0")
        s.reverse_compute_at("t0_local", "b0_i0")

    s = proved(nests["softmax"], build)
    assert s.get_blocks()[:2] == ["b0", "t0_local"]
    assert {ld.buffer for ld in s.block("b1").reads} == {"in0", "t0"}


def test_tuples_one_by_one(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.cache_write("b0", "out0")
        s.cache_write("b0", "out1")

    s = proved(nests["argmax"], build)
    assert [w.buffer for w in s.block("b0").writes] == ["out0_local", "out1_local"]


@pytest.mark.parametrize(
    ("block", "buffer", "scope", "reason"),
    [
        ("b0", "in0", "local", "it does not write in0"),
        ("b3", "out0", "register", "a cache lives in scope local or shared, not 'register'"),
        ("b9", "in0", "local", "there is no block b9"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], block: str, buffer: str, scope: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests["softmax"]).cache_write(block, buffer, scope)
    assert caught.value.reason == reason


def test_a_reader_in_the_same_loop(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["chain"])
    s.merge("b0_i0", "b1_i0")
    with pytest.raises(ScheduleError, match="b1, in the same loop b0_i0, reads t0") as caught:
        s.cache_write("b0", "t0")
    assert "hint: cache_write before the loops are merged" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "extent", "reason"),
    [("out0[i0]", 5, "it does not write all of out0"), ("out0[5 - i0]", 6, "it does not write all of out0"),
     ("out0[in1[i0]]", 6, "it scatters")],
)  # fmt: skip
def test_a_part_of_a_buffer(parsed: Parse, place: str, extent: int, reason: str) -> None:
    nest = parsed(f"""
        @nest(outputs=["out0"])
        def f(in0: float32[6], in1: int64[6], out0: float32[6]):
            for b0_i0 in serial({extent}):
                with block("b0"):
                    i0 = spatial({extent}, b0_i0)
                    {place} = in0[i0]
        """)
    with pytest.raises(ScheduleError, match=reason):
        Schedule(nest).cache_write("b0", "out0")


def test_two_writers(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    out0[i0] = in0[i0]
            for b1_i0 in serial(3):
                with block("b1"):
                    i0 = spatial(3, b1_i0)
                    out0[2*i0] = in0[i0]
        """)
    with pytest.raises(ScheduleError, match="b1 writes out0 too"):
        Schedule(nest).cache_write("b0", "out0")
