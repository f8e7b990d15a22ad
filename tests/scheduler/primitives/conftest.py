"""Nests as lowering leaves them, as script, and the proof by the oracle that a schedule keeps their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest, size
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

Build = Callable[[Schedule], Any]

SCRIPTS = {
    # One loop, a size that nothing is known of.
    "pointwise": """
        @nest(outputs=["out0"])
        def pointwise(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    out0[i0] = mul(in0[i0], in0[i0])
        """,
    # Two dimensions that cannot be one, with a size that 4 divides.
    "plane": """
        @nest(outputs=["out0"])
        def plane(in0: tensor(float32, [s0, 8], strides=[16, 1]), in1: float32[8], out0: float32[s0, 8]):
            s0 = size(lower=4, divisor=4)
            for b0_i0 in serial(s0):
                for b0_i1 in serial(8):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(8, b0_i1)
                        out0[i0, i1] = add(in0[i0, i1], in1[i1])
        """,
    "transpose": """
        @nest(outputs=["out0"])
        def transpose(in0: float32[12, 10], in1: float32[10, 12], out0: float32[10, 12]):
            for b0_i0 in serial(10):
                for b0_i1 in serial(12):
                    with block("b0"):
                        i0 = spatial(10, b0_i0)
                        i1 = spatial(12, b0_i1)
                        out0[i0, i1] = add(in0[i1, i0], in1[i0, i1])
        """,
    "chain": """
        @nest(outputs=["out0"])
        def chain(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            for b0_i0 in serial(s0):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    t0[i0] = add(in0[i0], float32(1.0))
            for b1_i0 in serial(s0):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    out0[i0] = mul(t0[i0], float32(2.0))
        """,
    "softmax": """
        @nest(outputs=["out0"])
        def softmax(in0: float32[s0, 12], out0: float32[s0, 12]):
            s0 = size(lower=1)
            t0 = local(float32[s0])
            t1 = local(float32[s0, 12])
            t2 = local(float32[s0])
            for b0_i0 in serial(s0):
                for b0_r0 in serial(12):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(12, b0_r0, dim=inner)
                        t0[i0] = max.update(in0[i0, r0])
            for b1_i0 in serial(s0):
                for b1_r0 in serial(12):
                    with block("b1"):
                        i0 = spatial(s0, b1_i0)
                        r0 = spatial(12, b1_r0, dim=inner)
                        t1[i0, r0] = exp(sub(in0[i0, r0], t0[i0]))
            for b2_i0 in serial(s0):
                for b2_r0 in serial(12):
                    with block("b2"):
                        i0 = spatial(s0, b2_i0)
                        r0 = reduction(12, b2_r0, dim=inner)
                        t2[i0] = sum.update(t1[i0, r0])
            for b3_i0 in serial(s0):
                for b3_r0 in serial(12):
                    with block("b3"):
                        i0 = spatial(s0, b3_i0)
                        r0 = spatial(12, b3_r0, dim=inner)
                        out0[i0, r0] = div(t1[i0, r0], t2[i0])
        """,
    # Statistics by row, one of which also leaves the kernel; elements read twice.
    "layer_norm": """
        @nest(outputs=["out0", "out1"])
        def layer_norm(in0: float32[s0, s1], in1: float32[s1], out0: float32[s0, s1], out1: float32[s0]):
            s0 = size(lower=1)
            s1 = size(lower=1)
            t0 = local(float32[s0])
            t1 = local(float32[s0])
            t2 = local(float32[s0, s1])
            t3 = local(float32[s0])
            for b0_i0 in serial(s0):
                for b0_r0 in serial(s1):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(s1, b0_r0, dim=inner)
                        t0[i0] = sum.update(in0[i0, r0])
            for b1_i0 in serial(s0):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    t1[i0] = div(t0[i0], float32(8.0))
                    out1[i0] = t1[i0]
            for b2_i0 in serial(s0):
                for b2_r0 in serial(s1):
                    with block("b2"):
                        i0 = spatial(s0, b2_i0)
                        r0 = spatial(s1, b2_r0, dim=inner)
                        t2[i0, r0] = sub(in0[i0, r0], t1[i0])
            for b3_i0 in serial(s0):
                for b3_r0 in serial(s1):
                    with block("b3"):
                        i0 = spatial(s0, b3_i0)
                        r0 = reduction(s1, b3_r0, dim=inner)
                        t3[i0] = sum.update(mul(t2[i0, r0], t2[i0, r0]))
            for b4_i0 in serial(s0):
                for b4_r0 in serial(s1):
                    with block("b4"):
                        i0 = spatial(s0, b4_i0)
                        r0 = spatial(s1, b4_r0, dim=inner)
                        out0[i0, r0] = mul(mul(t2[i0, r0], t3[i0]), in1[r0])
        """,
    "column_sum": """
        @nest(outputs=["out0"])
        def column_sum(in0: float32[s0, 6], out0: float32[6]):
            s0 = size(lower=1)
            for b0_i0 in serial(6):
                for b0_r0 in serial(s0):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        r0 = reduction(s0, b0_r0, dim=inner)
                        out0[i0] = sum.update(in0[r0, i0])
        """,
    # Value and index of the greatest element of all; two dimensions that cannot be one.
    "argmax": """
        @nest(outputs=["out0", "out1"])
        def argmax(in0: tensor(float32, [5, 7], strides=[9, 1]), out0: tensor(float32, []), out1: tensor(int64, [])):
            for b0_r0 in serial(5):
                for b0_r1 in serial(7):
                    with block("b0"):
                        r0 = reduction(5, b0_r0, dim=inner)
                        r1 = reduction(7, b0_r1, dim=inner)
                        out0[()], out1[()] = argmax.update(in0[r0, r1], index(7*r0 + r1, int64))
        """,
    # Three-point stencil: readers need neighbours of what a producer makes.
    "stencil": """
        @nest(outputs=["out0"])
        def stencil(in0: float32[18], out0: float32[16]):
            t0 = local(float32[18])
            for b0_i0 in serial(18):
                with block("b0"):
                    i0 = spatial(18, b0_i0)
                    t0[i0] = mul(in0[i0], in0[i0])
            for b1_i0 in serial(16):
                with block("b1"):
                    i0 = spatial(16, b1_i0)
                    out0[i0] = add(add(t0[i0], t0[i0 + 1]), t0[i0 + 2])
        """,
    # A sum over sliding windows of what is computed.
    "window": """
        @nest(outputs=["out0"])
        def window(in0: float32[3, 12], in1: float32[3, 3], out0: float32[3, 10]):
            for b0_i0 in serial(3):
                for b0_i1 in serial(10):
                    for b0_r0 in serial(3):
                        with block("b0", role=convolution):
                            i0 = spatial(3, b0_i0)
                            i1 = spatial(10, b0_i1)
                            r0 = reduction(3, b0_r0, dim=inner)
                            out0[i0, i1] = sum.update(mul(exp(in0[i0, i1 + r0]), in1[i0, r0]))
        """,
    # A reader that looks up rows by number.
    "lookup": """
        @nest(outputs=["out0"])
        def lookup(in0: float32[6, 4], in1: int64[5], out0: float32[5, 4]):
            t0 = local(float32[6, 4])
            for b0_i0 in serial(6):
                for b0_i1 in serial(4):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        i1 = spatial(4, b0_i1)
                        t0[i0, i1] = add(in0[i0, i1], float32(1.0))
            for b1_i0 in serial(5):
                for b1_i1 in serial(4):
                    with block("b1"):
                        i0 = spatial(5, b1_i0)
                        i1 = spatial(4, b1_i1)
                        out0[i0, i1] = t0[in1[i0], i1]
        """,
    # Two results of the same input, apart from one another.
    "siblings": """
        @nest(outputs=["out0", "out1"])
        def siblings(in0: float32[s0, 6], out0: float32[s0], out1: float32[s0]):
            s0 = size(lower=1)
            for b0_i0 in serial(s0):
                for b0_r0 in serial(6):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        r0 = reduction(6, b0_r0, dim=inner)
                        out0[i0] = sum.update(in0[i0, r0])
            for b1_i0 in serial(s0):
                for b1_r0 in serial(6):
                    with block("b1"):
                        i0 = spatial(s0, b1_i0)
                        r0 = reduction(6, b1_r0, dim=inner)
                        out1[i0] = max.update(in0[i0, r0])
        """,
    # A product of two matrices in tiles of a GPU's program, with tails in two of three directions.
    "product": """
        @nest(outputs=["out0"])
        def product(in0: bfloat16[s0, 24], in1: bfloat16[24, 16], out0: float32[s0, 16]):
            s0 = size(lower=1)
            for mo in serial(FloorDiv(s0 + 3, 4)):
                for ko in serial(2):
                    for m in thread_x(4):
                        for n in thread_x(16):
                            for k in thread_x(16):
                                with block("b0", role=product):
                                    i0 = spatial(s0, 4*mo + m)
                                    i1 = spatial(16, n)
                                    r0 = reduction(24, 16*ko + k, dim=inner)
                                    where(4*mo + m < s0)
                                    where(16*ko + k < 24)
                                    a = cast(in0[i0, r0], float32)
                                    b = cast(in1[r0, i1], float32)
                                    out0[i0, i1] = sum.update(mul(a, b))
        """,
    # Online statistics: a maximum and a sum that follows it.
    "statistics": """
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
        """,
    # Scores, their softmax's state with a vector, and what comes of it.
    "attention": """
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
                    with block("b0", role=weight):
                        i0 = spatial(s0, b0_i0)
                        r0 = spatial(s1, b0_r0, dim=inner)
                        t0[i0, r0] = mul(in0[i0, r0], in0[i0, r0])
            for b1_i0 in serial(s0):
                for b1_r0 in serial(s1):
                    for b1_x0 in serial(3):
                        with block("b1", role=state):
                            i0 = spatial(s0, b1_i0)
                            r0 = reduction(s1, b1_r0, dim=inner)
                            x0 = spatial(3, b1_x0, dim=extra)
                            (t1[i0, x0], t2[i0, x0], t3[i0, x0]) = attention.update(
                                t0[i0, r0], float32(1.0), in1[r0, x0])
            for b2_i0 in serial(s0):
                for b2_x0 in serial(3):
                    with block("b2", role=result):
                        i0 = spatial(s0, b2_i0)
                        x0 = spatial(3, b2_x0, dim=extra)
                        out0[i0, x0] = div(t3[i0, x0], t2[i0, x0])
        """,
}  # fmt: skip


def script(text: str) -> LoopNest:
    nest = parse(dedent(text).strip() + "\n")
    assert isinstance(nest, LoopNest)
    return nest


def same_meaning(before: LoopNest, after: LoopNest, extents: Iterable[int] = (1, 4, 5, 8, 13)) -> None:
    """Both nests give the same outputs, for small sizes that divide nothing and for some that divide much."""
    rng = np.random.default_rng(0)
    table = before.symbols.sizes
    for extent in extents if table else (1,):
        sizes = {
            s.symbol.name: -(-max(extent + k, s.lower) // s.divisor) * s.divisor for k, s in enumerate(table)
        }  # fmt: skip
        inputs = {}
        for b in before.params:
            if b.name not in before.outputs:
                shape = tuple(size(e, sizes) for e in b.shape)
                # Small integers: sums are exact in any order.
                inputs[b.name] = rng.integers(0 if b.dtype.is_int else -3, 4, shape).astype(b.dtype.numpy)
        expected = run_nest(before, inputs, sizes)
        for backward in (False, True):
            got = run_nest(after, inputs, sizes, backward=backward)
            for name, array in expected.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-5, err_msg=f"{name} at {sizes}")


@pytest.fixture
def nests() -> Mapping[str, LoopNest]:
    """The nests by name."""
    return {name: script(text) for name, text in SCRIPTS.items()}


@pytest.fixture
def parsed() -> Callable[[str], LoopNest]:
    """A nest from its script."""
    return script


@pytest.fixture
def proved() -> Callable[[LoopNest, Build], Schedule]:
    """Runs a schedule and returns it: what it makes is sound IR, means the same, and its trace replays from JSON."""

    def prove(nest: LoopNest, build: Build) -> Schedule:
        schedule = Schedule(nest, "test")
        build(schedule)
        verify(schedule.nest)
        same_meaning(nest, schedule.nest)
        trace = Trace.from_json(schedule.trace.to_json())
        assert trace == schedule.trace
        assert replay(trace, nest).nest == schedule.nest
        return schedule

    return prove


@pytest.fixture
def unchanged() -> Callable[[LoopNest, LoopNest], None]:
    """Checks by the oracle that two nests mean the same."""
    return same_meaning
