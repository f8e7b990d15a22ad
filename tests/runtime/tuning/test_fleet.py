"""Measuring on an executor's workers: ratios of one machine each, and workers that do not serve."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.runtime.tuning.test_measure import nest_of
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.triton.worker_process import worker_command
from torch_mlc.runtime.tuning import fleet
from torch_mlc.runtime.tuning.fleet import FleetMeasurer, measure_batch
from torch_mlc.runtime.tuning.machine import part_of
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.carry import applied
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning.database import Database, Workload, target_key
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, MeasuringError
from torch_mlc.scheduler.tuning.tune import tune

CPU = cpu_target(2)
needs_process = pytest.mark.skipif(
    not worker_command(Path()), reason="no interpreter that can be run as a program of its own"
)
ROWS = nest_of("""
@nest(outputs=["out0"])
def rows(in0: float32[64, 33], out0: float32[64]):
    for a in serial(64):
        for b in serial(33):
            with block("b0"):
                i = spatial(64, a)
                r = reduction(33, b)
                out0[i] = sum.update(in0[i, r])
""")


def schedules() -> list[Schedule]:
    """The default and four others."""
    found = [default_schedule(ROWS, CPU)]
    for n in (2, 3, 4, 8):
        made = Schedule(ROWS, "by hand")
        made.split("b", [None, n])
        found.append(made)
    return found


class Played(Executor):
    """Workers that answer as they are told to, each asked in its turn; what is asked goes through pickle."""

    def __init__(self, *workers: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.workers = workers
        self.asked: list[dict[str, Any]] = []

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        assert fn is measure_batch
        done: Future[Any] = Future()
        (asked,) = pickle.loads(pickle.dumps(args))
        self.asked.append(asked)
        try:
            done.set_result(self.workers[(len(self.asked) - 1) % len(self.workers)](asked))
        except Exception as error:
            done.set_exception(error)
        return done


def worker(name: str, scale: float, key: str = "k") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A machine on which candidate k of the space takes 1/(k+1) of the default's time."""
    ratios = {s.trace.to_json(): 1 / (k + 1) for k, s in enumerate(schedules())}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["key"] not in ("", key):
            return {"refused": f"a worker is {key}, not {asked['key']}"}
        return {
            "session": name, "versions": "v", "date": "2026-01-01", "facts": [["system", "Linux"]], "key": key,
            "samples": [[scale * ratios[t]] * asked["rounds"] for t in asked["traces"]],
            "codes": asked["traces"], "failures": [None] * len(asked["traces"]),
        }  # fmt: skip

    return answer


def measured(measurer: FleetMeasurer, candidates: list[Schedule]) -> list[Any]:
    """The median of a few rounds of each, or its failure."""
    entered = [*measurer.enter(candidates)]
    found = measurer.samples([e.number for e in entered if isinstance(e, Entered)], 3)
    results = [found[e.number] if isinstance(e, Entered) else e for e in entered]
    return [r if isinstance(r, Failure) else median(r) for r in results]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PAUSE_SECONDS", 0.0)


def test_ratios_of_machines_are_never_mixed(tmp_path: Path) -> None:
    candidates = schedules()
    assert len(candidates) > 3
    with Database(tmp_path / "t.sqlite") as db:
        executor = Played(worker("slow", 1.0), worker("fast", 1e-3))
        measurer = FleetMeasurer(ROWS, CPU, executor, batch=1, database=db)
        found = measured(measurer, candidates)
        assert found == pytest.approx([1 / (k + 1) for k in range(len(candidates))])
        rows = db.of_workload(Workload.of(ROWS).key)
        assert {r.record.session for r in rows} == {"slow", "fast"}
        by_session = {(r.record.session, r.record.trace): (r.record.seconds, r.record.ratio) for r in rows}
        for (session, _), (seconds, ratio) in by_session.items():
            assert ratio == pytest.approx(seconds / {"slow": 1.0, "fast": 1e-3}[session])
        assert {r.session.id for r in measurer.runs} == {"slow", "fast"}
        assert all(len(asked["traces"]) <= 2 for asked in executor.asked)


