"""pipeline: iterations in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_loop_over_tiles(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["product"], lambda s: s.pipeline("ko", 3))
    assert s.loop("ko").annotations == (("num_stages", 3),)


def test_numbers_of_rows_that_are_looked_up(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.compute_inline("b0")
        s.pipeline("b1_i0", 2)

    proved(nests["lookup"], build)


@pytest.mark.parametrize(
    ("nest", "loop", "stages", "reason"),
    [
        ("product", "ko", 1, "1 stages are not 2 to 8"),
        ("product", "ko", 9, "9 stages are not 2 to 8"),
        ("product", "k", 2, "the loop is threadIdx.x, and iterations in flight are serial ones"),
        ("product", "x", 2, "there is no loop x"),
        ("chain", "b1_i0", 2, "nothing inside loads from memory at places that move with it"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, loop: str, stages: int, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).pipeline(loop, stages)
    assert caught.value.reason == reason


def test_what_one_iteration_writes_for_the_next(parsed: Parse) -> None:
    nest = parsed("""
        @nest(outputs=["out0", "out1"])
        def f(in0: float32[6], out0: float32[6], out1: float32[6]):
            for i in serial(6):
                with block("b0"):
                    i0 = spatial(6, i)
                    out0[i0] = neg(in0[i0])
                with block("b1"):
                    i0 = spatial(6, i)
                    out1[i0] = exp(out0[i0])
        """)
    with pytest.raises(ScheduleError, match="b1 loads out0, which b0 writes in the loop") as caught:
        Schedule(nest).pipeline("i", 2)
    lines = str(caught.value).splitlines()
    at = next(k for k, line in enumerate(lines) if line.endswith("^ here"))
    assert "with block('b0')" in lines[at - 1]


def test_one_iteration(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["transpose"])
    outer, _ = s.split("b0_i0", [None, 10])
    with pytest.raises(ScheduleError, match="the loop has one iteration"):
        s.pipeline(outer, 2)
