"""Tuning by a measurer that only pretends: what is tried, what is kept, and when it ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Load, call, symbol
from torch_mlc.ir.nest.loops import Axis, Block, Buffer, Loop, LoopNest, Store
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules.registry import DesignSpace, Params, Rule
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.schedule.trace import Trace
from torch_mlc.scheduler.tuning import space as module
from torch_mlc.scheduler.tuning.database import Database, Verdict
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, MeasuringError
from torch_mlc.scheduler.tuning.search import Progress, SearchResult
from torch_mlc.scheduler.tuning.space import Draft, Space
from torch_mlc.scheduler.tuning.strategies import Evolution
from torch_mlc.scheduler.tuning.tune import tune

CPU = Target("cpu", "znver3", 2)
FACTORS = (8, 2, 4, 13, 16, 32)
SLOW = Failure(Verdict.LATE, "it did not end within 20 s")


def pointwise() -> LoopNest:
    n, i, v = symbol("s0"), symbol("i0"), symbol("b0_i0")
    x, y = (Buffer(name, (n,), (symbol("s0") ** 0,), DType.FLOAT32) for name in ("in0", "out0"))
    block = Block("b0", (Axis(i, n),), (v,), (Store("out0", (i,), call("neg", Load("in0", (i,), DType.FLOAT32))),))
    return LoopNest("f", (x, y), ("out0",), (Loop(v, n, (block,)),))


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    (loop,) = schedule.get_loops("b0")
    factor, unrolled = int(params["factor"]), bool(params["unroll"])
    if factor == 13:
        raise ScheduleError("split", "unlucky")
    _, inner = schedule.split(loop, [None, factor])
    if unrolled:
        schedule.unroll(inner)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[int, ...]]:
    return {"factor": FACTORS, "unroll": (False, True)}


TILED = Rule("tiled", ("cpu",), lambda nest, target: True, _parameters, _apply)


@pytest.fixture(autouse=True)
def _one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "design_space", lambda nest, target: DesignSpace(nest, target, (TILED,)))


def choice(trace: Trace) -> tuple[int, bool]:
    return dict(trace.steps[0].args)["factors"][1], len(trace.steps) > 1


class Listed:
    """A strategy that proposes what is nearest to the default, by parameters alone."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        names = [(f, u) for u in (False, True) for f in FACTORS]
        self.left = [Draft("tiled", (("factor", f), ("unroll", u))) for f, u in names]
        self.observed: dict[tuple[int, bool], float | None] = {}

    def propose(self, count: int) -> list[Draft]:
        chosen, self.left = self.left[:count], self.left[count:]
        return chosen

    def suggest(self, drafts: Sequence[Draft]) -> None:
        pass

    def observe(self, draft: Draft, speedup: float | None) -> None:
        params = dict(draft.params)
        self.observed[int(params["factor"]), bool(params["unroll"])] = speedup


class Pretender:
    """Takes time by a formula: ``seconds(factor, unroll, visit)``, where a visit is one call for samples. What enters
    takes a second of a clock of its own. ``code`` says whose machine code is the same."""

    def __init__(
        self,
        seconds: Callable[[int, bool, int], float | Failure],
        enters: Callable[[int, bool], Failure | None] = lambda factor, unroll: None,
        code: Callable[[int, bool], str] = lambda factor, unroll: f"{factor} {unroll}",
    ) -> None:
        self.seconds, self.enters, self.code, self.now = seconds, enters, code, 0.0
        self.choices: list[tuple[int, bool]] = []
        self.entered: list[tuple[int, bool]] = []
        self.raced: list[list[tuple[int, bool]]] = []
        self.visits: dict[int, int] = {}
        self.here: set[int] = set()
        self.strategy: Listed | None = None

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered | Failure]:
        for c in candidates:
            key = choice(c.trace)
            self.entered.append(key)
            self.now += 1.0
            yield self.enters(*key) or self._number(key)

    def _number(self, key: tuple[int, bool]) -> Entered:
        self.choices.append(key)
        self.here.add(len(self.choices) - 1)
        return Entered(len(self.choices) - 1, self.code(*key))

    def copy(self, number: int) -> Entered | Failure:
        return self._number(self.choices[number])

    def samples(self, numbers: Sequence[int], rounds: int) -> dict[int, list[float] | Failure]:
        assert self.here >= set(numbers)
        self.raced.append([self.choices[n] for n in numbers])
        found: dict[int, list[float] | Failure] = {}
        for n in numbers:
            self.visits[n] = self.visits.get(n, 0) + 1
            seconds = self.seconds(*self.choices[n], self.visits[n])
            found[n] = seconds if isinstance(seconds, Failure) else [seconds] * rounds
        return found

    def leave(self, numbers: Sequence[int]) -> None:
        self.here -= set(numbers)

    def close(self) -> None:
        pass

    def tune(
        self, budget: float, db: Database | None = None, progress: Callable[[Progress], None] | None = None, **more: Any
    ) -> SearchResult:
        def listed(space: Space, rng: random.Random) -> Listed:
            self.strategy = Listed(space, rng)
            return self.strategy

        given = {"strategy": listed, "batch": 4} | more
        return tune(pointwise(), CPU, self, budget, db, progress, clock=lambda: self.now, **given)


