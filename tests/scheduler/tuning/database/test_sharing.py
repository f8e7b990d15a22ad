"""Measurements as JSON lines: round trips, merging, and what others may write."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_mlc.ir.target import Target
from torch_mlc.scheduler.decisions import DecisionOverrides
from torch_mlc.scheduler.error import DatabaseWarning
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database, Part, Provenance, Verdict, Workload
from torch_mlc.scheduler.tuning.database.rows import plain_json
from torch_mlc.scheduler.tuning.database.shipped import Shipped

CPU = Target("cpu", "znver3", 2)


def trace(n: int) -> Trace:
    return Trace((Step("vectorize", (("loop", f"b0_i{n}"),)),), "cpu_pointwise")


def filled(path: Path, part: str = "EPYC", versions: str = "1") -> Database:
    db = Database(path, versions, part=lambda _: Part(part), facts=(("torch", "2.13"),))
    db.record(Workload("w", "text of w"), CPU, trace(2), 1e-6, ratio=1.0, code_hash="c2", against="c2")
    fast = {"ratio": 0.7, "count": 20, "sigma": 0.01, "verdict": Verdict.ACCEPTED, "code_hash": "c4", "against": "c2"}
    db.record(Workload("w", "text of w"), CPU, trace(4), 7e-7, **fast)  # type: ignore[arg-type]
    db.record("v", CPU, trace(8), None, "/srv/somebody/src/kernel.py:3: illegal access", verdict=Verdict.CRASHED)
    with Database(path, versions, predicted=True) as predicted:
        predicted.record("w", CPU, trace(16), 3e-6)
    return db


def dump(path: Path) -> list[object]:
    """Everything that a file says, in an order of its own."""
    raw = sqlite3.connect(path)
    found = raw.execute(
        "SELECT w.key, w.text, t.key, t.base, t.facts, s.name, s.versions, s.date, s.facts, m.predicted, m.trace_hash,"
        " m.trace, m.seconds, m.ratio, m.count, m.sigma, m.verdict, m.code_hash, m.against, m.date"
        " FROM measurements m JOIN workloads w ON w.id = m.workload JOIN targets t ON t.id = m.target"
        " JOIN sessions s ON s.id = m.session ORDER BY w.key, m.trace_hash, s.name"
    ).fetchall()
    raw.close()
    return found


def test_what_is_exported_is_what_is_imported(tmp_path: Path) -> None:
    with filled(tmp_path / "a.sqlite") as a, Database(tmp_path / "b.sqlite") as b:
        lines = list(a.exported())
        found = b.take([("a", lines)])
        assert (found.added, found.known, found.left_out) == (4, 0, 0)
        assert dump(a.path) == dump(b.path)
        again = b.take([("a", lines)])
        assert (again.added, again.known) == (0, 4) and dump(a.path) == dump(b.path)
        assert all("\n" not in line and isinstance(json.loads(line), dict) for line in lines)
        assert a.take([("itself", a.exported())]).known == 4
        back = a.take([("b", b.exported())])  # one's own lines are no one else's afterwards
        record = a.lookup("w", CPU)
        assert back.added == 0 and record is not None and record.provenance is Provenance.OWN


def searched(db: Database) -> DecisionOverrides:
    """A graph whose search ended with one decision; another way crashed."""
    loops = DecisionOverrides.of({("product", "ab12"): "loops"})
    whole = DecisionOverrides.of({("split", "cd34"): "whole"})
    db.record_decisions("g1", CPU, whole, error="/srv/somebody/src/k.py:3: it crashed", verdict=Verdict.CRASHED)
    db.record_decisions("g1", CPU, loops, 1e-3, ratio=0.8, count=36, sigma=0.01, verdict=Verdict.ACCEPTED)
    return loops


def test_decisions_are_exported_and_imported(tmp_path: Path) -> None:
    with filled(tmp_path / "a.sqlite") as a, Database(tmp_path / "b.sqlite", part=lambda _: Part("EPYC")) as b:
        loops = searched(a)
        lines = list(a.exported())
        assert sum('"graph"' in line for line in lines) == 2 and "somebody" not in "\n".join(lines)
        found = b.take([("a", lines)])
        assert (found.added, found.known, found.left_out) == (6, 0, 0)
        taken = b.decisions("g1", CPU)
        assert taken is not None and taken.chosen == loops and taken.provenance is Provenance.IMPORTED
        assert (taken.seconds, taken.ratio, taken.count, taken.sigma) == (1e-3, 0.8, 36, 0.01)
        assert [(g, s.verdict.value) for g, _, s in b.searched()] == [("g1", "accepted"), ("g1", "crashed")]
        assert b.take([("a", lines)]).known == 6
        # What was searched here decides, whatever date a stranger writes.
        b.record_decisions("g1", CPU, DecisionOverrides(), 1e-3, ratio=1.0, verdict=Verdict.ACCEPTED)
        b.take([("a", (line.replace('"date":"20', '"date":"29') for line in lines))])
        taken = b.decisions("g1", CPU)
        assert taken is not None and not taken.chosen and taken.provenance is Provenance.OWN
        assert [(g, s.verdict.value) for g, _, s in a.searched("g")] == [("g1", "accepted"), ("g1", "crashed")]
        assert a.searched("h") == []
        a.take([("b", b.exported())])
        taken = a.decisions("g1", CPU)
        assert taken is not None and taken.chosen == loops and taken.provenance is Provenance.OWN


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"on": ["t", "nobody"]}, "no line before it has defined"),
        ({"on": 3}, "no line before it has defined"),
        ({"graph": "a b"}, "is no name"),
        ({"graph": 3}, "its graph, decisions or words are none"),
        ({"chosen": []}, "its graph, decisions or words are none"),
        ({"chosen": {"product": "loops"}}, "is no decision"),
        ({"chosen": {"product:a": 3}}, "is no decision"),
        ({"chosen": {f"product:{n}": "x" * 100 for n in range(3000)}}, "decisions of "),
        ({"verdict": "good"}, "is no verdict"),
        ({"seconds": -1.0}, "is no measurement"),
        ({"seconds": None}, "do not fit each other"),
        ({"count": -1}, "do not fit each other"),
        ({"date": "yesterday"}, "is no date"),
    ],
)
def test_lines_that_are_no_decisions(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    lines: list[dict[str, object]] = [
        {"target": "t", "base": "t", "facts": {}},
        {"session": "s", "versions": "1", "date": "2026-01-01T00:00:00+00:00", "facts": {}},
        {
            "graph": "g", "on": ["t", "s"], "chosen": {"product:a": "loops"}, "seconds": 1.0, "verdict": "accepted",
            "date": "2026-01-01T00:00:00+00:00", **changed,
        },
    ]  # fmt: skip
    with Database(tmp_path / "a.sqlite") as db:
        found = db.take([("x", map(plain_json, lines))])
        assert found.added == 0 and found.left_out == 1 and why in found.faults[0] and "x:3: " in found.faults[0]
        assert db.searched() == []


def test_nobodys_folders_are_exported(tmp_path: Path) -> None:
    with filled(tmp_path / "a.sqlite") as a:
        text = "\n".join(a.exported())
    assert "somebody" not in text and "kernel.py:3: illegal access" in text and str(tmp_path) not in text


def test_a_part_of_the_measurements_is_exported(tmp_path: Path) -> None:
    with filled(tmp_path / "a.sqlite") as a:
        assert a.holds() and a.holds(a.key_of(CPU)) and not a.holds("other") and not a.holds(since="2999")
        assert sum('"of"' in line for line in a.exported(a.key_of(CPU))) == 3


def test_databases_of_machines_are_merged(tmp_path: Path) -> None:
    machines = [filled(tmp_path / f"{n}.sqlite", part) for n, part in enumerate(["EPYC", "EPYC", "Xeon"])]
    with Database(tmp_path / "all.sqlite", part=lambda _: Part("EPYC")) as merged:
        found = merged.take([(str(m.path), m.exported()) for m in machines])
        assert found.added == 12
        assert len({s for *_, s, _, _, _ in ((r[5], 0, 0, 0) for r in dump(merged.path))}) == 6  # type: ignore[index]
        record = merged.lookup("w", CPU)
        assert record is not None and record.provenance is Provenance.IMPORTED and record.trace == trace(4)
        # What is measured here decides, though the imported ratio is better.
        merged.record("w", CPU, trace(2), 1e-6, ratio=0.9, verdict=Verdict.ACCEPTED)
        record = merged.lookup("w", CPU)
        assert record is not None and record.provenance is Provenance.OWN and record.trace == trace(2)
    for m in machines:
        m.close()


def test_a_schedule_of_others_never_speaks_for_ours(tmp_path: Path) -> None:
    """Whatever date a stranger writes."""
    with filled(tmp_path / "a.sqlite") as a, Database(tmp_path / "b.sqlite", part=lambda _: Part("EPYC")) as b:
        b.record("w", CPU, trace(4), 1e-6, ratio=1.1, verdict=Verdict.REJECTED)
        b.take([("a", (line.replace('"date":"20', '"date":"29') for line in a.exported()))])
        assert b.lookup("w", CPU) is None


def test_lines_that_were_cut_off_lose_the_last(tmp_path: Path) -> None:
    with filled(tmp_path / "a.sqlite") as a, Database(tmp_path / "b.sqlite") as b:
        lines = list(a.exported())
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
        found = b.take([("a.jsonl", lines)])
        assert (found.added, found.left_out) == (3, 1) and found.faults[0].startswith(f"a.jsonl:{len(lines)}: ")


def good(**changed: object) -> dict[str, object]:
    return {
        "of": ["w", "t", "s"], "trace": trace(4).to_json(), "seconds": 1e-6, "ratio": 0.5, "count": 3, "sigma": 0.01,
        "verdict": "timed", "date": "2026-01-01T00:00:00+00:00", **changed,
    }  # fmt: skip


BAD = {
    "no json": "{",
    "no object": "[1]",
    "deep": "[" * 200_000,
    "deep in a name": '{"workload": ' + "[" * 5000 + "]" * 5000 + "}",
    "unknown kind": plain_json({"person": "x"}),
    "unknown session": plain_json(good(of=["w", "t", "other"])),
    "of a number": plain_json(good(of=3)),
    "of lists": plain_json(good(of=[["w"], {}, 1])),
    "no trace": plain_json(good(trace=None)),
    "a trace of a list": plain_json(good(trace=[["split", {}, []]])),
    "a long trace": plain_json(good(trace="x" * 300_000)),
    "a long line": plain_json(good(error="x" * 5_000_000)),
    "negative": plain_json(good(seconds=-1)),
    "infinite": plain_json(good()).replace("1e-06", "Infinity"),
    "not a number": plain_json(good(ratio=float("nan"))),
    "a large number": plain_json(good(ratio=1)).replace('"ratio":1', '"ratio":' + "9" * 5000),
    "a true number": plain_json(good(seconds=True)),
    "text": plain_json(good(sigma="0")),
    "verdict": plain_json(good(verdict="best")),
    "verdict of a list": plain_json(good(verdict=["timed"])),
    "accepted without a time": plain_json(good(verdict="accepted", seconds=None)),
    "failed with a time": plain_json(good(verdict="failed")),
    "count": plain_json(good(count=0)),
    "a large count": plain_json(good(count=1 << 40)),
    "date": plain_json(good(date="soon")),
    "code": plain_json(good(code=5)),
    "predicted": plain_json(good(predicted=1)),
    "name": plain_json({"workload": "w; DROP TABLE measurements", "text": ""}),
    "facts": plain_json({"session": "s2", "versions": "", "date": "2026-01-01", "facts": {"x": "y" * 20_000}}),
}


def defined() -> Iterator[str]:
    yield plain_json({"schema": 2})
    yield plain_json({"workload": "w", "text": ""})
    yield plain_json({"target": "t", "base": "t", "facts": {}})
    yield plain_json({"session": "s", "versions": "", "date": "2026-01-01", "facts": {}})


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_bad_line_is_left_out_and_named(tmp_path: Path, line: str) -> None:
    with Database(tmp_path / "a.sqlite") as db:
        found = db.take([("x", [*defined(), line, plain_json(good())])])
        assert (found.added, found.left_out) == (1, 1) and found.faults[0].startswith("x:5: ")
        assert len(found.faults[0]) < 300


def test_faults_are_named_up_to_a_number(tmp_path: Path) -> None:
    with Database(tmp_path / "a.sqlite") as db:
        found = db.take([("x", ["{"] * 100)])
        assert found.left_out == 100 and len(found.faults) == 20


def test_lines_of_a_newer_version_are_left_alone(tmp_path: Path) -> None:
    with Database(tmp_path / "a.sqlite") as db:
        lines = [plain_json({"schema": 99}), *list(defined())[1:], plain_json(good())]
        found = db.take([("new", lines), ("ours", [*defined(), plain_json(good(seconds=2.0))])])
        assert found.added == 1 and "newer torch-mlc" in found.faults[0]


def test_an_import_that_fails_takes_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield from [*defined(), plain_json(good())]
        raise OSError("the network is gone")

    with Database(tmp_path / "a.sqlite") as db:
        with pytest.raises(OSError, match="network"):
            db.take([("x", broken())])
        assert db.tuned() == []
        assert db.take([("x", [*defined(), plain_json(good())])]).added == 1


_IMPORT = """
import os, signal, sys
from torch_mlc.scheduler.tuning.database import Database
def lines():
    for n, line in enumerate(open(sys.argv[2])):
        if n == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield line
