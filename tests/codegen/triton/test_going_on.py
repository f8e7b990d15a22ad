"""Updates that go on from what their targets hold, as Triton programs."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from torch_mlc.codegen.kernel import EmitError
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.schedule.schedule import Schedule

TILES = """
    @nest(outputs=["out0"])
    def tiles(in0: float32[s0, 21], in1: float32[s0], out0: float32[s0]):
        s0 = size(lower=1)
        t0 = local(float32[s0])
        for b in block_x(FloorDiv(s0 + 3, 4)):
            for m in thread_x(4):
                with block("b0"):
                    i0 = spatial(s0, 4*b + m)
                    where(4*b + m < s0)
                    t0[i0] = in1[i0]
            for ko in serial(3):
                for m1 in thread_x(4):
                    for k in thread_x(8):
                        with block("b1"):
                            i0 = spatial(s0, 4*b + m1)
                            r0 = reduction(21, 8*ko + k)
                            where(4*b + m1 < s0)
                            where(8*ko + k < 21)
                            t0[i0] = sum.update(in0[i0, r0], begins=False)
            for m2 in thread_x(4):
                with block("b2"):
                    i0 = spatial(s0, 4*b + m2)
                    where(4*b + m2 < s0)
                    out0[i0] = exp(mul(t0[i0], float32(0.1)))
    """


def script(text: str) -> LoopNest:
    nest = parse(dedent(text).strip() + "\n")
    assert isinstance(nest, LoopNest)
    return nest


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("once", [False, True])
def test_a_loop_and_a_tile(size: int, once: bool, agrees: Callable[..., object]) -> None:
    text = TILES
    if once:  # all of the reduction in one tile
        text = text.replace("serial(3)", "serial(1)").replace("thread_x(8)", "thread_x(32)")
    agrees(script(text), {"s0": size}, tolerance=1e-5)


BOTH = """
    @nest(outputs=["out0", "out1"])
    def both(in0: float32[s0, 21], out0: float32[s0], out1: float32[s0]):
        s0 = size(lower=1)
        for b in block_x(FloorDiv(s0 + 3, 4)):
            for ko in serial(3):
                for m in thread_x(4):
                    for k in thread_x(8):
                        with block("b0"):
                            i0 = spatial(s0, 4*b + m)
                            r0 = reduction(21, 8*ko + k)
                            where(4*b + m < s0)
                            where(8*ko + k < 21)
                            out0[i0] = max.update(in0[i0, r0])
                            out1[i0] = sum.update(in0[i0, r0])
    """


@pytest.mark.parametrize("once", [False, True])
def test_two_at_once_begun_before(once: bool, agrees: Callable[..., object]) -> None:
    text = BOTH.replace("serial(3)", "serial(1)").replace("thread_x(8)", "thread_x(32)") if once else BOTH
    s = Schedule(script(text))
    s.decompose_reduction("b0", "ko")
    agrees(s.nest, {"s0": 6}, tolerance=1e-5)


def test_memory_that_other_programs_may_write(agrees: Callable[..., object]) -> None:
    """What the program itself stored before is known; nothing else is."""
    text = dedent(TILES).replace("t0[i0]", "out0[i0]").replace("    t0 = local(float32[s0])\n", "")
    text = text[: text.index("        for m2")]
    agrees(script(text), {"s0": 6}, tolerance=1e-5)
    elsewhere = text.replace("out0[i0] = in1[i0]", "out0[s0 - 1 - i0] = in1[i0]")
    with pytest.raises(EmitError, match="goes on from out0, of which this program has not stored the same elements"):
        emit_triton(script(elsewhere), gpu_target("cuda:sm_90"))
