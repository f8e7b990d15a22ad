"""Tuning by a measurer that only pretends: what is tried, what is kept, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from torch_mlc.scheduler.tuning import tune as module
from torch_mlc.scheduler.tuning.database import Database
from torch_mlc.scheduler.tuning.tune import Measurement, Progress, tune

CPU = Target("cpu", "znver3", 2)


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
    return {"factor": (8, 2, 4, 13, 16, 32), "unroll": (False, True)}


TILED = Rule("tiled", ("cpu",), lambda nest, target: True, _parameters, _apply)


@pytest.fixture(autouse=True)
def _one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "design_space", lambda nest, target: DesignSpace(nest, target, (TILED,)))


class Pretender:
    """Takes time by a formula, and advances a clock of its own by a second a candidate."""

    def __init__(self, seconds: Callable[[int, bool], Measurement]) -> None:
        self.seconds, self.now, self.asked = seconds, 0.0, []  # type: ignore[var-annotated]

    def measure(self, candidates: list[Schedule]) -> Sequence[Measurement]:
        found = []
        for c in candidates:
            steps = c.trace.steps
            key = (dict(steps[0].args)["factors"][1], len(steps) > 1)
            self.asked.append(key)
            self.now += 1.0
            found.append(self.seconds(*key))
        return found

    def tune(
        self, budget: float, db: Database | None = None, progress: Callable[[Progress], None] | None = None
    ) -> Trace:
        return tune(pointwise(), CPU, self, budget, db, progress, clock=lambda: self.now)


def choice(trace: Trace) -> tuple[Any, bool]:
    return dict(trace.steps[0].args)["factors"][1], len(trace.steps) > 1


def test_the_default_is_first_and_the_fastest_is_found() -> None:
    p = Pretender(lambda f, u: abs(f - 16) + (0.5 if u else 1.0))
    assert choice(p.tune(1e9)) == (16, True)
    assert p.asked[0] == (8, False)
    assert len(p.asked) == 10 + 2  # every legal point once, the default and the winner again
    assert p.asked[-2:] == [(8, False), (16, True)]


def test_neighbours_of_the_best_come_before_the_rest() -> None:
    p = Pretender(lambda f, u: abs(f - 16) + (0.5 if u else 1.0))
    p.tune(7.0)
    assert (16, True) in p.asked[:9]


def test_the_budget_ends_the_search() -> None:
    p = Pretender(lambda f, u: float(f))
    p.tune(0.0)
    assert p.asked == [(8, False)]


def test_nothing_slower_than_the_default_is_returned() -> None:
    # The second look finds that the first one of the winner was luck.
    looks: dict[tuple[int, bool], int] = {}

    def seconds(f: int, u: bool) -> float:
        looks[f, u] = looks.get((f, u), 0) + 1
        return 5.0 if f == 8 and not u else 1.0 if looks[f, u] == 1 and f == 4 else 9.0

    assert choice(Pretender(seconds).tune(1e9)) == (8, False)


def test_failures_are_kept_and_never_chosen(tmp_path: Path) -> None:
    p = Pretender(lambda f, u: RuntimeError("spills") if u else float(f))
    with Database(tmp_path / "t.db") as db:
        assert choice(p.tune(1e9, db)) == (2, False)
        known = db.measured(structural_key(pointwise()), CPU)
    assert sum(v is None for v in known.values()) == 5 and len(known) == 10


def test_a_default_that_fails_gives_way() -> None:
    p = Pretender(lambda f, u: RuntimeError("no") if f == 8 else float(f))
    assert choice(p.tune(1e9))[0] == 2


def test_an_interrupt_loses_nothing_and_the_next_run_goes_on(tmp_path: Path) -> None:
    p = Pretender(lambda f, u: float(f))
    calls = 0

    def interrupt(state: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with Database(tmp_path / "t.db") as db:
        with pytest.raises(KeyboardInterrupt):
            p.tune(1e9, db, interrupt)
        measured = set(p.asked)
        kept = len(db.measured(structural_key(pointwise()), CPU))
        assert kept == 5
        p.asked.clear()
        assert choice(p.tune(1e9, db))[0] == 2
        assert len(set(p.asked) | measured) == 10
        assert len(p.asked) <= 10 - kept + 3  # the rest, the default once more, and the second look
        p.asked.clear()
        p.tune(1e9, db)
        assert len(p.asked) == 3
        found = db.lookup(structural_key(pointwise()), CPU)
        assert found is not None and choice(found.trace)[0] == 2


def test_progress_tells_the_best_so_far() -> None:
    states: list[Progress] = []
    Pretender(lambda f, u: float(f)).tune(1e9, progress=states.append)
    assert states[0].default_seconds == states[0].best_seconds == 8.0
    assert states[-1].best_seconds == 2.0 and states[-1].best.startswith("tiled(factor=2")
    assert [s.elapsed for s in states] == sorted(s.elapsed for s in states)


def test_no_rule_that_applies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    never = Rule("never", ("cpu",), lambda n, t: True, lambda n, t: {"factor": (13,), "unroll": (False,)}, _apply)
    monkeypatch.setattr(module, "design_space", lambda nest, target: DesignSpace(nest, target, (never,)))
    with pytest.raises(ScheduleError, match="no rule applies"):
        Pretender(lambda f, u: 1.0).tune(1.0)


def test_a_lucky_time_is_looked_at_twice(tmp_path: Path) -> None:
    """Factors 2 and 4 seem fast once; the database ends with the one that is fast both times."""
    lucky = {(2, False): [1e-6, 9e-6], (4, False): [2e-6, 9e-6], (16, False): [3e-6, 3e-6]}

    def seconds(factor: int, unroll: bool) -> float:
        times = lucky.get((factor, unroll))
        return (times.pop(0) if len(times) > 1 else times[0]) if times else 5e-6

    with Database(tmp_path / "tuning.sqlite") as db:
        assert choice(Pretender(seconds).tune(1000, db)) == (16, False)
        record = db.lookup(structural_key(pointwise()), CPU)
        assert record is not None and choice(record.trace) == (16, False)
