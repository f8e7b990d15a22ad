"""Several nests in one budget, by measurers that only pretend: the next batch is for the nest that gains most by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from torch_mlc.scheduler.rules.registry import DesignSpace
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning import space as module
from torch_mlc.scheduler.tuning.database import Verdict
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, MeasuringError
from torch_mlc.scheduler.tuning.search import SearchResult
from torch_mlc.scheduler.tuning.tune import LAST_RACE, TuningJob, search_of, tune, tune_together

from .test_tune import CPU, TILED, Listed, Pretender, choice, pointwise

Times = Callable[[int, bool, int], float | Failure]


@pytest.fixture(autouse=True)
def _one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "design_space", lambda nest, target: DesignSpace(nest, target, (TILED,)))


class Clock:
    """What all kernels of a graph share: building a candidate of any takes a tenth of a second of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []


class Kernel(Pretender):
    def __init__(self, name: str, clock: Clock, seconds: Times, fails: Failure | None = None) -> None:
        super().__init__(seconds, lambda f, u: fails)
        self.name, self.clock = name, clock

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        for found in super().enter(candidates):
            self.clock.now += 0.1
            self.clock.order.append(self.name)
            yield found

    def job(self, calls: float, expected: float) -> TuningJob:
        def listed(space: module.Space, rng: random.Random) -> Listed:
            return Listed(space, rng)

        search = search_of(pointwise(), CPU, self, strategy=listed, clock=lambda: self.clock.now)
        return TuningJob(self.name, search, calls, expected)


def steady(seconds: float) -> Times:
    """No schedule is faster."""
    return lambda factor, unroll, visit: seconds


def gaining(seconds: float) -> Times:
    """The further from the default in the list, the faster: each batch gains."""
    order = [(f, u) for u in (False, True) for f in (8, 2, 4, 13, 16, 32)]
    return lambda factor, unroll, visit: seconds * 0.8 ** order.index((factor, unroll))


def together(jobs: Sequence[TuningJob], clock: Clock, budget: float, batch: int = 2) -> dict[str, SearchResult]:
    found = tune_together(jobs, budget, batch=batch, clock=lambda: clock.now)
    assert all(isinstance(f, SearchResult) for f in found.values())
    return found  # type: ignore[return-value]


def test_the_largest_gain_comes_first() -> None:
    """Seconds of a run of the graph: calls × time. The large one has its batches until it gains nothing any more; then
    comes the next one, and so on."""
    clock = Clock()
    seconds, calls = {"small": 1e-8, "large": 1e-3, "often": 1e-6}, {"often": 10.0}
    jobs = [Kernel(n, clock, gaining(s)).job(calls.get(n, 1.0), s) for n, s in seconds.items()]
    found = together(jobs, clock, 1e9)
    assert list(dict.fromkeys(clock.order)) == ["large", "often", "small"]
    assert clock.order == sorted(clock.order, key=["large", "often", "small"].index)
    assert all(f.is_faster for f in found.values()) and list(found) == ["large", "often", "small"]


def test_a_nest_that_gains_nothing_falls_behind() -> None:
    """Three times as long as the other, and steady: its promise halves with each batch."""
    clock = Clock()
    steady_one, other = Kernel("steady", clock, steady(3.0)), Kernel("other", clock, gaining(1.0))
    together([steady_one.job(1, 3.0), other.job(1, 1.0)], clock, 1e9)
    first = clock.order.index("other")
    assert 0 < first < len(clock.order) - 1 - clock.order[::-1].index("steady")
    assert steady_one.entered.count((8, False)) == 1


def test_what_is_expected_is_measured_before_it_counts_again() -> None:
    """By bytes the first is the largest; its time says otherwise."""
    clock = Clock()
    wide, slow = Kernel("wide", clock, gaining(1e-6)), Kernel("slow", clock, gaining(1e-2))
    together([wide.job(1, 100.0), slow.job(1, 90.0)], clock, 1e9)
    assert clock.order[:2] == ["wide", "slow"] and clock.order[2:8] == ["slow"] * 6


def test_the_budget_is_that_of_the_graph() -> None:
    for budget in (0.5, 1.0, 2.0, 4.0):
        clock = Clock()
        jobs = [Kernel(f"k{k}", clock, gaining(1.0 + k)).job(1, 1.0 + k) for k in range(6)]
        found = together(jobs, clock, budget)
        # What is begun ends: one candidate may be built beyond it.
        assert clock.now <= budget + 0.1 and "k5" in found
        assert sum(f.is_faster for f in found.values()) * LAST_RACE <= budget + LAST_RACE
    assert not together([Kernel("k", Clock(), steady(1.0)).job(1, 1.0)], Clock(), 0.0)


@pytest.mark.parametrize("budget", [4.0, 5.0, 6.0])
def test_a_graph_gains_more_than_kernel_after_kernel(budget: float) -> None:
    """Twenty kernels of very different weights, half of which gain nothing, in the same seconds: together, or one after
    the other by shares of what is left, both by the same guesses of their weights."""
    rng = random.Random(0)
    weights = [10 ** rng.uniform(-3, 0) for _ in range(20)]
    times: list[Times] = [gaining(w) if rng.random() < 0.5 else steady(w) for w in weights]
    guesses = [w * 10 ** rng.uniform(-0.5, 0.5) for w in weights]

    def saved(found: Sequence[SearchResult]) -> float:
        return sum(f.default_seconds * f.found.gain for f in found if f.is_faster)

    clock, after = Clock(), Clock()
    jobs = [Kernel(f"k{k}", clock, t).job(1, g) for k, (t, g) in enumerate(zip(times, guesses, strict=True))]
    ours = saved([*together(jobs, clock, budget).values()])
    one_by_one, open_ = list[SearchResult](), sum(guesses)
    for t, g in zip(times, guesses, strict=True):
        kernel, share = Kernel("k", after, t), max(0.0, budget - after.now) * g / open_
        one_by_one.append(tune(pointwise(), CPU, kernel, share, strategy=Listed, batch=2, clock=lambda: after.now))
        open_ -= g
    assert ours > 1.05 * saved(one_by_one) > 0 and clock.now <= budget


def test_one_that_cannot_be_measured_leaves_the_others() -> None:
    clock = Clock()
    bad = Kernel("bad", clock, gaining(9.0), Failure(Verdict.FAILED, "no"))
    late = Kernel("late", clock, lambda f, u, visit: 5.0 if visit < 2 else Failure(Verdict.LATE, "it hangs"))
    good = Kernel("good", clock, gaining(1.0))
    found = tune_together([bad.job(1, 9.0), late.job(1, 5.0), good.job(1, 1.0)], 1e9, clock=lambda: clock.now)
    assert isinstance(found["bad"], MeasuringError) and isinstance(found["late"], MeasuringError)
    good_one = found["good"]
    assert isinstance(good_one, SearchResult) and good_one.is_faster and choice(good_one.trace) == (32, True)
