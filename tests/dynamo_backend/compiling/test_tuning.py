"""Tuning from end to end: what is measured is recorded, and used without asking again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_mlc
from tests import warm_processes
from torch_mlc.dynamo_backend.caches.surroundings import surroundings
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE, Choice, ChosenBy, Tuning, tuning_of
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import OptionError, Options
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.timing import PhaseTimer
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.schedule.trace import Trace
from torch_mlc.scheduler.tuning.database import Database, Record
from torch_mlc.scheduler.tuning.features import draft_features, nest_features
from torch_mlc.scheduler.tuning.race import Estimate
from torch_mlc.scheduler.tuning.search import SearchResult, Trial
from torch_mlc.scheduler.tuning.space import Space

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


def test_no_database_is_made_to_find_nothing_in_it(tmp_path: Path) -> None:
    options = Options(cache_dir=tmp_path)
    # What comes with the package is read without one.
    found = tuning_of(options, PhaseTimer(), {}, True)
    assert found.schedule("rows", ROWS, cpu_target()).nest == default_schedule(ROWS, cpu_target()).nest
    assert not (tmp_path / DATABASE).exists()
    tuned = Options(cache_dir=tmp_path, tune=True)
    assert tuning_of(tuned, PhaseTimer(), {}, True).budget is not None
    assert tuning_of(tuned, PhaseTimer(), {}, may_measure=False).budget is None


def test_who_chose_a_schedule_is_told(tmp_path: Path) -> None:
    database, _ = recorded(tmp_path)
    tuning = Tuning(database, None, PhaseTimer())
    tuning.schedule("rows", ROWS, cpu_target())
    tuning.schedule("plain", parse(PLAIN), cpu_target())  # type: ignore[arg-type]
    assert {name: c.source for name, c in tuning.choices.items()} == {
        "rows": ChosenBy.RECORDED, "plain": ChosenBy.DEFAULT,
    }  # fmt: skip
    record = Record(Trace(), 1e-6, "1", "2026-01-02T03:04:05+00:00", ratio=0.8)
    assert str(Choice(ChosenBy.RECORDED, record=record)) == "by an earlier tuning: 1.25x of the default, on 2026-01-02"
    found = SearchResult("rows", Trace(), True, Estimate(0.8, 0.79, 0.81, 36), 0.011, 2.0, 1e-3, ())
    told = "by tuning: 1.25x (1.23 to 1.27) of the default, noise 1 %, 0 candidates"
    assert str(Choice(ChosenBy.MEASURED, found)) == told
    one = replace(found, trials=(Trial(None, Trace(), "", found.found),))  # type: ignore[arg-type]
    assert str(Choice(ChosenBy.MEASURED, one)).endswith("noise 1 %, 1 candidate")


class Favourite:
    """A model to which drafts are the better the larger one of their features is."""

    def __init__(self, feature: int, margin: float = 0.0) -> None:
        self.feature, self.margin, self.asked = feature, margin, 0

    def scores(self, features: np.ndarray) -> np.ndarray:
        self.asked += len(features)
        return features[:, self.feature]


def differing() -> dict[str, Favourite]:
    """Models to which some draft is ahead of the default: by a feature of drafts, and by one of nests among those that
    are first by that."""
    space = Space(WIDE, cpu_target())
    drafts = [space.default(), *space.listed(100)]
    of_drafts = draft_features(space, drafts)
    feature = next(k for k in range(of_drafts.shape[1]) if of_drafts[1:, k].max() > of_drafts[0, k])
    first = [drafts[k] for k in np.argsort(-of_drafts[:, feature], kind="stable")]
    nests = [s for d in (drafts[0], *first[:4]) if (s := space.replayed(d)) is not None]
    of_nests = np.stack([nest_features(space, s) for s in nests])
    other = next(k for k in range(of_nests.shape[1]) if of_nests[1:, k].max() > of_nests[0, k])
    return {"draft": Favourite(feature), "nest": Favourite(other)}


WIDE = parse("""
@nest(outputs=["out0"])
def wide(in0: float32[4096], out0: float32[4096]):
    for a in serial(4096):
        with block("b0"):
            i = spatial(4096, a)
            out0[i] = mul(in0[i], in0[i])
