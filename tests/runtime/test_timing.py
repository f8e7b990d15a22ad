"""Phases and counters."""

import time

import pytest

from torch_mlc.runtime.counters import Counters
from torch_mlc.runtime.timing import PhaseTimer, ProcessTimes


def test_an_inner_phase_is_not_counted_in_the_outer_one() -> None:
    timer = PhaseTimer()
    begin = time.perf_counter()
    with timer.phase("lower"), timer.phase("emit"):
        time.sleep(0.05)
    whole = time.perf_counter() - begin
    assert list(timer.seconds) == ["lower", "emit"]
    assert timer.seconds["emit"] >= 0.05 > timer.seconds["lower"]
    assert timer.total == pytest.approx(whole, abs=0.01)


def test_counters_tell_what_was_added_since_a_snapshot() -> None:
    counters = Counters()
    counters.add("library_calls", 3)
    before = counters.snapshot()
    counters.add("kernels_generated")
    assert counters.since(before) == {"kernels_generated": 1}
    counters.reset()
    assert set(counters.snapshot().values()) == {0}
    with pytest.raises(AssertionError, match="no counter"):
        counters.add("kernels")


def test_process_times_keep_kinds_of_graphs_apart() -> None:
    times = ProcessTimes()
    times.add("forward", {"fuse": 0.25, "emit": 1.0})
    times.add("backward", {"fuse": 0.5})
    times.add("forward", {"fuse": 0.25})
    assert times.snapshot() == {"forward: fuse": 0.5, "forward: emit": 1.0, "backward: fuse": 0.5}
    assert times.total == 2.0
