"""decompose_online: an online softmax a tile at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import AxisKind, LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]

STATISTICS = """
    @nest(outputs=["out0", "out1"])
    def statistics(in0: float32[s0, s1], out0: float32[s0], out1: float32[s0]):
        s0 = size(lower=1)
        s1 = size(lower=1)
        t0 = local(float32[s0])
        t1 = local(float32[s0])
        for b0_i0 in serial(s0):
            for b0_r0 in serial(s1):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    r0 = reduction(s1, b0_r0, dim=inner)
                    (t0[i0], t1[i0]) = logsumexp.update(in0[i0, r0], float32(1.0))
        for b1_i0 in serial(s0):
            with block("b1"):
                i0 = spatial(s0, b1_i0)
                out0[i0] = t0[i0]
                out1[i0] = t1[i0]
    """

# {score} over positions i0 and r0; {result} of maximum t1, sum t2 and vector t3.
ATTENTION = """
    @nest(outputs=["out0"])
    def attention(in0: float32[s0, s1], in1: float32[s1, 3], out0: float32[s0, 3]):
        s0 = size(lower=1)
        s1 = size(lower=1)
        t0 = local(float32[s0, s1])
        t1 = local(float32[s0, 3])
        t2 = local(float32[s0, 3])
        t3 = local(float32[s0, 3])
        for b0_i0 in serial(s0):
            for b0_r0 in serial(s1):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    r0 = spatial(s1, b0_r0, dim=inner)
                    t0[i0, r0] = {score}
        for b1_i0 in serial(s0):
            for b1_r0 in serial(s1):
                for b1_x0 in serial(3):
                    with block("b1"):
                        i0 = spatial(s0, b1_i0)
                        r0 = reduction(s1, b1_r0, dim=inner)
                        x0 = spatial(3, b1_x0, dim=extra)
                        (t1[i0, x0], t2[i0, x0], t3[i0, x0]) = attention.update(t0[i0, r0], float32(1.0), in1[r0, x0])
        for b2_i0 in serial(s0):
            for b2_x0 in serial(3):
                with block("b2"):
                    i0 = spatial(s0, b2_i0)
                    x0 = spatial(3, b2_x0, dim=extra)
                    out0[i0, x0] = {result}
    """
PLAIN = "in0[i0, r0]"
CAUSAL = 'select(le(index(r0, int64), index(i0, int64)), in0[i0, r0], float32(float("-inf")))'
WINDOW = """select(logical_and(le(index(r0, int64), index(i0 + 1, int64)), lt(index(i0 - r0, int64), int64(3))),
    in0[i0, r0], float32(float("-inf")))"""
ADDED = 'add(in0[i0, r0], select(le(index(r0, int64), index(i0, int64)), float32(0.0), float32(float("-inf"))))'
SHARE = "div(t3[i0, x0], t2[i0, x0])"
TOLD = f'select(eq(t1[i0, x0], float32(float("-inf"))), float32(0.0), {SHARE})'


def attention(parsed: Parse, score: str = PLAIN, result: str = TOLD) -> LoopNest:
    return parsed(ATTENTION.format(score=score, result=result))


def tiles(s: Schedule, keys: int = 4, rows: int = 2, skip: bool = False) -> tuple[str, ...]:
    """Rows and keys in tiles, scores inside."""
    outer = {}
    for b in ("b0", "b1"):
        i, ii = s.split(f"{b}_i0", [None, rows])
        r, ri = s.split(f"{b}_r0", [None, keys])
        s.reorder(i, r, ii, ri)
        outer[b] = (i, r)
    for level in range(2):
        s.merge(outer["b0"][level], outer["b1"][level])
    return s.decompose_online("b1", outer["b0"][1], skip)


def test_the_steps(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        tile, _ = s.split("b0_r0", [None, 4])
        s.decompose_online("b0", tile)

    s = proved(parsed(STATISTICS), build)
    assert s.get_blocks() == ["b0_begin", "b0_max", "b0_factor", "b0_sum", "b0_total", "b1"]
    assert s.get_loops("b0_max") == ["b0_i0", "b0_r0_0", "b0_r0_1_max"]
    assert s.get_loops("b0_begin") == ["b0_i0"]
    assert [a.kind for a in s.block("b0_total").axes] == [AxisKind.SCAN, AxisKind.SPATIAL]


def test_maxima_and_sums_lose_the_axes_of_the_vector(proved: Prove, parsed: Parse) -> None:
    s = proved(attention(parsed), lambda s: tiles(s))
    buffers = s.nest.buffers
    assert len(buffers["t1"].shape) == len(buffers["t2"].shape) == 1 and len(buffers["t3"].shape) == 2
    product = s.block("b1_product")
    assert [a.var.name for a in product.axes if a.kind is AxisKind.REDUCTION] == ["tile_0"]
    assert s.get_loops("b1_weight")[-2:] == ["b1_i0_1_weight", "b1_r0_1_weight"]


def test_one_element_a_tile(proved: Prove, parsed: Parse) -> None:
    s = proved(attention(parsed), lambda s: s.decompose_online("b1", "b1_r0"))
    assert s.get_loops("b1_sum") == ["b1_i0", "b1_r0"]


@pytest.mark.parametrize("score", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("keys", [1, 4])
def test_tiles_that_are_empty(proved: Prove, parsed: Parse, score: str, keys: int) -> None:
    s = proved(attention(parsed, score), lambda s: tiles(s, keys, skip=True))
    wanted = 1 if score == CAUSAL else 2
    for b in ("b0", "b1_max", "b1_vector"):  # the scores too are not computed
        loops = {"b0_i0_0", "b0_r0_0"}
        bounds = [p for p in s.block(b).predicate if {v.name for v in p.lhs.free_symbols} <= loops]
        assert len(bounds) == wanted


def test_empty_tiles_are_not_run(parsed: Parse) -> None:
    """Keys that no tile of queries sees are never read: NaN there would show."""
    s = Schedule(attention(parsed, CAUSAL))
    tiles(s, keys=4, rows=4, skip=True)
    values = np.ones((12, 3), np.float32)
    values[4:] = np.nan
    got = run_nest(s.nest, [np.zeros((4, 12), np.float32), values], {"s0": 4, "s1": 12})["out0"]
    np.testing.assert_array_equal(got, np.ones((4, 3), np.float32))


@pytest.mark.parametrize("row", [[np.inf, 1, 2, 3, 4], [-np.inf] * 5, [-np.inf, -np.inf, -np.inf, -np.inf, 2],
                                 [1, np.nan, 2, 3, 4], [3e38, -3e38, 0, 0, 1]])  # fmt: skip
def test_extremes_are_the_monoids(parsed: Parse, row: list[float]) -> None:
    nest = attention(parsed, result=SHARE)
    s = Schedule(nest)
    tiles(s, keys=2)
    inputs = [np.array([row, row], np.float32), np.arange(15, dtype=np.float32).reshape(5, 3)]
    sizes = {"s0": 2, "s1": 5}
    np.testing.assert_array_equal(run_nest(s.nest, inputs, sizes)["out0"], run_nest(nest, inputs, sizes)["out0"])


def test_no_row_that_only_its_sum_tells(parsed: Parse) -> None:
    s = Schedule(attention(parsed, CAUSAL, SHARE))
    with pytest.raises(ScheduleError, match="does not tell rows without any score by their maximum"):
        tiles(s, skip=True)


def test_rows_told_by_one_of_two_conditions(proved: Prove, parsed: Parse) -> None:
    """What the sum says does not matter where the maximum already does."""
    told = f"select(logical_or(isinf(t1[i0, x0]), isnan(t2[i0, x0])), float32(0.0), {SHARE})"
    s = proved(attention(parsed, CAUSAL, told), lambda s: tiles(s, skip=True))
    assert len(s.block("b1_sum").predicate) == 3


def test_what_is_added_may_be_infinite(parsed: Parse) -> None:
    """Infinity plus minus infinity is NaN, which must not be skipped."""
    s = Schedule(attention(parsed, ADDED))
    tiles(s, skip=True)
    assert len(s.block("b1_max").predicate) == 2  # the tails of rows and keys


@pytest.mark.parametrize(
    ("block", "loop", "reason"),
    [
        ("b0", "b0_r0", "it is not one update by attention or logsumexp"),
        ("b1", "b1_i0", "b1_i0 does not carry the reduction of b1 alone"),
        ("b1", "b2_i0", "b2_i0 does not carry the reduction of b1 alone"),
    ],
)
def test_refusals(parsed: Parse, block: str, loop: str, reason: str) -> None:
    nest = attention(parsed)
    s = Schedule(nest)
    with pytest.raises(ScheduleError) as caught:
        s.decompose_online(block, loop)
    assert caught.value.reason == reason
    assert s.nest is nest


def test_the_outermost_loop_of_the_reduction(parsed: Parse) -> None:
    s = Schedule(attention(parsed))
    s.split("b1_r0", [None, 4])
    with pytest.raises(ScheduleError, match="b1_r0_0, outside of it, carries the reduction too"):
        s.decompose_online("b1", "b1_r0_1")


def test_bound_loops_inside(parsed: Parse) -> None:
    s = Schedule(attention(parsed))
    s.vectorize("b1_x0")
    with pytest.raises(ScheduleError, match="b1_x0 is vectorized"):
        s.decompose_online("b1", "b1_r0")


def test_outputs_are_no_state(parsed: Parse) -> None:
    text = STATISTICS.replace("(t0[i0], t1[i0])", "(out0[i0], out1[i0])")
    head, _ = text.split("        for b1_i0")
    s = Schedule(
        parsed(head.replace("        t0 = local(float32[s0])\n        t1 = local(float32[s0])\n", "") + "\n    ")
    )
    with pytest.raises(ScheduleError, match="out0 is not a local buffer"):
        s.decompose_online("b0", "b0_r0")
