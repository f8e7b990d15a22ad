"""compute_inline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_value_takes_the_place_of_its_reads(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["chain"], lambda s: s.compute_inline("b0"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b1_i0 in serial(s0):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    out0[i0] = mul(add(in0[i0], float32(1.0)), float32(2.0))
        """)


def test_outputs_of_the_block_remain(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["layer_norm"], lambda s: s.compute_inline("b1"))
    assert [w.buffer for w in s.block("b1").writes] == ["out1"]
    assert "t1" not in s.nest.buffers and {ld.buffer for ld in s.block("b2").reads} == {"in0", "t0"}


def test_indices_are_followed(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Neighbours, and places that are looked up."""
    s = proved(nests["stencil"], lambda s: s.compute_inline("b0"))
    assert [str(ld.indices[0]) for ld in s.block("b1").reads] == ["i0", "i0 + 1", "i0 + 2"]
    proved(nests["lookup"], lambda s: s.compute_inline("b0"))


def test_after_loops_were_split_and_merged(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.merge("b2_i0", "b3_i0")
        s.split("b2_i0", [None, 4])
        s.compute_inline("b1")

    s = proved(nests["softmax"], build)
    assert s.get_blocks() == ["b0", "b2", "b3"]


def test_the_value_is_what_the_buffer_holds(parsed: Parse, proved: Prove) -> None:
    """A buffer of a half type rounds; so does what takes its place."""
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
    proved(nest, lambda s: s.compute_inline("b0"))


@pytest.mark.parametrize(
    ("nest", "block", "reason"),
    [
        ("softmax", "b0", "it is a reduction"),
        ("softmax", "b3", "it writes only outputs (out0)"),
        ("softmax", "b7", "there is no block b7; the blocks are b0, b1, b2, b3"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, block: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).compute_inline(block)
    assert reason in caught.value.reason or reason.split("; ")[1] in str(caught.value)


def test_what_it_reads_is_overwritten(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[6]):
            t0 = local(float32[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[i0] = neg(out0[i0])
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = in0[i0]
            for b2_i0 in serial(6):
                with block("b2"):
                    i0 = spatial(6, b2_i0)
                    out1[i0] = t0[i0]
        """)
    with pytest.raises(ScheduleError, match="b1 overwrites out0, before b2 reads it"):
        Schedule(nest).compute_inline("b0")


def test_a_buffer_that_is_not_written_at_its_axes(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[6], out0: float32[6]):
            t0 = local(float32[6])
            for b0_i0 in serial(6):
                with block("b0"):
                    i0 = spatial(6, b0_i0)
                    t0[5 - i0] = in0[i0]
            for b1_i0 in serial(6):
                with block("b1"):
                    i0 = spatial(6, b1_i0)
                    out0[i0] = t0[i0]
        """)
    with pytest.raises(ScheduleError, match="it does not write t0 at its own axes"):
        Schedule(nest).compute_inline("b0")
