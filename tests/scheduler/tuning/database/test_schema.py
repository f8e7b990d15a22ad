"""Files of other versions of the tuning database: older ones are migrated, newer ones are left alone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from torch_mlc.ir.target import Target
from torch_mlc.scheduler.error import DatabaseWarning
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database, Part, Verdict, Workload, target_key
from torch_mlc.scheduler.tuning.database.schema import SCHEMA

CPU = Target("cpu", "znver3", 2)
_FIRST = """
CREATE TABLE {table} (
    workload TEXT NOT NULL,
    target TEXT NOT NULL,
    trace TEXT NOT NULL,
    seconds REAL,
    error TEXT NOT NULL DEFAULT '',
    versions TEXT NOT NULL,
    date TEXT NOT NULL,
    PRIMARY KEY (workload, target, trace)
) WITHOUT ROWID
"""


def trace(n: int) -> Trace:
    return Trace((Step("vectorize", (("loop", f"b0_i{n}"),)),), "cpu_pointwise")


def first_file(path: Path, workloads: int = 3, tables: tuple[str, ...] = ("measurements", "predictions")) -> int:
    """A file as the first version wrote it; returns how many rows it has."""
    count = 0
    with sqlite3.connect(path) as raw:
        for table in tables:
            raw.execute(_FIRST.format(table=table))
            for w in range(workloads):
                for n in range(4):
                    seconds, error = (None, "did not compile") if n == 3 else (1e-6 * (n + 1), "")
                    row = (
                        f"w{w}",
                        target_key(CPU),
                        trace(n).to_json(),
                        seconds,
                        error,
                        f"v{n % 2}",
                        f"2026-01-0{n + 1}",
                    )
                    raw.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                    count += 1
    raw.close()
    return count


def version(path: Path) -> int:
    raw = sqlite3.connect(path)
    found: int = raw.execute("PRAGMA user_version").fetchone()[0]
    raw.close()
    return found


def test_a_first_file_is_migrated_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    count = first_file(path)
    with warnings.catch_warnings(), Database(path, "v1") as db, Database(path, "v1", predicted=True) as predicted:
        warnings.simplefilter("error")
        for known in (db, predicted):
            assert [(t.workload, t.measured, t.predicted) for t in known.tuned()] == [
                (f"w{w}", 4, known is predicted) for w in range(3)
            ]
            found = known.lookup("w0", CPU)
            # Of these versions, though another is faster.
            assert found is not None and (found.trace, found.seconds, found.date) == (trace(1), 2e-6, "2026-01-02")
            assert known.measured("w0", CPU) == {trace(1).to_json(): 2e-6, trace(3).to_json(): None}
    assert version(path) == SCHEMA
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT count(*) FROM measurements").fetchone() == (count,)
    assert raw.execute("SELECT DISTINCT error FROM measurements WHERE verdict = 'failed'").fetchall() == [
        ("did not compile",)
    ]
    raw.close()


def test_a_first_file_without_predictions_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    first_file(path, tables=("measurements",))
    with Database(path, predicted=True) as predicted, Database(path) as db:
        assert predicted.tuned() == [] and len(db.tuned()) == 3


def test_what_was_measured_on_an_unknown_part_serves_behind_the_part_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    first_file(path)
    with Database(path, "v1", part=lambda _: Part("EPYC 7003")) as db:
        found = db.lookup("w0", CPU)
        assert found is not None and found.trace == trace(1)
        assert db.measured("w0", CPU) == {}  # times are not compared with those of who knows which part
        db.record("w0", CPU, trace(9), 1.0)
        found = db.lookup("w0", CPU)
        assert found is not None and found.trace == trace(9)


def test_a_first_file_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.sqlite"
    first_file(path)
    content, really_open = path.read_bytes(), os.open

    def refuse(file: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(file))
        return really_open(file, flags, mode)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(DatabaseWarning, match="cannot be written") as seen, Database(path) as db:
        found = db.lookup("w0", CPU)
        assert found is not None and len(db.tuned()) == 3
        db.record("w0", CPU, trace(7), 1e-9)
    assert len(seen) == 1 and path.read_bytes() == content


def test_a_newer_file_is_refused_once_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE measurements (everything)")
    raw.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    raw.close()
    content = path.read_bytes()
    told = f"newer torch-mlc wrote it: its schema is {SCHEMA + 1}"
    with pytest.warns(DatabaseWarning, match=told) as seen, Database(path) as db:
        assert db.lookup("w", CPU) is None and db.tuned() == [] and db.measured("w", CPU) == {}
        db.record("w", CPU, trace(1), 1e-6)
        assert db.clear() == 0
    assert len(seen) == 1 and path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.sqlite"]


_OPEN = """
import sys
import threading
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.database import Database
print("ready", flush=True)
sys.stdin.readline()
with Database(sys.argv[1], "v1") as db:
    print(len(db.tuned()), flush=True)
