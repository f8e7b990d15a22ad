"""Tuning for a GPU that is not here: the candidate that is predicted to be fastest, and records that say so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_mlc
from torch_mlc.dynamo_backend.caches.surroundings import surroundings
from torch_mlc.dynamo_backend.compiling.predicting import PredictingMeasurer, measurer_of
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE, Budget, Tuning, predicted_schedules, tuning_of
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.timing import PhaseTimer
from torch_mlc.runtime.tuning.measuring import WorkerMeasurer
from torch_mlc.scheduler.rules import default_schedule, design_space
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning.database import Database
from torch_mlc.scheduler.tuning.measurer import Entered
from torch_mlc.scheduler.tuning.tune import tune

pytest.importorskip("triton")
NAME = "cuda:sm_90"
SM90 = gpu_target(NAME)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


class Played:
    """A measurer to whom each candidate seems faster than those before it."""

    def __init__(self) -> None:
        self.asked = 0

    def enter(self, candidates: Sequence[Schedule]) -> Iterator[Entered]:
        for _ in candidates:
            yield self.copy(0)

    def copy(self, number: int) -> Entered:
        self.asked += 1
        return Entered(self.asked, f"code {self.asked}")

    def samples(self, numbers: Sequence[int], rounds: int) -> dict[int, Sequence[float]]:
        return {n: [1.0 / max(n, 2)] * rounds for n in numbers}

    def leave(self, numbers: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def softmax() -> LoopNest:
    with FakeTensorMode():
        x = torch.empty(256, 4096, dtype=torch.bfloat16)
    options = {"cache": False, "compile_workers": 0}
    (k,) = torch_mlc.explain(lambda x: torch.softmax(x, -1), x, target=NAME, options=options).kernels
    assert k.nest is not None
    return k.nest


def test_the_least_predicted_is_chosen_and_recorded_apart(softmax: LoopNest, tmp_path: Path) -> None:
    predictions = Database(tmp_path / DATABASE, "1", predicted=True)
    outcome = tune(softmax, SM90, PredictingMeasurer(SM90), 20.0, predictions)
    workload = structural_key(softmax)
    known = {text: s for text, s in predictions.measured(workload, SM90).items() if s is not None}
    least, default = min(known.values()), known[default_schedule(softmax, SM90).trace.to_json()]
    # There is no noise: what is predicted to take a percent less is taken.
    assert len(known) > 3 and outcome.sigma == 0.0 and outcome.is_faster is (least < 0.99 * default)
    assert known[outcome.trace.to_json()] == (least if outcome.is_faster else default)
    (told,) = predictions.tuned()
    assert told.predicted and told.best is not None and told.best.trace == outcome.trace

    # A later tuning that measures takes none of it for measured, nor does a compilation that tunes nothing.
    measured = Database(tmp_path / DATABASE, "1")
    assert measured.measured(workload, SM90) == {} and measured.tuned() == []
    plain = Tuning(measured, None, PhaseTimer(), predictions=predictions).schedule("softmax", softmax, SM90)
    assert plain.nest == default_schedule(softmax, SM90).nest
    played = Played()
    again = tune(softmax, SM90, played, 0.0, measured)
    assert played.asked and again.trace.to_json() in measured.measured(workload, SM90)
    assert set(predictions.measured(workload, SM90)) >= set(known)


def test_what_was_measured_goes_before_predictions(softmax: LoopNest, tmp_path: Path) -> None:
    space = design_space(softmax, SM90)
    default = default_schedule(softmax, SM90)
    other = next(c.schedule for c in space.candidates() if c.schedule.nest != default.nest)
    measured = Database(tmp_path / DATABASE)
    measured.record(structural_key(softmax), SM90, other.trace, 1e-6)
    predictions = Database(tmp_path / DATABASE, predicted=True)
    tuning = Tuning(
        measured, Budget(5.0, {"f": 1.0}), PhaseTimer(), lambda *_: PredictingMeasurer(SM90), 0, predictions
    )
    assert tuning.schedule("f", softmax, SM90).nest == other.nest
    assert predictions.tuned() == []


def test_errors_of_candidates_are_verdicts(softmax: LoopNest) -> None:
    good = default_schedule(softmax, SM90)
    bad = Schedule(softmax)  # its loops are those of no GPU
    found = list(PredictingMeasurer(SM90).measure([bad, good, good]))
    assert isinstance(found[0], Exception) and isinstance(found[1], float) and found[1] == found[2] > 0


@NO_GPU
def test_who_ranks_schedules(softmax: LoopNest) -> None:
    assert isinstance(measurer_of(softmax, SM90), PredictingMeasurer)
    assert isinstance(measurer_of(softmax, cpu_target()), WorkerMeasurer)


@NO_GPU
def test_keys_of_predicted_kernels_are_others(tmp_path: Path) -> None:
    plain, tuned = Options(cache_dir=tmp_path, target=NAME), Options(cache_dir=tmp_path, target=NAME, tune=True)
    here = Options(cache_dir=tmp_path, tune=True)
    assert predicted_schedules(tuned) and not predicted_schedules(plain) and not predicted_schedules(here)
    assert surroundings(tuned, ["cuda:0"])["settings"] != surroundings(plain, ["cuda:0"])["settings"]
    assert surroundings(here, ["cpu"])["settings"] == surroundings(Options(cache_dir=tmp_path), ["cpu"])["settings"]
    # Nothing has to run, so that a compilation for elsewhere may be tuned too.
    assert tuning_of(tuned, PhaseTimer(), {}, may_measure=False).budget is not None


@NO_GPU
@pytest.mark.slow
def test_a_model_is_tuned_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    def kernels(**more: object) -> list[KernelReport]:
        with FakeTensorMode():
            x, w = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, 512, dtype=torch.bfloat16)
        options = {"cache_dir": str(tmp_path), "compile_workers": 0, **more}

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.relu(x @ w), -1)

        return list(torch_mlc.explain(f, x, w, target=NAME, options=options).kernels)

    default = kernels()
    tuned = kernels(tune=1, tune_budget="40s")
    for before, after in zip(default, tuned, strict=True):
        assert before.prediction is not None and after.prediction is not None
        assert after.prediction.seconds <= before.prediction.seconds * (1 + 1e-9)
    known = Database(tmp_path / DATABASE, predicted=True).tuned()
    assert {t.workload for t in known} == {k.workload for k in tuned} and all(t.predicted for t in known)


def test_files_of_older_versions_serve(softmax: LoopNest, tmp_path: Path) -> None:
    """A file that knows no predictions gets room for them, and keeps what it has."""
    with Database(tmp_path / DATABASE) as old:
        old.record("w", SM90, Schedule(softmax).trace, 2e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Database(tmp_path / DATABASE, predicted=True) as new:
            assert new.tuned() == []
    with Database(tmp_path / DATABASE) as old:
        assert len(old.tuned()) == 1
