"""What candidates of tuning run on, and how they are timed."""

from __future__ import annotations

import io
import math
import random
import time
from dataclasses import replace
from typing import cast

import pytest
import torch

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.tuning import measure
from torch_mlc.runtime.tuning.measure import Bench, MeasureError, ProcessorClock, make_arguments
from torch_mlc.runtime.tuning.measuring import WorkerMeasurer, measurer_for
from torch_mlc.runtime.tuning.progress import Totals, TuneProgress, story
from torch_mlc.scheduler.schedule.trace import Trace
from torch_mlc.scheduler.tuning.database import Verdict
from torch_mlc.scheduler.tuning.race import TOGETHER, Estimate
from torch_mlc.scheduler.tuning.search import Progress, SearchResult


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


def test_samples_are_calls_that_take_turns() -> None:
    """By a clock that each call moves. A sample is as many calls as fill it, behind one that is not timed."""
    now, ran = 0.0, ""

    def run(name: str, seconds: float) -> None:
        nonlocal now, ran
        ran += name
        now += seconds

    runs = {0: lambda: run("a", 0.9e-4), 1: lambda: run("b", 1.9e-4)}
    found = ProcessorClock(lambda: now).samples(runs, 3, 0)
    assert found == {0: [pytest.approx(0.9e-4)] * 3, 1: [pytest.approx(1.9e-4)] * 3}
    a, b = "a" + 4 * "a", "b" + 4 * "b"
    assert ran == 5 * "a" + a + b + b + a + b + a


def test_rounds_that_take_long_are_fewer() -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 1.0

    found = ProcessorClock(lambda: now).samples({0: run, 1: run}, 100, 0)
    assert found == {0: [1.0], 1: [1.0]}


def test_operands_move_between_rounds_and_keep_their_elements() -> None:
    """By whole cache lines, each by itself, also where a tensor has gaps."""
    turned = replace(DOUBLE.params[0], strides=(DOUBLE.params[0].strides[0] * 3,))
    arguments = make_arguments(replace(DOUBLE, params=(turned, DOUBLE.params[1])), "cpu")
    passed, content = arguments.passed, [t.clone() for t in arguments.tensors]
    rng, places = random.Random(0), list[tuple[int, ...]]()
    for _ in range(20):
        arguments.move(rng)
        places.append(tuple(t.data_ptr() for t in arguments.tensors))
        assert passed is arguments.passed and passed == [*places[-1], 1000]
        assert all(torch.equal(a, b) for a, b in zip(arguments.tensors, content, strict=True))
        assert all(
            t.stride() == c.stride() or c.stride() == (1,) for t, c in zip(arguments.tensors, content, strict=True)
        )
    assert len(set(places)) > 15 and len({a - b for a, b in places}) > 15
    assert {p % 64 for place in places for p in place} == {arguments.storages[0].data_ptr() % 64}


def test_a_race_moves_operands_as_often_as_rounds_count_by_themselves() -> None:
    moves: list[int] = []
    runs = {0: lambda: None, 1: lambda: None}
    found = ProcessorClock().samples(runs, 9, 0, lambda: moves.append(len(moves)))
    assert len(moves) == 9 // TOGETHER and all(len(s) == 9 for s in found.values())


def test_what_stops_a_thread_is_not_timed() -> None:
    """A call that waits takes no time of its thread; the clock of teams counts it."""
    waits = {0: lambda: time.sleep(0.01)}
    of_one, of_teams = (ProcessorClock.of_threads(n).samples(waits, 3, 0)[0] for n in (1, 2))
    assert max(of_one) < 0.005 < min(of_teams)


def test_arguments_of_an_update_in_place_have_content() -> None:
    nest = replace(DOUBLE, annotations=(("in_place", "out0"),))
    assert float(make_arguments(nest, "cpu").tensors[1].std()) > 0.5


def test_results_are_those_of_the_default_or_near_them() -> None:
    """Equal bits, other bits of the same numbers, and what is no number where the default has none; nothing else."""
    bench = Bench(DOUBLE, "cpu")
    ramp = torch.linspace(1.0, 4.0, 1000)
    ramp[7] = math.nan

    def giving(result: torch.Tensor) -> None:
        def run() -> None:
            bench.arguments.tensors[1].copy_(result)

        bench.check(run)

    giving(ramp)
    for other in (ramp, ramp * (1 + 1e-6), ramp * 1.01):
        giving(other)
    for wrong in (ramp * 1.2, ramp.nan_to_num(1.0), torch.full((1000,), math.nan), ramp.flip(0)):
        for _ in range(2):
            with pytest.raises(MeasureError, match="output 0 differs") as found:
                giving(wrong)
            assert found.value.verdict is Verdict.WRONG
    giving(ramp)


def test_a_kernel_over_a_table_is_not_timed() -> None:
    assert measurer_for(replace(DOUBLE, annotations=(("table", True),)), cpu_target()) is None


def test_no_gpu_no_measurer() -> None:
    target = replace(cpu_target(), kind="cuda", arch="sm_90")
    assert (measurer_for(DOUBLE, target) is None) is not torch.cuda.is_available()
    assert isinstance(measurer_for(DOUBLE, cpu_target()), WorkerMeasurer)


STATE = Progress("double", 12, 1, 1.0, 10.0, Estimate(2 / 3, 0.64, 0.69, 36), "cpu_pointwise(unroll=2)")


def test_the_bar_is_for_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, is_drawn in ((io.StringIO(), False), (Terminal(), True)):
        with TuneProgress(stream) as progress:
            progress(STATE)
        assert ("double" in stream.getvalue()) is is_drawn


def test_the_story_tells_what_was_won() -> None:
    told = "12 measured, 1 failed, 1.50x (1.45 to 1.56) of the default: cpu_pointwise(unroll=2)"
    assert story(STATE) == told
    assert story(replace(STATE, failed=0, found=None)) == "12 measured"
    assert story(replace(STATE, failed=0, found=None), "predicted") == "12 predicted"
    unsure = replace(STATE, failed=0, found=Estimate(0.5, 0.0, math.inf, 4))
    assert story(unsure) == "12 measured, 2.00x of the default: cpu_pointwise(unroll=2)"


def outcome(ratio: float, sigma: float, hidden: float = 0.0, seconds: float = 1e-3) -> SearchResult:
    found = Estimate(ratio, ratio, ratio, 36)
    return SearchResult("k", Trace(), ratio < 1.0, found, sigma, 2.5, seconds, (), hidden)


def test_one_line_tells_what_tuning_came_to() -> None:
    """Kernels count by the time that they take in a run of the graph."""
    found = [(outcome(0.5, 0.004), 1), (outcome(1.0, 0.012, seconds=2e-3), 3), (outcome(0.9, 0.01), 1)]
    assert str(Totals.of(found)) == "tuned 3 kernels in 7.5 s: 2 faster, 1.08x (noise 1 %)"
    assert str(Totals.of(found[1:2])) == "tuned 1 kernel in 2.5 s: none faster than by default (noise 1 %)"
    assert str(Totals.of([(outcome(0.5, 0.004), 1)] * 8)) == "tuned 8 kernels in 20 s: 8 faster, 2.00x (noise 0.4 %)"
    assert not Totals.of(found).warning
    assert (
        "seemed 4 % faster, which this machine's noise (6 %) may be" in Totals.of([(outcome(1, 0.06, 0.04), 1)]).warning
    )