"""


def opener(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _OPEN, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_processes_that_meet_a_first_file_migrate_it_once(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    count = first_file(path, workloads=200)
    processes = [opener(path) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "200\n"), errors
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT count(*) FROM measurements").fetchone() == (count,)
    raw.close()


_KILLED = """
import os, signal, sys
from torch_mlc.scheduler.tuning.database import Database, schema
really, left = schema.trace_hash, [int(sys.argv[2])]
def trace_hash(text):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return really(text)
schema.trace_hash = trace_hash
Database(sys.argv[1]).tuned()
"""


@pytest.mark.parametrize("rows", [0, 11, 23])
def test_a_kill_during_migration_leaves_the_first_form_whole(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "tuning.sqlite"
    count = first_file(path)
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(path), str(rows)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with warnings.catch_warnings(), Database(path, "v1") as db, Database(path, predicted=True) as predicted:
        warnings.simplefilter("error")
        assert sum(t.measured for known in (db, predicted) for t in known.tuned()) == count


def test_verdicts_of_times_and_failures(tmp_path: Path) -> None:
    with Database(tmp_path / "tuning.sqlite") as db:
        for verdict in Verdict:
            with pytest.raises(ValueError, match="measured time"):
                db.record("w", CPU, trace(1), None if verdict.has_time else 1e-6, verdict=verdict)


def test_a_file_of_the_second_form_gets_what_it_has_not(tmp_path: Path) -> None:
    """What it knows stays; of its workloads and drafts nothing more is known, and they are no seeds."""
    path = tmp_path / "t.sqlite"
    with Database(path) as db:
        db.record(Workload("w", "text"), CPU, trace(0), 1e-6, ratio=0.5, sigma=0.001, draft='{"rule":"r"}')
    with sqlite3.connect(path) as raw:
        for table, column in (("workloads", "sketch"), ("workloads", "features"), ("measurements", "draft")):
            raw.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        raw.execute("PRAGMA user_version = 2")
    raw.close()
    with Database(path) as db:
        record = db.lookup("w", CPU)
        assert record is not None and record.trace == trace(0) and record.ratio == 0.5
        assert db.similar(Workload("w")) == []
        sketched = Workload("v", "text", "ab", (1.0, 2.0))
        db.record(sketched, CPU, trace(1), 1e-6, ratio=0.5, sigma=0.001, draft='{"rule":"r"}')
        (found,) = db.similar(sketched)
        assert found.workload == Workload("v", "", "ab", (1.0, 2.0)) and found.draft == {"rule": "r"}
        lines = [*db.exported()]
    assert version(path) == SCHEMA
    with Database(tmp_path / "other.sqlite") as other:
        assert other.take([("lines", lines)]).left_out == 0
        assert other.similar(sketched) == [found]


def test_a_file_that_another_process_is_migrating_is_waited_for(tmp_path: Path) -> None:
    """SQLite refuses to change the mode of a file at once where another one is about to write it."""
    path = tmp_path / "tuning.sqlite"
    first_file(path, workloads=3)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, other.execute, ("COMMIT",))
    timer.start()
    with Database(path, "v1") as db:
        assert len(db.tuned()) == 3
    timer.join()
    other.close()
