"""The tuning database: processes share it, a kill loses nothing, and a file that does not serve costs one warning."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.error import DatabaseWarning
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database, Part, Session, Verdict, Workload, target_key

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
import sys, time
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.database import Database
from torch_mlc.scheduler.schedule.trace import Step, Trace
db = Database(sys.argv[1])
for n in range(int(sys.argv[3])):
    db.record(sys.argv[2], Target("cpu", "znver3", 2), Trace((Step("unroll", (("loop", f"{n}"),)),)), 1e-6 * (n + 1))
    print(n, flush=True)
    time.sleep(0.01)  # no trial takes less
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


def test_kills_of_writers_of_one_workload_lose_at_most_one_trial_each(path: Path) -> None:
    acknowledged, rounds = 0, 3
    for k in range(rounds):
        command = [sys.executable, "-c", _WRITER, str(path), "shared", "1000000"]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for n, writer in enumerate(writers):
            assert writer.stdout is not None
            acknowledged += len([writer.stdout.readline() for _ in range(5 + 7 * n + k)])
            writer.send_signal(signal.SIGKILL)
            acknowledged += len(writer.stdout.read().split("\n")[:-1])
            writer.wait()
            writer.stdout.close()
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    (kept,) = raw.execute("SELECT count(*) FROM measurements").fetchone()
    raw.close()
    assert acknowledged <= kept <= acknowledged + 2 * rounds
    with warnings.catch_warnings(), Database(path) as db:
        warnings.simplefilter("error")
        assert db.lookup("shared", CPU) is not None


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


def test_what_was_accepted_comes_before_what_seemed_faster(path: Path) -> None:
    with Database(path, "1") as db:
        db.record("w", CPU, trace(2), 1e-6, ratio=1.0, verdict=Verdict.TIMED)
        db.record("w", CPU, trace(4), 8e-7, ratio=0.8, sigma=0.01)
        db.record("w", CPU, trace(8), 9e-7, ratio=0.9, count=20, sigma=0.01, verdict=Verdict.ACCEPTED)
        found = db.lookup("w", CPU)
        assert found is not None and (found.trace, found.ratio, found.count) == (trace(8), 0.9, 20)
        assert found.speedup == pytest.approx(1 / 0.9) and found.verdict is Verdict.ACCEPTED
    with Database(path, "2") as later:  # a later session looks again, and is not so sure
        later.record("w", CPU, trace(8), 1e-6, ratio=1.0, verdict=Verdict.REJECTED)
        later.record("w", CPU, trace(2), 1e-6, ratio=1.0, verdict=Verdict.ACCEPTED)
        found = later.lookup("w", CPU)
        assert found is not None and found.trace == trace(2)


@pytest.mark.parametrize(("ratio", "sigma", "serves"), [(0.995, 0.0, False), (0.97, 0.02, False), (0.95, 0.02, True)])
def test_an_unconfirmed_ratio_serves_where_it_is_clear_of_its_noise(
    path: Path, ratio: float, sigma: float, serves: bool
) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(2), 1e-6, ratio=ratio, sigma=sigma)
        assert (db.lookup("w", CPU) is not None) == serves
        (told,) = db.tuned()
        assert (told.best is not None) == serves and told.measured == 1


def test_ratios_of_sessions_are_compared_and_seconds_are_not(path: Path) -> None:
    with Database(path) as db:
        elsewhere = Session.new(db.versions, (("system", "Linux"),))
        db.record("w", CPU, trace(2), 1e-9, ratio=0.9, session=elsewhere)  # of a faster machine of the same kind
        db.record("w", CPU, trace(4), 1e-6, ratio=0.8)
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4) and found.session == db.session.id != elsewhere.id


def test_equal_machine_code_stays_measured_whatever_the_versions(path: Path) -> None:
    with Database(path, "old") as db:
        db.record("w", CPU, trace(4), 2e-6, ratio=1.0, code_hash="c0", against="c0")
        db.record("w", CPU, trace(8), 1e-6, ratio=0.5, code_hash="c1", against="c0")
        db.record("w", CPU, trace(16), None, "illegal access", verdict=Verdict.CRASHED, code_hash="c2", against="c0")
    with Database(path, "new") as db:
        assert db.measured("w", CPU) == {}
        known = db.by_code("w", CPU)
        assert {code: (r.ratio, r.verdict, r.against) for code, r in known.items()} == {
            "c0": (1.0, Verdict.TIMED, "c0"), "c1": (0.5, Verdict.TIMED, "c0"), "c2": (None, Verdict.CRASHED, "c0"),
        }  # fmt: skip
        assert known["c2"].seconds == float("inf") and known["c2"].error == "illegal access"
    with Database(path, part=lambda _: Part("another")) as db:
        assert db.by_code("w", CPU) == {}


def test_parts_of_one_architecture_are_told_apart(path: Path) -> None:
    gpu = gpu_target("cuda:sm_90")
    h100 = Database(path, part=lambda _: Part("NVIDIA H100 80GB HBM3", lambda: {"copy": 2800.0}))
    h200 = Database(path, part=lambda _: Part("NVIDIA H200"))
    h100.record("w", gpu, trace(4), 1e-6)
    assert h100.lookup("w", gpu) is not None and h200.lookup("w", gpu) is None
    assert h100.key_of(gpu) == target_key(gpu) + ":nvidia-h100-80gb-hbm3" != h200.key_of(gpu)
    with sqlite3.connect(path) as raw:
        facts = json.loads(raw.execute("SELECT facts FROM targets").fetchone()[0])
    assert facts["part"] == "NVIDIA H100 80GB HBM3" and facts["rates"] == {"copy": 2800.0}
    assert Target(**facts["target"]) == gpu


def test_reading_makes_no_file(path: Path) -> None:
    with Database(path) as db:
        assert db.lookup("w", CPU) is None and db.tuned() == [] and db.by_code("w", CPU) == {} and db.clear() == 0
    assert not path.parent.exists()


def argument(text: str) -> str:
    return '{"steps": [["split", {"loop": ' + text + "}, []]]}"


NO_TRACES = {
    "open lists": "[" * 100_000,
    "deep lists": argument("[" * 50 + "]" * 50),
    "long": argument('"' + "x" * 300_000 + '"'),
    "many items": argument("[" + "1," * 300 + "1]"),
    "a large number": argument("9" * 30),
    "many steps": '{"steps": [["f", {}, []]' + ', ["f", {}, []]' * 5000 + "]}",
    "brackets": argument('{"size": "' + "(" * 300 + '"}'),
    "signs": argument('{"size": "' + "-" * 999 + '1"}'),
    "tower": argument(r'{"si\u007ae": "9**9**9**9"}'),
    "power": argument('{"size": "2**(99)"}'),
    "list": "[1, 2]",
    "nothing": "null",
    "surrogate": r'"\ud800"',
    "step of a number": '{"steps": [1]}',
}


@pytest.mark.parametrize("text", NO_TRACES.values(), ids=NO_TRACES)
def test_what_is_no_trace_is_passed_over(path: Path, text: str) -> None:
    with Database(path) as db:
        db.record("w", CPU, trace(4), 2e-6)
        db.record("w", CPU, trace(8), 1e-6)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE measurements SET trace = ? WHERE seconds < 1.5e-6", (text,))
    with Database(path) as db, pytest.warns(DatabaseWarning, match="damaged") as seen:
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4)
        assert db.tuned()[0].best == found
    assert len(seen) == 1


def test_clearing_leaves_no_row(path: Path) -> None:
    with Database(path) as db, Database(path, predicted=True) as predicted:
        db.record(Workload("w", "text"), CPU, trace(4), 1e-6)
        predicted.record("v", CPU, trace(4), 1e-6)
        assert db.clear() == 1 and db.tuned() == [] and len(predicted.tuned()) == 1
        assert predicted.clear() == 1
    with sqlite3.connect(path) as raw:
        for table in ("measurements", "workloads", "targets", "sessions"):
            assert raw.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