Database(sys.argv[1]).take([("x", lines())])
"""


def test_a_kill_during_an_import_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    lines = [*defined(), *(plain_json(good(trace=trace(n).to_json())) for n in range(5000))]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with filled(tmp_path / "a.sqlite") as a:
        before = dump(a.path)
    command = [sys.executable, "-c", _IMPORT, str(a.path), str(tmp_path / "x.jsonl"), "4500"]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    with warnings.catch_warnings(), Database(a.path) as db:
        warnings.simplefilter("error")
        assert dump(a.path) == before
        assert db.take([("x", lines)]).added == 5000


def test_many_rows_are_imported(tmp_path: Path) -> None:
    """How fast is said, not asserted."""
    count = 10_000
    begun = time.process_time()
    with Database(tmp_path / "a.sqlite") as db:
        rows = (plain_json(good(trace=trace(n).to_json())) for n in range(count))
        found = db.take([("x", [*defined(), *rows])])
        assert found.added == count
    print(f"{count} rows were written and imported in {time.process_time() - begun:.2f} s of processor time")


# --- what comes with the package --------------------------------------------------------------------------------------


def shipped(folder: Path, part: str = "EPYC") -> Shipped:
    with filled(folder / "made.sqlite", part) as db:
        (folder / "cpu-znver3.jsonl").write_text("\n".join(db.exported()) + "\n")
    return Shipped(folder)


def test_what_is_shipped_ranks_below_what_is_known_here(tmp_path: Path) -> None:
    path = tmp_path / "user.sqlite"
    with Database(path, part=lambda _: Part("EPYC"), shipped=shipped(tmp_path)) as db:
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(4) and found.provenance is Provenance.SHIPPED
        assert db.lookup("other", CPU) is None and not path.exists() and db.measured("w", CPU) == {}
        db.record("w", CPU, trace(2), 1e-6, ratio=1.0, verdict=Verdict.ACCEPTED)
        found = db.lookup("w", CPU)
        assert found is not None and found.trace == trace(2) and found.provenance is Provenance.OWN
    with Database(path, part=lambda _: Part("Xeon"), shipped=Shipped(tmp_path)) as db:
        assert db.lookup("w", CPU) is None


def test_a_shipped_file_of_no_part_is_for_all_parts(tmp_path: Path) -> None:
    with Database(tmp_path / "x.sqlite", part=lambda _: Part("Xeon"), shipped=shipped(tmp_path, part="")) as db:
        assert db.lookup("w", CPU) is not None
        assert db.lookup("w", Target("cpu", "../etc", 2)) is None


def test_a_damaged_shipped_file_costs_one_warning(tmp_path: Path) -> None:
    shipped(tmp_path)
    path = tmp_path / "cpu-znver3.jsonl"
    path.write_bytes(b"\xff\xfe{\n" + path.read_bytes())
    with Database(tmp_path / "x", part=lambda _: Part("EPYC"), shipped=Shipped(tmp_path)) as db:
        with pytest.warns(DatabaseWarning, match="damaged") as seen:
            assert db.lookup("w", CPU) is not None and db.lookup("w", CPU) is not None
        assert len(seen) == 1
