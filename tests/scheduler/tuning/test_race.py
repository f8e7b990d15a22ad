"""Races: what equals are taken for, and what is accepted, on machines that are as bad as real ones.

The machines are simulated with fixed seeds: samples with heavy tails, drifts, phases in which everything is slower, and
candidates that are equal but for where their code happens to lie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from torch_mlc.scheduler.tuning.race import CONFIDENCE, NOTHING_KNOWN, Race, estimate, spread, turns

DEFAULT, TWIN = 0, 1


@dataclass
class Machine:
    """Samples of kernels that take a second each, times ``speed``, one after the other.

    ``noise``: relative, of each sample; ``tails``: how often one takes up to four times as long; ``drift``: relative, a
    hundred samples; ``phases``: how often a phase of some twenty samples begins in which all takes 1.3 times as long.
    """

    seed: int
    noise: float = 0.01
    tails: float = 0.03
    drift: float = 0.0
    phases: float = 0.0
    rng: random.Random = field(init=False)
    ran: int = 0
    slow: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def sample(self, speed: float) -> float:
        self.ran += 1
        if self.slow:
            self.slow -= 1
        elif self.rng.random() < self.phases:
            self.slow = self.rng.randrange(5, 40)
        took = speed * math.exp(self.noise * self.rng.gauss(0.0, 1.0)) * (1.0 + self.drift * self.ran / 100)
        if self.rng.random() < self.tails:
            took *= 1.0 + 3.0 * self.rng.random()
        return took * (1.3 if self.slow else 1.0)

    def race(self, speeds: dict[int, float], rounds: int) -> Race:
        race = Race(DEFAULT, TWIN)
        samples: dict[int, list[float]] = {n: [] for n in speeds}
        for order in turns([*speeds], rounds):
            for n in order:
                samples[n].append(self.sample(speeds[n]))
        race.add(samples)
        return race


MACHINES: dict[str, Callable[[int], Machine]] = {
    "quiet": lambda seed: Machine(seed, noise=0.002, tails=0.0),
    "tails": lambda seed: Machine(seed, noise=0.02, tails=0.1),
    "drift": lambda seed: Machine(seed, noise=0.01, drift=0.2),
    "phases": lambda seed: Machine(seed, noise=0.01, phases=0.02),
    "others run": lambda seed: Machine(seed, noise=0.03, tails=0.4),
    "all of it": lambda seed: Machine(seed, noise=0.04, tails=0.1, drift=0.1, phases=0.02),
}


def searched(machine: Machine, speeds: list[float], placed: float = 0.0) -> float | None:
    """What a search does with candidates of some speeds: a short race of all of them, and a second one of the best
    three. The speed of the one that is accepted. ``placed``: how much kernels differ by where they lie, each time they
    are loaded."""

    def there(speed: float) -> float:
        return speed * math.exp(placed * machine.rng.gauss(0.0, 1.0))

    everyone = {DEFAULT: there(1.0), TWIN: there(1.0)} | {k + 2: there(s) for k, s in enumerate(speeds)}
    first = machine.race(everyone, 12)
    chosen = sorted(range(2, len(speeds) + 2), key=lambda n: first.estimate(n).ratio)[:3]
    again = machine.race({n: everyone[n] for n in (DEFAULT, TWIN, *chosen)}, 36)
    better = [n for n in chosen if again.is_better(n, len(chosen))]
    if not better:
        return None
    return speeds[min(better, key=lambda n: again.estimate(n).ratio) - 2]


@pytest.mark.parametrize("name", MACHINES)
def test_equals_are_seldom_taken_for_better(name: str) -> None:
    """Eight candidates as fast as the default, four hundred times: none is accepted in 98 of a hundred."""
    accepted = sum(searched(MACHINES[name](seed), [1.0] * 8) is not None for seed in range(400))
    assert accepted <= 8, accepted


def test_equals_in_different_places_are_seldom_taken_for_better() -> None:
    """Loaded anew, each differs from the others by a quarter of a percent, however often it is timed."""
    accepted = sum(searched(MACHINES["quiet"](seed), [1.0] * 8, 0.0025) is not None for seed in range(400))
    assert accepted <= 8, accepted


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_slower_is_accepted(name: str) -> None:
    """Candidates from 2 % slower to 2 % faster: none that is more than 1 % slower ever wins."""
    for seed in range(200):
        rng = random.Random(seed)
        found = searched(MACHINES[name](seed), [rng.uniform(0.98, 1.02) for _ in range(8)])
        assert found is None or found < 1.01, (seed, found)


@pytest.mark.parametrize(("name", "gain"), [("quiet", 0.02), ("drift", 0.05), ("phases", 0.05), ("all of it", 0.2)])
def test_what_is_faster_is_found(name: str, gain: float) -> None:
    """One of eight is faster by more than the machine hides: it is taken nine times in ten."""
    speeds = [1.0] * 7 + [1.0 - gain]
    found = sum(searched(MACHINES[name](seed), speeds) == 1.0 - gain for seed in range(100))
    assert found >= 90, found


@pytest.mark.parametrize("name", ["quiet", "tails", "drift", "phases"])
def test_bounds_hold_as_often_as_they_say(name: str) -> None:
    """A candidate 10 % slower: each bound is on its side in 95 of a hundred races, give or take their number."""
    races = [MACHINES[name](seed).race({DEFAULT: 1.0, TWIN: 1.0, 2: 1.1}, 36) for seed in range(400)]
    found = [r.estimate(2) for r in races]
    for held in (sum(e.low <= 1.1 for e in found), sum(e.high >= 1.1 for e in found)):
        assert held >= 400 * CONFIDENCE - 15, held


def test_noise_is_what_equals_differ_by() -> None:
    """The noise of a quiet machine is below that of a loud one, and covers what equals differ by in most races."""
    quiet, loud = ([m(seed).race({DEFAULT: 1.0, TWIN: 1.0, 2: 1.0}, 36) for seed in range(100)]
                   for m in (MACHINES["quiet"], MACHINES["all of it"]))  # fmt: skip
    assert max(r.sigma for r in quiet) < 0.005 < sum(r.sigma for r in loud) / 100
    for races in (quiet, loud):
        within = sum(abs(r.estimate(2).gain) <= 2 * r.sigma for r in races)
        assert within >= 90, within


def test_a_default_in_another_round_is_no_default() -> None:
    """The machine is half as fast in the second round; only what ran in the same round counts."""
    race = Race(DEFAULT, TWIN)
    race.add({DEFAULT: [1.0, 2.0], TWIN: [1.0, 2.0], 2: [0.9, 1.8]})
    race.add({DEFAULT: [4.0], TWIN: [4.0], 3: [2.0]})
    assert race.ratios(2) == pytest.approx([0.9, 0.9]) and race.ratios(3) == [0.5]
    assert race.seconds(2) == pytest.approx(1.35) and race.seconds(9) == math.inf


def test_few_rounds_bound_nothing() -> None:
    assert estimate([]) == NOTHING_KNOWN
    assert (estimate([0.5] * 3).low, estimate([0.5] * 3).high) == (0.0, math.inf)
    found = estimate([0.5] * 30)
    assert (found.ratio, found.low, found.high) == (0.5, 0.5, 0.5) and found.speedup == 2.0 and found.gain == 0.5
    race = Race(DEFAULT, TWIN)
    race.add({DEFAULT: [1.0] * 3, TWIN: [1.0] * 3, 2: [0.1] * 3})
    assert not race.is_better(2)
    race.add({DEFAULT: [1.0] * 15, TWIN: [1.0] * 15, 2: [0.1] * 15})
    assert race.is_better(2)


def test_without_its_copy_nothing_beats_the_default() -> None:
    race = Race(DEFAULT, TWIN)
    race.add({DEFAULT: [1.0] * 40, 2: [0.1] * 40})
    assert race.sigma == math.inf and not race.is_better(2)


def test_who_is_behind_for_sure() -> None:
    race = Race(DEFAULT, TWIN)
    race.add({DEFAULT: [1.0] * 8, TWIN: [1.0] * 8, 2: [0.5] * 8, 3: [0.9] * 8, 4: [0.4, 0.6] * 4})
    assert race.is_behind(3, 2) and not race.is_behind(4, 2) and not race.is_behind(2, 2)


def test_everyone_runs_once_a_round_in_every_place() -> None:
    orders = turns([5, 6, 7], 6)
    assert all(sorted(order) == [5, 6, 7] for order in orders)
    assert {order[0] for order in orders[:3]} == {5, 6, 7}
    follow = {(a, b) for order in orders for a, b in pairwise(order)}
    assert len(follow) == 6
    assert turns([5, 6, 7], 2, begun=4) == orders[4:] and turns([], 2) == [[], []]


def test_the_spread_is_that_of_a_median() -> None:
    rng = random.Random(1)
    medians = [estimate([rng.gauss(1.0, 0.1) for _ in range(36)]).ratio for _ in range(400)]
    around = math.sqrt(sum((m - 1.0) ** 2 for m in medians) / len(medians))
    found = [spread([rng.gauss(1.0, 0.1) for _ in range(36)]) for _ in range(400)]
    assert 0.6 < sum(found) / len(found) / around < 1.6
