"""The search among decisions, over graphs whose times are played."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from torch_mlc.ir.errors import MlcError
from torch_mlc.scheduler.decisions import (
    Alternative,
    ChosenFor,
    DecisionOverrides,
    DecisionRecord,
    parse_overrides,
)
from torch_mlc.scheduler.tuning.database import GraphDecisions, Verdict
from torch_mlc.scheduler.tuning.flips import FlipTrial, PlannedGraph, race_graphs, search_flips
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, MeasuringError


def record(key: str, cost: float = 1000.0, other: float = 1100.0) -> DecisionRecord:
    ways = (Alternative("a", cost), Alternative("b", other))
    return DecisionRecord("product", key, ways, "a", "a", ChosenFor.COST, ("x",), 100)


@dataclass
class Played:
    """Graphs that take a time each: the first decision of a set that ``seconds`` knows multiplies it. ``failing`` keys
    crash, and ``nothing`` changes no call."""

    factors: Mapping[str, float]
    together: Mapping[frozenset[str], float] = field(default_factory=dict)
    failing: frozenset[str] = frozenset()
    nothing: frozenset[str] = frozenset()
    records: tuple[DecisionRecord, ...] = ()
    noise: float = 0.003
    step: float = 0.5
    now: float = 0.0
    entered: list[str] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.records = self.records or tuple(record(k) for k in (*self.factors, *self.failing, *self.nothing))

    def clock(self) -> float:
        return self.now

    def plan(self, chosen: DecisionOverrides) -> PlannedGraph:
        keys = {key for (_, key), option in chosen.chosen.items() if option == "b"}
        if "impossible" in keys:
            raise MlcError("there is no such way")
        key = ",".join(sorted(keys - self.nothing))
        return PlannedGraph(chosen, key, 1e-3, tuple(r for r in self.records))

    def enter(self, planned: PlannedGraph) -> Entered | Failure:
        self.now += self.step
        self.entered.append(planned.key)
        keys = frozenset(k for k in planned.key.split(",") if k)
        if keys & self.failing:
            return Failure(Verdict.CRASHED, "the process that ran it crashed (SIGSEGV)")
        time = self.together.get(keys)
        if time is None:
            time = 1e-3
            for key in keys:
                time *= self.factors.get(key, 1.0)
        return self._known(time, planned.key)

    def _known(self, time: float, key: str) -> Entered:
        self.count += 1
        self.running[self.count] = time
        return Entered(self.count, key)

    def copy(self, number: int) -> Entered:
        return self._known(self.running[number], "")

    def samples(self, numbers: Sequence[int], rounds: int) -> dict[int, list[float]]:
        slow = [1.0 + self.random.random() for _ in range(rounds)]
        return {n: [self.running[n] * s * self.random.gauss(1.0, self.noise) for s in slow] for n in numbers}

    def leave(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            del self.running[n]


def search(played: Played, budget: float = 100.0, **more: object):  # type: ignore[no-untyped-def]
    return search_flips(played, played.plan(DecisionOverrides()), budget, clock=played.clock, **more)  # type: ignore[arg-type]


def test_a_decision_that_costs_were_wrong_about_is_found() -> None:
    played = Played({"good": 0.7, "bad": 1.5})
    told: list[tuple[str, Verdict | None]] = []

    def heard(trial: FlipTrial, seconds: float | None, sigma: float) -> None:
        told.append((trial.record.key, trial.verdict))

    found = search(played, record=heard)
    assert found.chosen.plain() == {"product:good": "b"}
    assert found.speedup == pytest.approx(1 / 0.7, rel=0.02) and found.looked_at == 2
    assert [t.record.key for t in found.won] == ["good"]
    assert set(told) == {("good", Verdict.ACCEPTED), ("bad", Verdict.TIMED)}


def test_equals_are_not_taken() -> None:
    taken = 0
    for seed in range(40):
        played = Played(dict.fromkeys("abcd", 1.0), noise=0.02)
        played.random = random.Random(seed)
        taken += bool(search(played).chosen)
    assert taken <= 1


def test_decisions_are_taken_together_only_where_that_gains() -> None:
    played = Played({"one": 0.8, "two": 0.9, "three": 0.95})
    found = search(played)
    assert found.chosen.plain() == {f"product:{k}": "b" for k in ("one", "two", "three")}
    assert found.speedup == pytest.approx(1 / (0.8 * 0.9 * 0.95), rel=0.03)
    against = Played({"one": 0.8, "two": 0.9}, {frozenset({"one", "two"}): 0.9e-3})
    assert search(against).chosen.plain() == {"product:one": "b"}


def test_a_crash_is_a_verdict_and_the_search_goes_on() -> None:
    played = Played({"good": 0.8}, failing=frozenset({"broken"}))
    heard: dict[str, Verdict | None] = {}
    found = search(played, record=lambda t, s, n: heard.update({t.record.key: t.verdict}))
    assert found.chosen.plain() == {"product:good": "b"}
    assert heard == {"good": Verdict.ACCEPTED, "broken": Verdict.CRASHED}
    again = Played({"good": 0.8}, failing=frozenset({"broken"}))
    crashed = parse_overrides({"product:broken": "b"})
    known = {crashed: GraphDecisions(crashed, None, None, 0, None, Verdict.CRASHED, "", "")}
    search(again, known=known)
    assert not any("broken" in key for key in again.entered)


def test_what_changes_nothing_is_impossible_or_hopeless_is_not_raced() -> None:
    played = Played({}, nothing=frozenset({"same"}))
    played.records = (record("same"), record("impossible"), record("far", 1000.0, 9000.0))
    found = search(played)
    assert not played.entered and not found.trials and found.looked_at == 3


def test_what_is_fixed_stays() -> None:
    played = Played({"good": 0.5})
    assert not search(played, fixed=[("product", "good")]).trials


def test_the_budget_ends_the_search() -> None:
    played = Played({f"k{n}": 1.0 for n in range(20)}, step=1.0)
    found = search(played, budget=4.0)
    assert len(found.trials) <= 4 and found.unraced > 10 and played.now <= 6.0


def test_an_interrupt_passes_through_and_what_was_known_is_told() -> None:
    played, told = Played({"one": 0.8, "two": 0.9}), list[str]()

    def heard(trial: FlipTrial, seconds: float | None, sigma: float) -> None:
        told.append(trial.record.key)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(played, record=heard)
    assert len(told) == 1


def test_a_graph_that_does_not_run_is_an_error() -> None:
    played = Played({"good": 0.5}, failing=frozenset({"base"}))
    base = PlannedGraph(DecisionOverrides(), "base", 1e-3, (record("good"),))
    with pytest.raises(MeasuringError, match="as it is does not run on random inputs: the process that ran it crashed"):
        search_flips(played, base, 10.0, clock=played.clock)


def test_whole_graphs_are_raced() -> None:
    played = Played({"fast": 0.9, "slow": 1.1})
    default, fast, slow = (PlannedGraph(DecisionOverrides(), key, 0.0, ()) for key in ("", "fast", "slow"))
    one, sigma = race_graphs(played, default, fast)
    other, _ = race_graphs(played, default, slow)
    assert one.high < 1.0 < other.low and one.count == 36 and sigma < 0.01
