"""Tuning from end to end: what is measured is recorded, and used without asking again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import warm_processes
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE, Budget, Tuning, tuning_of
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.timing import PhaseTimer
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning.database import Database

ROWS = parse("""
@nest(outputs=["out0"])
def rows(in0: float32[64, 33], out0: float32[64]):
    for a in serial(64):
        for b in serial(33):
            with block("b0"):
                i = spatial(64, a)
                r = reduction(33, b)
                out0[i] = sum.update(in0[i, r])
""")
assert isinstance(ROWS, LoopNest)


def recorded(folder: Path) -> tuple[Database, Schedule]:
    """A database that knows a schedule no rule would choose."""
    odd = Schedule(ROWS, "by hand")
    odd.split("b", [None, 3])
    database = Database(folder / DATABASE)
    database.record(structural_key(ROWS), cpu_target(), odd.trace, 1e-6)
    return database, odd


def test_a_recorded_schedule_is_used(tmp_path: Path) -> None:
    database, odd = recorded(tmp_path)
    found = Tuning(database, None, PhaseTimer()).schedule("rows", ROWS, cpu_target())
    assert found.nest == odd.nest != default_schedule(ROWS, cpu_target()).nest


def test_nothing_recorded_is_the_default(tmp_path: Path) -> None:
    for database in (None, Database(tmp_path / DATABASE)):
        found = Tuning(database, None, PhaseTimer()).schedule("rows", ROWS, cpu_target())
        assert found.nest == default_schedule(ROWS, cpu_target()).nest


def test_a_recorded_schedule_that_applies_no_more_is_the_default(tmp_path: Path) -> None:
    other = Schedule(parse(str(PLAIN)))  # type: ignore[arg-type]
    other.split("z", [None, 3])
    database = Database(tmp_path / DATABASE)
    database.record(structural_key(ROWS), cpu_target(), other.trace, 1e-6)
    found = Tuning(database, None, PhaseTimer()).schedule("rows", ROWS, cpu_target())
    assert found.nest == default_schedule(ROWS, cpu_target()).nest


PLAIN = """
@nest(outputs=["out0"])
def plain(in0: float32[9], out0: float32[9]):
    for z in serial(9):
        with block("b0"):
            i = spatial(9, z)
            out0[i] = in0[i]
"""


def test_deterministic_algorithms_keep_the_order_of_sums(tmp_path: Path) -> None:
    database, _ = recorded(tmp_path)
    torch.use_deterministic_algorithms(True)
    try:
        found = Tuning(database, None, PhaseTimer()).schedule("rows", ROWS, cpu_target())
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.nest == default_schedule(ROWS, cpu_target()).nest


def test_the_budget_is_shared_by_cost_and_what_is_left_goes_on() -> None:
    budget = Budget(10.0, {"a": 3.0, "b": 1.0, "c": 1.0})
    assert budget.share("a") == pytest.approx(6.0)
    budget.spend("a", 2.0)
    assert budget.share("b") == budget.share("c") == pytest.approx(4.0)
    budget.spend("b", 100.0)
    assert budget.share("c") == 0.0
    assert budget.share("unknown") == 0.0


def test_no_database_is_made_to_find_nothing_in_it(tmp_path: Path) -> None:
    options = Options(cache_dir=tmp_path)
    assert tuning_of(options, PhaseTimer(), {}, True).database is None
    assert not (tmp_path / DATABASE).exists()
    tuned = Options(cache_dir=tmp_path, tune=True)
    assert tuning_of(tuned, PhaseTimer(), {}, True).budget is not None
    assert tuning_of(tuned, PhaseTimer(), {}, may_measure=False).budget is None


SCRIPT = """
import torch
from torch_mlc.runtime.counters import counters
def f(x):
    return torch.softmax(x * 2, -1)
x = torch.randn(16, 37)
torch.testing.assert_close(torch.compile(f, backend="mlc")(x), f(x))
print(*(counters[n] for n in ("kernels_tuned", "kernels_generated", "graph_cache_hits")))
"""


def run(folder: Path, **more: str) -> list[int]:
    """Kernels tuned and generated, and programs found, in a process of its own."""
    done = warm_processes.start(SCRIPT, env={"MLC_CACHE_DIR": str(folder)} | more)
    return [int(n) for n in done.output().split()]


def test_what_one_process_tunes_the_next_one_uses(tmp_path: Path) -> None:
    assert run(tmp_path) == [0, 1, 0]
    assert run(tmp_path, MLC_TUNE="1", MLC_TUNE_BUDGET="1s") == [1, 1, 0]
    assert (tmp_path / DATABASE).stat().st_mode & 0o077 == 0
    assert run(tmp_path) == [0, 0, 1]
