"""Updates that go on from what their targets hold, compiled, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.schedule.schedule import Schedule

ROWS = """
    @nest(outputs=["out0", "out1"])
    def rows(in0: float32[s0, s1], out0: float32[s0], out1: float32[s0]):
        s0 = size()
        s1 = size()
        t0 = local(float32[s0])
        for i in serial(s0):
            for k in serial(s1):
                with block("b0"):
                    i0 = spatial(s0, i)
                    r0 = reduction(s1, k)
                    t0[i0] = sum.update(in0[i0, r0])
                    out1[i0] = max.update(in0[i0, r0])
        for j in serial(s0):
            with block("b1"):
                i0 = spatial(s0, j)
                out0[i0] = mul(t0[i0], float32(2.0))
    """


def plain(s: Schedule) -> None:
    s.decompose_reduction("b0", "k")


def lanes_over_the_sum(s: Schedule) -> None:
    _, lane = s.split("k", [None, 8])
    s.vectorize(lane)
    s.decompose_reduction("b0", "k_0")
    s.parallel("i")


def copies(s: Schedule) -> None:
    s.split("k", [None, 3])
    s.unroll("k_1")
    s.decompose_reduction("b0", "i")


def lanes_over_rows(s: Schedule) -> None:
    s.decompose_reduction("b0", "i")
    s.reorder("k", "i")
    for loop in ("i", "i_init"):
        _, lane = s.split(loop, [None, 8])
        s.vectorize(lane)


@pytest.mark.parametrize("schedule", [plain, lanes_over_the_sum, copies, lanes_over_rows])
@pytest.mark.parametrize("shape", [(1, 1), (5, 13), (17, 8), (9, 0)])
def test_a_beginning_of_its_own(
    schedule: Callable[[Schedule], None], shape: tuple[int, int], execute: Callable[..., Any], target: Target
) -> None:
    nest = parse(dedent(ROWS).strip() + "\n")
    assert isinstance(nest, LoopNest)
    s = Schedule(nest)
    schedule(s)
    sizes = {"s0": shape[0], "s1": shape[1]}
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)
    wanted = run_nest(nest, [x], sizes)
    for name, got in execute(s.nest, [x], sizes, target).items():
        np.testing.assert_array_equal(got, wanted[name], err_msg=name)


def test_it_starts_from_what_is_there(execute: Callable[..., Any], target: Target) -> None:
    nest = parse(
        dedent("""
        @nest(outputs=["out0"])
        def f(in0: float32[6, 10], in1: float32[6], out0: float32[6]):
            for i in serial(6):
                with block("b0"):
                    i0 = spatial(6, i)
                    out0[i0] = in1[i0]
                for k in serial(10):
                    with block("b1"):
                        i0 = spatial(6, i)
                        r0 = reduction(10, k)
                        out0[i0] = sum.update(in0[i0, r0], begins=False)
        """).strip()
        + "\n"
    )
    assert isinstance(nest, LoopNest)
    x = np.arange(60, dtype=np.float32).reshape(6, 10)
    bias = np.arange(6, dtype=np.float32)
    got = execute(nest, [x, bias], {}, target)["out0"]
    np.testing.assert_array_equal(got, x.sum(1) + bias)
