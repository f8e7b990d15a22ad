"""Timing candidates: what they run on, and what is no time at all."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import cast

import pytest
import torch

from torch_mlc.ir.loops import LoopNest
from torch_mlc.ir.parser import parse
from torch_mlc.runtime import measure
from torch_mlc.runtime.measure import CpuMeasurer, MeasureError, make_arguments, measurer_for
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.tune_progress import TuneProgress, story
from torch_mlc.scheduler.schedule import Schedule
from torch_mlc.scheduler.tune import Progress


def nest_of(text: str) -> LoopNest:
    return cast(LoopNest, parse(text))


DOUBLE = nest_of("""
@nest(outputs=["out0"])
def double(in0: float32[s0], out0: float32[s0]):
    s0 = size(lower=2, hint=1000)
    for a in serial(s0):
        with block("b0"):
            i = spatial(s0, a)
            out0[i] = mul(in0[i], float32(2.0))
""")
GATHER = nest_of("""
@nest(outputs=["out0"])
def gather(in0: float32[7, 3], in1: int64[50], out0: float32[50, 3]):
    for a in serial(50):
        for b in serial(3):
            with block("b0"):
                i = spatial(50, a)
                j = spatial(3, b)
                out0[i, j] = in0[in1[i], j]
""")


def test_arguments_have_typical_sizes_and_the_buffers_layout() -> None:
    turned = replace(DOUBLE.params[0], strides=(DOUBLE.params[0].strides[0] * 3,))
    arguments = make_arguments(replace(DOUBLE, params=(turned, DOUBLE.params[1])), "cpu")
    assert arguments.sizes == (1000,) and arguments.outputs == 1
    assert [t.shape[0] for t in arguments.tensors] == [1000, 1000]
    assert [t.stride(0) for t in arguments.tensors] == [3, 1]
    assert 0.8 < float(arguments.tensors[0].std()) < 1.2


def test_integers_that_index_are_in_range() -> None:
    indices = make_arguments(GATHER, "cpu").tensors[1]
    assert indices.dtype is torch.int64 and set(indices.tolist()) == set(range(7))


def test_arguments_that_are_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MAX_BYTES", 100)
    (result,) = CpuMeasurer(DOUBLE, cpu_target()).measure([Schedule(DOUBLE)])
    assert isinstance(result, MeasureError)


def test_times_are_seconds_a_call() -> None:
    slow, fast = Schedule(DOUBLE), Schedule(DOUBLE)
    _, lanes = fast.split("a", [None, 16])
    fast.vectorize(lanes)
    results = CpuMeasurer(DOUBLE, cpu_target()).measure([slow, fast])
    assert all(isinstance(r, float) and 1e-9 < r < 1e-2 for r in results)


def test_a_candidate_with_other_results_is_an_error_and_the_others_are_timed() -> None:
    other = nest_of(
        "@nest(outputs=['out0'])\ndef double(in0: float32[s0], out0: float32[s0]):\n    s0 = size(lower=2, hint=1000)\n"
        "    for a in serial(s0):\n        with block('b0'):\n            i = spatial(s0, a)\n"
        "            out0[i] = mul(in0[i], float32(3.0))\n"
    )
    first, second, third = CpuMeasurer(DOUBLE, cpu_target()).measure([Schedule(n) for n in (DOUBLE, other, DOUBLE)])
    assert isinstance(first, float) and isinstance(third, float)
    assert isinstance(second, MeasureError) and "differs" in str(second)


def test_every_candidate_of_an_update_in_place_starts_from_the_same_content() -> None:
    nest = replace(
        nest_of("""
@nest(outputs=["out0"])
def grow(in0: float32[100], out0: float32[100]):
    for a in serial(100):
        with block("b0"):
            i = spatial(100, a)
            out0[i] = add(mul(out0[i], float32(2.0)), in0[i])
"""),
        annotations=(("in_place", "out0"),),
    )
    split = Schedule(nest)
    split.split(split.get_loops("b0")[0], [None, 8])
    assert float(make_arguments(nest, "cpu").tensors[1].std()) > 0.5
    assert all(isinstance(r, float) for r in CpuMeasurer(nest, cpu_target()).measure([Schedule(nest), split]))


def test_a_kernel_over_a_table_is_not_timed() -> None:
    assert measurer_for(replace(DOUBLE, annotations=(("table", True),)), cpu_target()) is None


def test_a_candidate_that_does_not_compile_is_an_error() -> None:
    schedule = Schedule(DOUBLE)
    schedule.bind("a", "blockIdx.x")
    failed, timed = CpuMeasurer(DOUBLE, cpu_target()).measure([schedule, Schedule(DOUBLE)])
    assert isinstance(failed, Exception) and isinstance(timed, float)


def test_no_gpu_no_measurer() -> None:
    target = replace(cpu_target(), kind="cuda", arch="sm_90")
    assert (measurer_for(DOUBLE, target) is None) is not torch.cuda.is_available()
    assert isinstance(measurer_for(DOUBLE, cpu_target()), CpuMeasurer)


STATE = Progress("double", 12, 1, 1.0, 10.0, 3e-3, 2e-3, "cpu_pointwise(unroll=2)")


def test_the_bar_is_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, is_drawn in ((io.StringIO(), False), (Terminal(), True)):
        with TuneProgress(stream) as progress:
            progress(STATE)
        assert ("double" in stream.getvalue()) is is_drawn


def test_the_story_tells_what_was_won() -> None:
    assert story(STATE) == "12 measured, 1 failed, 1.50x of the default: cpu_pointwise(unroll=2)"
    assert story(replace(STATE, failed=0, best_seconds=None)) == "12 measured"