def by_factor(factor: int, unroll: bool, visit: int) -> float:
    return abs(factor - 16) + (0.5 if unroll else 1.0)


def test_the_fastest_is_found_and_raced_with_the_default_once_more() -> None:
    p = Pretender(by_factor)
    found = p.tune(1e9)
    assert found.is_faster and choice(found.trace) == (16, True)
    assert (found.found.ratio, found.sigma) == (pytest.approx(0.5 / 9.0), 0.0) and found.default_seconds == 9.0
    assert p.entered[0] == (8, False) and len(p.entered) == len(set(p.entered)) == 10
    assert all(r[:2] == [(8, False), (8, False)] for r in p.raced)
    assert p.raced[-1][2:] == [(16, True), (16, False), (8, True)][: len(p.raced[-1]) - 2]
    assert len(p.here) <= 5  # what cannot win any more was given back


def test_each_batch_has_the_best_so_far_beside_it() -> None:
    p = Pretender(by_factor)
    p.tune(1e9)
    assert all((16, False) in r or (16, True) in r for r in p.raced[4:])


def test_what_is_far_behind_has_few_rounds() -> None:
    p = Pretender(by_factor)
    p.tune(1e9)
    assert sum((2, False) in r for r in p.raced) == 1


def test_the_budget_ends_the_search() -> None:
    p = Pretender(by_factor)
    found = p.tune(3.0)
    assert p.entered == [(8, False), (2, False), (4, False)] and not found.is_faster
    assert choice(found.trace) == (8, False) and found.seconds == 3.0
    nothing = Pretender(by_factor)
    assert not nothing.tune(0.0).is_faster and nothing.entered == [(8, False)]


def test_three_rounds_that_gain_nothing_end_the_search() -> None:
    p = Pretender(lambda f, u, visit: 1.0)
    found = p.tune(1e9, batch=1)
    assert len(p.entered) == 4 - 1 and not found.is_faster  # the default is the first of three


def test_luck_is_not_accepted() -> None:
    """Half the time in the search, as long as the default in the race that counts."""
    p = Pretender(lambda f, u, visit: 0.5 if (f, u) == (4, False) and visit <= 2 else 1.0)
    found = p.tune(1e9, batch=16)
    assert not found.is_faster and choice(found.trace) == (8, False)
    (trial,) = (t for t in found.trials if choice(t.trace) == (4, False))
    assert trial.verdict is Verdict.REJECTED and trial.found is not None and trial.found.ratio == 1.0


def test_what_gains_less_than_one_percent_is_not_accepted() -> None:
    p = Pretender(lambda f, u, visit: 1.0 if f == 8 else 0.992)
    found = p.tune(1e9)
    assert not found.is_faster and not found.hidden


def test_a_gain_that_noise_may_be_is_hidden() -> None:
    """Copies of the default are 3 % apart: 5 % faster may be chance."""

    class Noisy(Pretender):
        def samples(self, numbers: Sequence[int], rounds: int) -> dict[int, list[float] | Failure]:
            found = super().samples(numbers, rounds)
            return found | {numbers[1]: [1.03] * rounds}

    found = Noisy(lambda f, u, visit: 1.0 if f != 4 else 0.96).tune(1e9)
    assert not found.is_faster and 0.03 < found.hidden < 2 * found.sigma


