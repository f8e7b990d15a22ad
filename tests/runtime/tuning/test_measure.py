"""What candidates of tuning run on, and how they are timed."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import cast

import pytest
import torch

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.tuning import measure
from torch_mlc.runtime.tuning.measure import MeasureError, interleaved_seconds, make_arguments
from torch_mlc.runtime.tuning.measuring import WorkerMeasurer, measurer_for
from torch_mlc.runtime.tuning.progress import TuneProgress, story
from torch_mlc.scheduler.tuning.tune import Progress


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
    with pytest.raises(MeasureError, match="MiB of arguments"):
        make_arguments(DOUBLE, "cpu")


def test_samples_take_turns_and_the_lower_quartile_counts() -> None:
    """By a clock that each call moves: now and then one takes ten times as long."""
    now, calls = 0.0, [0, 0]

    def run(k: int) -> None:
        nonlocal now
        calls[k] += 1
        now += (10 if calls[k] % 3 == 0 else 1) * (k + 1) * 1e-3

    found = interleaved_seconds({0: lambda: run(0), 1: lambda: run(1)}, lambda: now)
    assert found == {0: pytest.approx(1e-3), 1: pytest.approx(2e-3)}


def test_arguments_of_an_update_in_place_have_content() -> None:
    nest = replace(DOUBLE, annotations=(("in_place", "out0"),))
    assert float(make_arguments(nest, "cpu").tensors[1].std()) > 0.5


def test_a_kernel_over_a_table_is_not_timed() -> None:
    assert measurer_for(replace(DOUBLE, annotations=(("table", True),)), cpu_target()) is None


def test_no_gpu_no_measurer() -> None:
    target = replace(cpu_target(), kind="cuda", arch="sm_90")
    assert (measurer_for(DOUBLE, target) is None) is not torch.cuda.is_available()
    assert isinstance(measurer_for(DOUBLE, cpu_target()), WorkerMeasurer)


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
    assert story(replace(STATE, failed=0, best_seconds=None), "predicted") == "12 predicted"
