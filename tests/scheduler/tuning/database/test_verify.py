"""Verifying: every schedule is replayed on the text of its nest, and what is none is named."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import default_schedule, design_space
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database, Workload
from torch_mlc.scheduler.tuning.database.rows import checked_trace
from torch_mlc.scheduler.tuning.database.verify import nest_of, replayed

CPU = Target("cpu", "znver3", 2)
TEXT = """
@nest(outputs=["out0"])
def rows(in0: float32[12, 7], out0: float32[12]):
    for a in serial(12):
        for b in serial(7):
            with block("b0"):
                i = spatial(12, a)
                r = reduction(7, b)
                out0[i] = sum.update(in0[i, r])
"""


@pytest.fixture(scope="module")
def rows() -> LoopNest:
    nest = parse(TEXT)
    assert isinstance(nest, LoopNest)
    return nest


def test_what_does_not_replay_is_named_and_forgotten(rows: LoopNest, tmp_path: Path) -> None:
    good = default_schedule(rows, CPU).trace
    bad = Trace((Step("vectorize", (("loop", "nowhere"),)),), "by hand")
    with Database(tmp_path / "t.sqlite") as db:
        db.record(Workload.of(rows), CPU, good, 1e-6)
        db.record(Workload.of(rows), CPU, bad, 2e-6)
        db.record("unknown", CPU, good, 2e-6)
        db.record(Workload("another", show(rows)), CPU, good, 2e-6)
        seen: list[int] = []
        found = db.verify(seen.append)
        assert (found.replayed, found.unknown, seen[-1]) == (1, 1, 4)
        (wrong, refused) = sorted(found.faults, key=lambda f: f.rule)
        assert wrong.workload == "another" and "of another nest" in wrong.reason
        assert refused.rule == "by hand" and "nowhere" in refused.reason and refused.workload == structural_key(rows)
        assert len(db.verify(forget=True).faults) == 2
        found = db.verify()
        assert (found.replayed, found.unknown, found.faults) == (1, 1, [])
        assert {t.workload for t in db.tuned()} == {structural_key(rows), "unknown"}


def test_all_that_rules_offer_replays_on_the_text(rows: LoopNest) -> None:
    workload = Workload.of(rows)
    nest = nest_of(workload.key, workload.text)
    for candidate in design_space(rows, CPU).candidates():
        again = replayed(checked_trace(candidate.schedule.trace.to_json()), nest)
        assert again.nest == candidate.schedule.nest


@pytest.mark.parametrize(
    "text",
    ["", "import os", "x = 1", "@nest(outputs=[])\ndef f(", TEXT.replace("12", "9**9**9"), TEXT.replace("sum", "none"),
     "(" * 5000, "-" * 100_000 + "1", "#" * (2 << 20), TEXT + TEXT, "\0"],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_nest_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        nest_of("0" * 64, text)


@pytest.mark.filterwarnings("ignore:.*non-Expr arguments")
def test_random_arguments_are_refused_or_legal(rows: LoopNest) -> None:
    """Whatever a stranger writes into a trace: a schedule that computes the same, or a ScheduleError."""
    draw = random.Random(0)
    traces = [json.loads(c.schedule.trace.to_json()) for c in design_space(rows, CPU).candidates()][:8]
    by_hand = Schedule(rows, "by hand")
    _, inner = by_hand.split("b", [None, 3])
    by_hand.split("a", [2, None])
    by_hand.unroll(inner)
    by_hand.parallel("a_0")
    traces += 10 * [json.loads(by_hand.trace.to_json())]
    values: list[Any] = [
        None, True, -1, 0, 3, 2**40, 1.5, "", "a", "b", "b0", "in0", "out0", "local", "ijk", [], [None], ["a", "b"],
        [0, -5], [[]], [None, 1.5], [None, True], {"drawn": "v0"}, {"size": "s0 // 0"}, {"size": "7 % 0"},
        {"size": "x + 1"}, "i, j -> j, i", "blockIdx.x",
    ]  # fmt: skip
    names = sorted({k for t in traces for _, args, _ in t["steps"] for k in args} | {"block", "buffer", "order", "n"})
    refused = 0
    legal: dict[str, LoopNest] = {}
    for _ in range(3000):
        data = json.loads(json.dumps(draw.choice(traces)))
        steps = data["steps"]
        for _ in range(draw.randint(1, 2)):
            match draw.choice((0, 1, 1, 1, 1, 2, 3)):
                case 0:
                    steps.insert(draw.randint(0, len(steps)), [draw.choice(PRIMITIVES), {}, []])
                case 1 if steps:
                    args = draw.choice(steps)[1]
                    args[draw.choice(list(args) or names)] = draw.choice(values)
                case 2 if steps:
                    step = draw.choice(steps)
                    step[0] = draw.choice(PRIMITIVES)
                case _:
                    chosen = {draw.choice(names): draw.choice(values) for _ in range(draw.randint(0, 3))}
                    steps.insert(draw.randint(0, len(steps)), [draw.choice(PRIMITIVES), chosen, []])
        try:
            nest = replayed(checked_trace(json.dumps(data)), rows).nest
            legal[show(nest)] = nest
        except ScheduleError:
            refused += 1
    assert refused > 1000 and len(legal) > 10
    given = {"in0": np.random.default_rng(0).integers(-9, 9, (12, 7)).astype(np.float32)}
    for nest in [*legal.values()][:100]:
        np.testing.assert_array_equal(run_nest(nest, given, {})["out0"], given["in0"].sum(1))


def test_damage_of_rows_is_a_fault(rows: LoopNest, tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with Database(path) as db:
        db.record(Workload.of(rows), CPU, default_schedule(rows, CPU).trace, 1e-6)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE measurements SET trace = '{'")
    with Database(path) as db:
        (fault,) = db.verify().faults
        assert "no trace" in fault.reason
