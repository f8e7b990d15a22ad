"""What comes with the package: every schedule is one of its nest, was confirmed, and is found where nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_mlc.ir.nest.positions import named_by_position
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.schedule.carry import applied
from torch_mlc.scheduler.tuning.database import Database, Part, Provenance, Verdict
from torch_mlc.scheduler.tuning.database.rows import checked_trace
from torch_mlc.scheduler.tuning.database.shipped import FOLDER, Shipped
from torch_mlc.scheduler.tuning.database.verify import nest_of
from torch_mlc.scheduler.tuning.space import Draft, Space

FILES = sorted(FOLDER.glob("*.jsonl"))
# What a schedule has to gain to be shipped, and what a file may take of a package.
LEAST_GAIN, MOST_BYTES = 0.03, 1 << 20


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_are_some() -> None:
    assert [p.name for p in FILES] == ["cpu-znver4.jsonl"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_all_of_them_replay_and_were_confirmed(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    with Database(tmp_path / "t.sqlite") as db:
        taken = db.take([(path.name, path.read_text().splitlines())])
        assert taken.added >= 5 and not taken.left_out
        found = db.verify()
        assert found.replayed == taken.added and not found.faults and not found.unknown
        every = db.of_workload("")
    for one in every:
        assert one.record.verdict is Verdict.ACCEPTED
        assert one.record.ratio is not None and one.record.ratio <= 1 - LEAST_GAIN / (1 + LEAST_GAIN) + 1e-4


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_they_are_found_below_what_is_the_users_own(path: Path, tmp_path: Path) -> None:
    """By the nest alone, and by its names of position; their drafts make the same schedules."""
    told = lines(path)
    texts = {str(line["workload"]): str(line["text"]) for line in told if "workload" in line}
    targets = {str(line["target"]): line for line in told if "target" in line}
    shipped = Shipped()
    for line in told:
        if "of" not in line:
            continue
        workload, target, _ = line["of"]  # type: ignore[misc]
        nest = nest_of(workload, texts[workload])
        assert named_by_position(nest) is nest
        about = targets[target]
        record = shipped(workload, target, str(about["base"]))
        assert record is not None and record.provenance is Provenance.SHIPPED
        assert record.trace == checked_trace(str(line["trace"]))
        schedule = applied(record.trace, nest)
        machine = Target(**about["facts"]["target"])  # type: ignore[index]
        made = Space(nest, machine).replayed(Draft.from_plain(json.loads(str(line["draft"]))))
        assert made is not None and made.nest == schedule.nest
        part = Part(about["facts"]["part"])  # type: ignore[index]
        with Database(tmp_path / "own.sqlite", shipped=shipped, part=lambda target, part=part: part) as db:  # type: ignore[misc]
            assert db.lookup(workload, machine) == record
            own = Space(nest, machine).replayed(Space(nest, machine).default())
            assert own is not None
            db.record(workload, machine, own.trace, 1e-3, ratio=1.0, verdict=Verdict.ACCEPTED)
            found = db.lookup(workload, machine)
            assert found is not None and found.trace == own.trace