def test_failures_are_verdicts_and_never_chosen(tmp_path: Path) -> None:
    """One does not compile, one gives a wrong result, one hangs in the race."""
    entering = {(4, False): Failure(Verdict.FAILED, "no"), (16, False): Failure(Verdict.WRONG, "differs")}
    p = Pretender(lambda f, u, visit: SLOW if (f, u) == (32, False) else float(f), lambda f, u: entering.get((f, u)))
    with Database(tmp_path / "t.db") as db:
        found = p.tune(1e9, db)
        assert choice(found.trace) == (2, False) and found.failed == 3
        told = {choice(m.record.trace): m.record for m in db.of_workload(structural_key(pointwise()))}
    assert {k: r.verdict for k, r in told.items() if not r.verdict.has_time} == {
        (4, False): Verdict.FAILED, (16, False): Verdict.WRONG, (32, False): Verdict.LATE,
    }  # fmt: skip
    assert told[4, False].error == "no" and told[2, False].verdict is Verdict.ACCEPTED
    assert told[2, False].ratio == 0.25 and told[2, False].against == told[8, False].code_hash == "8 False"
    assert p.strategy is not None and p.strategy.observed[2, False] == 4.0
    assert p.strategy.observed[4, False] is p.strategy.observed[13, True] is None


def test_equal_machine_code_runs_once() -> None:
    p = Pretender(by_factor, code=lambda f, u: f"{f}")
    found = p.tune(1e9)
    assert choice(found.trace)[0] == 16
    assert {k for r in p.raced for k in r} <= {(f, False) for f in FACTORS}
    assert p.strategy is not None and p.strategy.observed[16, True] == p.strategy.observed[16, False] == 9.0


def test_a_default_that_fails_is_told() -> None:
    with pytest.raises(MeasuringError, match="no schedule of its rules runs: no"):
        Pretender(by_factor, lambda f, u: Failure(Verdict.FAILED, "no")).tune(1e9)
    with pytest.raises(MeasuringError, match="now does not: it did not end"):
        Pretender(lambda f, u, visit: SLOW).tune(1e9)


def test_an_interrupt_loses_nothing_and_the_next_run_goes_on(tmp_path: Path) -> None:
    p = Pretender(by_factor)

    def interrupt(state: Progress) -> None:
        if len(p.raced) == 3:
            raise KeyboardInterrupt

    with Database(tmp_path / "t.db") as db:
        with pytest.raises(KeyboardInterrupt):
            p.tune(1e9, db, interrupt)
        measured = set(p.entered)
        assert len(db.measured(structural_key(pointwise()), CPU)) == len(measured) == 3
        again = Pretender(by_factor)
        assert choice(again.tune(1e9, db).trace) == (16, True)
        assert set(again.entered) & measured == {(8, False)}
        record = db.lookup(structural_key(pointwise()), CPU)
        assert record is not None and choice(record.trace) == (16, True)
        # A third search knows all, and races only those that seemed fastest.
        third = Pretender(by_factor)
        assert choice(third.tune(1e9, db).trace) == (16, True)
        assert len(third.entered) <= 4


def test_another_default_makes_ratios_worthless(tmp_path: Path) -> None:
    with Database(tmp_path / "t.db") as db:
        Pretender(by_factor).tune(1e9, db)
        other = Pretender(by_factor, code=lambda f, u: f"other {f} {u}")
        other.tune(1e9, db)
        assert len(other.entered) == 10


def test_progress_tells_the_best_so_far() -> None:
    states: list[Progress] = []
    Pretender(by_factor).tune(1e9, progress=states.append)
    first = next(s for s in states if s.found is not None)
    assert first.found is not None and first.found.ratio == 1.0 and first.measured == 1
    last = states[-1]
    assert last.found is not None and last.found.speedup == 18.0 and last.best.startswith("tiled(factor=16")
    assert (last.measured, last.failed) == (10, 0)
    assert [s.elapsed for s in states] == sorted(s.elapsed for s in states)


def test_no_rule_that_applies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Rule("never", ("cpu",), lambda n, t: True, lambda n, t: {"factor": (13,), "unroll": (False,)}, _apply)
    monkeypatch.setattr(module, "design_space", lambda nest, target: DesignSpace(nest, target, (never,)))
    with pytest.raises(ScheduleError, match="no rule applies"):
        Pretender(by_factor).tune(1.0)


def test_the_strategy_that_searches_finds_it_too() -> None:
    """Not only parameters, but edits of what they make, by the strategy that is used."""

    def seconds(factor: int, unroll: bool, visit: int) -> float:
        return 1.0 if factor == 8 else 0.5

    assert Pretender(seconds).tune(1e9, strategy=Evolution).is_faster
