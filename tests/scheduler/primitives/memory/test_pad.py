"""pad: loops that run on over neutral elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_buffer_grows(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["chain"], lambda s: s.pad("b0_i0", 4))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            t0 = local(float32[4*FloorDiv(s0 + 3, 4)])
            for b0_i0 in serial(4*FloorDiv(s0 + 3, 4)):
                with block("b0"):
                    i0 = spatial(4*FloorDiv(s0 + 3, 4), b0_i0)
                    inside = lt(index(i0, int64), index(s0, int64))
                    t0[i0] = select(inside, add(in0[i0], float32(1.0)), float32(0.0))
            for b1_i0 in serial(s0):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    out0[i0] = mul(t0[i0], float32(2.0))
        """)


def test_no_tail_is_left(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """All along the rows of a normalisation, but for what leaves the nest."""

    def build(s: Schedule) -> None:
        for k in (0, 2, 3):
            s.pad(f"b{k}_r0", 8)
            _, lane = s.split(f"b{k}_r0", [None, 8], tail="perfect")
            s.vectorize(lane)
        for k in (1, 2, 3, 4):
            s.merge("b0_i0", f"b{k}_i0")

    s = proved(nests["layer_norm"], build)
    assert not any(s.block(f"b{k}").predicate for k in range(5))


@pytest.mark.parametrize("nest", ["argmax", "column_sum", "siblings"])
def test_every_reduction_meets_its_identity(nest: str, nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for block in s.get_blocks():
            s.pad(s.get_loops(block)[-1], 5)
            s.split(s.get_loops(block)[-1], [None, 5], tail="perfect")

    proved(nests[nest], build)


def test_rows_of_a_reduction(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Rows past the end are begun and finished like others, at the identity."""
    s = proved(nests["softmax"], lambda s: s.pad("b0_i0", 4))
    assert str(s.nest.buffer("t0").shape[0]) == "4*(((s0 + 3)//4))"


def test_nothing_to_add(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["plane"])
    s.pad("b0_i0", 4)
    assert s.nest == nests["plane"]


@pytest.mark.parametrize(
    ("nest", "loop", "multiple", "reason"),
    [
        ("pointwise", "b0_i0", 4, "b0 writes out0, which is no buffer of the nest's own"),
        ("pointwise", "b0_i0", 0, "0 is no number of iterations to round up to"),
        ("product", "ko", 3, "it is not one whole axis of b0"),
        ("product", "x", 3, "there is no loop x"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, loop: str, multiple: int, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests[nest]).pad(loop, multiple)
    assert caught.value.reason == reason


def test_after_a_split_it_is_too_late(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["chain"])
    s.split("b0_i0", [None, 3])
    with pytest.raises(ScheduleError, match="it is not one whole axis of b0") as caught:
        s.pad("b0_i0_1", 4)
    lines = str(caught.value).splitlines()
    at = next(k for k, line in enumerate(lines) if line.endswith("^ here"))
    assert "with block('b0')" in lines[at - 1] and lines[-1] == "hint: pad before split and fuse"
    s.vectorize("b0_i0_1")
    with pytest.raises(ScheduleError, match="the loop is vectorized already"):
        s.pad("b0_i0_1", 4)