def test_other_parts_and_lost_workers_are_passed_over() -> None:
    def lost(_: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionError("gone")

    executor = Played(worker("a", 1.0, "h100"), worker("b", 1.0, "h200"), lost)
    measurer = FleetMeasurer(ROWS, CPU, executor, batch=2)
    found = measured(measurer, schedules())
    assert found == pytest.approx([1 / (k + 1) for k in range(len(found))])
    assert {r.session.id for r in measurer.runs} == {"a"} and {r.target for r in measurer.runs} == {"h100"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [(lambda _: {"refused": "a worker is another"}, "a worker is another"), (lambda _: 1 / 0, "a worker was lost")],
)
def test_a_fleet_without_a_worker_that_serves_is_no_verdict(answer: Any, told: str) -> None:
    measurer = FleetMeasurer(ROWS, CPU, Played(answer), tries=3)
    with pytest.raises(MeasuringError, match=told):
        measured(measurer, schedules())
    assert not measurer.runs


def test_a_worker_refuses_what_it_is_not() -> None:
    executor = Played(measure_batch)
    with pytest.raises(MeasuringError, match="a worker is no such machine"):
        [*FleetMeasurer(ROWS, gpu_target("cuda:sm_70"), executor, tries=1).enter(schedules()[:1])]
    asked = executor.asked[0]
    assert "another version" in measure_batch({**asked, "versions": "old"})["refused"]
    assert "a worker is" in measure_batch({**asked, "target": _plain(), "key": "cpu:other"})["refused"]


def _plain() -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(CPU)


@needs_process
def test_what_is_no_schedule_is_told_about_it() -> None:
    measurer = FleetMeasurer(ROWS, CPU, Played(measure_batch))
    good = schedules()[0]
    bad = Schedule(ROWS, "x")
    bad.split("a", [None, 3])
    broken = Schedule(ROWS, "x")
    broken._steps = [*bad.trace.steps, *bad.trace.steps]
    first, second, third = measured(measurer, [good, broken, bad])
    assert isinstance(first, float) and isinstance(second, Failure) and isinstance(third, float)


@pytest.fixture
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@needs_process
def test_a_search_measures_in_other_processes(processes: Executor, tmp_path: Path) -> None:
    with Database(tmp_path / "t.sqlite", part=part_of) as db:
        measurer = FleetMeasurer(ROWS, CPU, processes, batch=3, database=db)
        trace = tune(ROWS, CPU, measurer, 20.0).trace
        assert len(measurer.runs) > 2 and len({r.session.id for r in measurer.runs}) == 1
        assert {r.target for r in measurer.runs} == {target_key(CPU, part_of(CPU))}
        known = db.of_workload(Workload.of(ROWS).key)
        assert trace in {applied(k.record.trace, ROWS).trace for k in known}
        assert all(k.record.session != db.session.id for k in known)


@needs_process
def test_two_processes_of_dask_measure(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
    )
    with cluster, distributed.Client(cluster) as client, Database(tmp_path / "t.sqlite") as db:
        measurer = FleetMeasurer(ROWS, CPU, client.get_executor(pure=False), batch=1, database=db)
        found = measured(measurer, schedules())
        assert all(isinstance(r, float) and r > 0 for r in found)
        sessions = {r.session.id for r in measurer.runs}
        assert len(sessions) == 2, "both workers have measured"
        for run in measurer.runs:  # in each session the default is beside what it is compared with
            assert any(r.session == run.session and r.ratio == 1.0 for r in measurer.runs)
        pids = client.run(os.getpid)
        assert os.getpid() not in pids.values() and len(set(pids.values())) == 2
        assert json.loads(next(iter(db.exported())))["schema"]
