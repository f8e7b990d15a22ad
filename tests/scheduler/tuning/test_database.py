"""The tuning database: processes share it, a kill loses nothing, and a file that does not serve costs one warning."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from torch_mlc.ir.target import Target
from torch_mlc.scheduler.error import DatabaseWarning
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database

CPU = Target("cpu", "znver3", 2)


def trace(n: int) -> Trace:
    return Trace((Step("split", (("loop", "b0_i0"), ("factors", (None, n))), ("b0_i0_0", "b0_i0_1")),), "cpu_pointwise")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "tuning.db"


def test_the_fastest_is_found_by_workload_and_target(path: Path) -> None:
    with Database(path, "1") as db:
        assert db.lookup("w", CPU) is None
        db.record("w", CPU, trace(4), 2e-6)
        db.record("w", CPU, trace(8), 1e-6)
        db.record("w", CPU, trace(16), None, "did not compile")
    with Database(path, "1") as db:
        found = db.lookup("w", CPU)
        assert found is not None and (found.trace, found.seconds, found.versions) == (trace(8), 1e-6, "1")
        assert db.lookup("v", CPU) is None and db.lookup("w", Target("cpu", "znver3", 4)) is None
        assert db.measured("w", CPU) == {
            trace(4).to_json(): 2e-6, trace(8).to_json(): 1e-6, trace(16).to_json(): None,
        }  # fmt: skip


def test_a_second_measurement_replaces_the_first(path: Path) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 1e-6)
        db.record("w", CPU, trace(8), 2e-6)
        db.record("w", CPU, trace(4), 3e-6)
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(8)


def test_times_of_other_versions_come_last_but_serve(path: Path) -> None:
    with Database(path, "old") as db:
        db.record("w", CPU, trace(4), 1e-6)
    with Database(path, "new") as db:
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4)
        assert db.measured("w", CPU) == {}
        db.record("w", CPU, trace(8), 2e-6)
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(8)


def test_no_time_is_no_record(path: Path) -> None:
    with Database(path) as db, pytest.raises(ValueError, match="no measured time"):
        db.record("w", CPU, trace(4), float("nan"))


def test_the_file_is_its_owners(path: Path) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 1e-6)
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"this is no database at all, and long enough for one " * 4, b"SQLite"])
def test_a_damaged_file_costs_one_warning(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    db = Database(path)
    with pytest.warns(DatabaseWarning, match="cannot be read") as seen:
        assert db.lookup("w", CPU) is None
        db.record("w", CPU, trace(4), 1e-6)
        assert db.lookup("w", CPU) is None and db.measured("w", CPU) == {}
    assert len(seen) == 1
    db.close()
    assert path.read_bytes() == content


def test_a_truncated_file_costs_one_warning(path: Path) -> None:
    with Database(path) as db:
        for n in range(2, 200):
            db.record("w", CPU, trace(n), 1e-6 * n)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(DatabaseWarning) as seen, Database(path) as db:
        db.lookup("w", CPU)
        db.record("w", CPU, trace(4), 1e-6)
        db.lookup("w", CPU)
    assert len(seen) == 1


def test_a_damaged_record_is_passed_over(path: Path) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 2e-6)
        db.record("w", CPU, trace(8), 1e-6)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE measurements SET trace = '{' WHERE seconds < 1.5e-6")
    with Database(path) as db, pytest.warns(DatabaseWarning, match="damaged"):
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4)


def test_a_read_only_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 1e-6)
    really_open = os.open

    def refuse(file: object, flags: int, mode: int = 0o777) -> int:
        # The tests may run as root, whom no permission stops.
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(file))
        return really_open(file, flags, mode)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(DatabaseWarning, match="cannot be written") as seen, Database(path) as db:
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4)
        db.record("w", CPU, trace(8), 1e-7)
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4)
    assert len(seen) == 1


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(DatabaseWarning) as seen, Database(tmp_path / "file" / "tuning.db") as db:
        assert db.lookup("w", CPU) is None
        db.record("w", CPU, trace(4), 1e-6)
    assert len(seen) == 1


_WRITER = """
import sys
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.database import Database
from torch_mlc.scheduler.schedule.trace import Step, Trace
db = Database(sys.argv[1])
for n in range(int(sys.argv[3])):
    db.record(sys.argv[2], Target("cpu", "znver3", 2), Trace((Step("unroll", (("loop", f"{n}"),)),)), 1e-6 * (n + 1))
    print(n, flush=True)
"""


def test_processes_share_the_file_and_a_kill_loses_nothing(path: Path) -> None:
    def start(workload: str, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WRITER, str(path), workload, str(count)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    victim, other = start("victim", 1_000_000), start("other", 50)
    assert victim.stdout is not None
    done = [int(victim.stdout.readline()) for _ in range(20)]
    victim.send_signal(signal.SIGKILL)
    done += [int(line) for line in victim.stdout.read().split("\n")[:-1]]
    _, errors = other.communicate(timeout=120)
    victim.communicate()
    assert other.returncode == 0, errors
    with warnings.catch_warnings(), Database(path) as db:
        warnings.simplefilter("error")
        assert len(db.measured("other", CPU)) == 50
        assert len(db.measured("victim", CPU)) >= len(done) >= 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_opens_the_file_itself(path: Path) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 2e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads about
            child = os.fork()
        if child == 0:
            db.record("w", CPU, trace(8), 1e-6)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(8)