""")
assert isinstance(WIDE, LoopNest)


def test_the_model_picks_without_measuring(tmp_path: Path) -> None:
    """The same each time, and never with what this machine has measured."""
    database = Database(tmp_path / DATABASE)
    models = differing()

    def never(*args: object) -> None:
        raise AssertionError("nothing is measured")

    found = []
    for _ in range(2):
        tuning = Tuning(database, None, PhaseTimer(), never, by_model=True, rankers=lambda target: models)
        found.append(tuning.schedule("wide", WIDE, cpu_target()))
        assert tuning.choices["wide"].source is ChosenBy.MODEL
    assert found[0].nest == found[1].nest != default_schedule(WIDE, cpu_target()).nest
    assert 0 < models["draft"].asked < 1000 and 0 < models["nest"].asked < 20
    for margin in (1e9, float("inf")):
        models["nest"].margin = margin
        tuning = Tuning(database, None, PhaseTimer(), never, by_model=True, rankers=lambda target: models)
        assert tuning.schedule("wide", WIDE, cpu_target()).nest == default_schedule(WIDE, cpu_target()).nest
        assert tuning.choices["wide"].source is ChosenBy.DEFAULT


def test_modes_say_what_is_asked(tmp_path: Path) -> None:
    def of(tune: bool | str, **more: Any) -> Tuning:
        return tuning_of(Options(cache_dir=tmp_path, tune=tune, **more), PhaseTimer(), {}, True)

    recorded(tmp_path)
    assert (of(False).anew, of("replay").anew, of(True).anew, of("model").anew) == (False, True, True, False)
    assert [of(t).budget is not None for t in (False, "replay", True, "model")] == [False, False, True, False]
    assert of("replay").database is not None and of("model").database is None and of("model").by_model
    assert of(True, tune_numerics="same").numerics == "same" and of(True).numerics == "any"
    plain, model = (surroundings(Options(cache_dir=tmp_path, tune=t), ["cpu"]) for t in (False, "model"))
    assert plain["settings"] != model["settings"]
    assert plain == surroundings(Options(cache_dir=tmp_path, tune="replay"), ["cpu"])


@pytest.mark.parametrize(
    ("given", "meant"), [(0, False), ("1", True), ("on", True), ("Model", "model"), ("replay", "replay")]
)
def test_values_of_tune(given: object, meant: object) -> None:
    assert Options.resolve(None, {"tune": given}, {}).tune == meant


def test_other_values_of_tune_are_errors() -> None:
    with pytest.raises(OptionError, match="replay"):
        Options.resolve(None, {"tune": "replya"}, {})
    with pytest.raises(OptionError, match="any or same"):
        Options.resolve(None, {}, {"MLC_TUNE_NUMERICS": "bitwise"})


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


def test_tuning_says_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    found = SearchResult("rows", Trace(), True, Estimate(0.5, 0.49, 0.51, 36), 0.011, 2.0, 1e-3, ())
    tuning = Tuning(None, None, PhaseTimer(), calls={"rows": 3})
    tuning.tell()
    assert capfd.readouterr().err == ""
    tuning.choices["rows"] = Choice(ChosenBy.MEASURED, found)
    tuning.tell()
    assert capfd.readouterr().err == "tuned 1 kernel in 2.0 s: 1 faster, 2.00x (noise 1 %)\n"


def test_what_one_process_tunes_the_next_one_uses(tmp_path: Path) -> None:
    assert run(tmp_path) == [0, 1, 0]
    assert run(tmp_path, MLC_TUNE="1", MLC_TUNE_BUDGET="1s") == [1, 1, 0]
    assert (tmp_path / DATABASE).stat().st_mode & 0o077 == 0
    assert run(tmp_path) == [0, 0, 1]
    assert run(tmp_path, MLC_TUNE="replay") == [0, 1, 0]
    assert run(tmp_path, MLC_TUNE="model") == [0, 1, 0]
    assert run(tmp_path, MLC_TUNE="model") == [0, 0, 1]


def test_explain_tells_where_schedules_come_from(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    x, options = torch.randn(16, 37), {"cache_dir": str(tmp_path)}
    (plain,) = torch_mlc.explain(f, x, options=options).kernels
    assert plain.chosen == "by default" and "scheduled by default" in plain.show() and not plain.candidates
    report = torch_mlc.explain(f, x, options={**options, "tune": 1, "tune_budget": "1s"})
    (tuned,) = report.kernels
    assert "candidate" in tuned.chosen and len(tuned.candidates) > 1 and "measured" in tuned.candidates[0]


def test_ranks_of_a_job_run_the_same_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is tuned by one of them. The second finds what the first has decided, and tunes nothing."""
    from torch_mlc.runtime.tuning.ranks import Ranks

    store, found = torch.distributed.HashStore(), []
    x, y = torch.randn(300, 77), torch.randn(1, 77)

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x.softmax(-1)
        return z, (z @ z.T).relu().sum(0), (x + y).sum(0)

    for rank in (0, 1):
        torch._dynamo.reset()
        before = counters["kernels_tuned"]
        ranks = Ranks(store, rank, 2, wait=0.05)
        monkeypatch.setattr(Ranks, "of_job", lambda wait, ranks=ranks: ranks)
        options = {"tune": 1, "tune_budget": 3, "cache": False, "cache_dir": str(tmp_path / str(rank))}
        report = torch_mlc.explain(fn, x, y, options=options)
        kernels = [k for g in report.graphs for k in g.kernels]
        found.append([(k.name, k.schedule) for k in kernels])
        tuned = counters["kernels_tuned"] - before
        assert tuned == (len(kernels) + 1) // 2 if rank == 0 else tuned == 0
        torch.testing.assert_close(torch.compile(fn, backend="mlc")(x, y), fn(x, y), rtol=1e-4, atol=1e-4)
    assert found[0] == found[1] and len(found[0]) >= 2
