"""Scatters under primitives: what keeps their order, what atomic operations free, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import LoopKind, LoopNest, blocks
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

TEXT = """
@nest(outputs=["out0"])
def rows(in0: int64[21], in1: float32[21, 40], out0: float32[6, 40]):
    for b0_i0 in serial(6):
        for b0_i1 in serial(40):
            with block("b0"):
                i0 = spatial(6, b0_i0)
                i1 = spatial(40, b0_i1)
                out0[i0, i1] = float32(0.0)
    for b1_x0 in serial(21):
        for b1_x1 in serial(40):
            with block("b1"):
                x0 = scatter(21, b1_x0)
                x1 = spatial(40, b1_x1)
                out0[in0[x0], x1] = sum.update(in1[x0, x1], begins=False)
"""


@pytest.fixture
def rows(parsed: Callable[[str], LoopNest]) -> LoopNest:
    return parsed(TEXT)


def same(nest: LoopNest, build: Callable[[Schedule], Any]) -> Schedule:
    """The schedule, after the oracle has given what it gave before."""
    s = Schedule(nest)
    build(s)
    verify(s.nest)
    assert replay(Trace.from_json(s.trace.to_json()), nest).nest == s.nest
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 6, 21), rng.normal(size=(21, 40)).astype(np.float32)]
    for backward in (False, True):
        found, wanted = run_nest(s.nest, given, {}, backward=backward), run_nest(nest, given, {})
        np.testing.assert_allclose(found["out0"], wanted["out0"], rtol=1e-5, atol=1e-6)
    return s


def test_a_team_and_lanes_along_what_data_do_not_decide(rows: LoopNest) -> None:
    def build(s: Schedule) -> None:
        part, lane = s.split("b1_x1", [None, 8])
        s.reorder(part, "b1_x0", lane)
        s.parallel(part)
        s.vectorize(lane)

    same(rows, build)
    schedule = default_schedule(rows, cpu_target(4))
    assert schedule.rule == "cpu_scatter"
    kinds = {b.name: [lp.kind for lp in outer] for b, outer in blocks(schedule.nest)}
    assert kinds["b1"][-1] is LoopKind.VECTORIZED


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.parallel("b1_x0"),
        lambda s: s.vectorize("b1_x0"),
        lambda s: s.bind("b1_x0", "blockIdx.x"),
        lambda s: s.rfactor("b1_x0"),
        lambda s: s.pad("b1_x0", 4),
        lambda s: s.cache_write("b1", "out0"),
        lambda s: s.compute_at("b1", "b0_i0"),
        lambda s: s.reverse_compute_at("b1", "b0_i0"),
        lambda s: s.decompose_reduction("b1", "b1_x0"),
        lambda s: s.merge("b0_i0", "b1_x0"),
        lambda s: [s.reorder("b1_x1", "b1_x0"), s.merge("b0_i0", "b1_x1")],
        lambda s: s.atomic("b0"),
        lambda s: [s.atomic("b1"), s.parallel("b1_x0")],
    ],
)
def test_what_a_scatter_does_not_bear(rows: LoopNest, build: Callable[[Schedule], Any]) -> None:
    with pytest.raises(ScheduleError):
        build(Schedule(rows))


def test_fused_loops_keep_the_order(rows: LoopNest) -> None:
    def build(s: Schedule) -> None:
        loop = s.fuse("b1_x0", "b1_x1")
        with pytest.raises(ScheduleError):
            s.parallel(loop)
        s.split(loop, [None, 7])

    same(rows, build)


def test_atomic_operations_free_the_loops(rows: LoopNest, parsed: Callable[[str], LoopNest]) -> None:
    def build(s: Schedule) -> None:
        s.atomic("b1")
        s.bind("b1_x0", "blockIdx.x")

    same(rows, build)
    with pytest.raises(ScheduleError, match="no atomic product"):
        Schedule(parsed(TEXT.replace("sum.update", "product.update"))).atomic("b1")


def test_gpus_need_a_nest_of_one_scatter(rows: LoopNest) -> None:
    assert default_schedule(rows, gpu_target("cuda:sm_90")).rule != "gpu_scatter"
