"""`torch-mlc tune`: what was measured is looked at, shared, verified, and trained on."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from torch_mlc.dynamo_backend.cli.main import cli
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.cache.fingerprint import environment_fingerprint
from torch_mlc.scheduler.decisions import DecisionOverrides
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.schedule.trace import Trace
from torch_mlc.scheduler.tuning.database import Database, Verdict, Workload, target_key

CPU = Target("cpu", "znver3", 2)
ROWS: Any = parse("""
@nest(outputs=["out0"])
def rows(in0: float32[64, 33], out0: float32[64]):
    for a in serial(64):
        for b in serial(33):
            with block("b0"):
                i = spatial(64, a)
                r = reduction(33, b)
                out0[i] = sum.update(in0[i, r])
""")
KEY = Workload.of(ROWS).key


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


def answer(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == code, result.output
    return result.output


def raced(path: Path, ratio: float = 0.8) -> None:
    """A race of the default against two others, of which one crashed."""
    with Database(path, environment_fingerprint()) as db:
        default = default_schedule(ROWS, CPU).trace
        other = Schedule(ROWS, "by hand")
        other.split("b", [None, 3])
        workload = Workload.of(ROWS)
        db.record(workload, CPU, default, 1e-6, ratio=1.0, count=15, sigma=0.01, code_hash="c0", against="c0")
        db.record(
            workload, CPU, other.trace, ratio * 1e-6, ratio=ratio, count=15, sigma=0.01, verdict=Verdict.ACCEPTED,
            code_hash="c1", against="c0",
        )  # fmt: skip
        other.unroll("b_1")
        db.record(workload, CPU, other.trace, None, "it crashed", verdict=Verdict.CRASHED)


def test_list_tells_the_gain(cache_dir: Path) -> None:
    raced(cache_dir / DATABASE)
    text = answer("tune", "list")
    assert "1.25x" in text and "800 ns" in text and "by hand" in text and "measuring" in text
    (told,) = json.loads(answer("tune", "list", "--json"))["tuned"]
    assert (told["ratio"], told["verdict"], told["failed"], told["measured"]) == (0.8, "accepted", 1, 3)


def test_what_is_not_faster_for_sure_is_the_default(cache_dir: Path) -> None:
    with Database(cache_dir / DATABASE) as db:
        db.record("a" * 64, CPU, Trace(), 1e-6, ratio=0.995, sigma=0.0)
        db.record("b" * 64, CPU, Trace(), None, "it crashed")
    text = answer("tune", "list")
    assert "the default" in text and "all failed" in text


def test_show_tells_the_nest_and_every_measurement(cache_dir: Path) -> None:
    raced(cache_dir / DATABASE)
    text = answer("tune", "show", KEY[:8])
    for part in (
        KEY,
        "def rows(in0",
        f"on {target_key(CPU)}: 3 measurements",
        "1.25x",
        "1.0%",
        "crashed",
        "it crashed",
    ):
        assert part in text
    told = json.loads(answer("tune", "show", KEY, "--json"))
    assert told["workload"] == KEY and "def rows" in told["nest"]
    best, default, crashed = told["measurements"]
    assert (best["ratio"], best["code_hash"], best["against"], best["provenance"]) == (0.8, "c1", "c0", "own")
    assert default["ratio"] == 1.0 and crashed["seconds"] is None and crashed["error"] == "it crashed"
    assert "no kernel or graph 'zz' was tuned" in answer("tune", "show", "zz", code=1)
    with Database(cache_dir / DATABASE) as db:
        db.record(KEY[:8] + "0" * 56, CPU, Trace(), 1e-6)
    assert "the beginning of 2 kernels" in answer("tune", "show", KEY[:8], code=2)
    assert "the text of its nest is not known" in answer("tune", "show", KEY[:8] + "000")


def test_machines_share_what_they_measured(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing was tuned" in answer("tune", "export", str(tmp_path / "x.jsonl"), code=1)
    raced(cache_dir / DATABASE)
    folder = tmp_path / "shared"
    assert "wrote 7 lines to" in answer("tune", "export", f"{folder}/")
    assert "wrote 7 lines to" in answer("tune", "export", str(folder), "--target", target_key(CPU))
    assert "nothing was tuned on x" in answer("tune", "export", f"{folder}/", "--target", "x", code=1)
    assert "nothing was tuned since 2999" in answer("tune", "export", f"{folder}/", "--since", "2999", code=1)
    assert "--since is for" in answer("tune", "export", str(tmp_path / "x.json"), "--since", "2026", code=2)

    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "another"))
    assert "took 3 measurements, 3 known already, into" in answer("tune", "import", str(folder))
    assert "took 0 measurements, 3 known already" in answer("tune", "import", str(cache_dir / DATABASE))
    assert "imported" in answer("tune", "list") and "1 tuned kernel, 3 measurements" in answer("info")
    assert "no such file" in answer("tune", "import", str(tmp_path / "none.jsonl"), code=1)
    (tmp_path / "bad.jsonl").write_text("{\n" * 30)
    bad = answer("tune", "import", str(tmp_path / "bad.jsonl"), code=1)
    assert bad.count("left out:") == 21 and "10 lines more" in bad and "none of the lines" in bad
    assert "1 tuned kernel" in answer("cache", "clear", "--tuning") and "0 tuned kernels" in answer("info")


def test_decisions_of_graphs_are_listed_shown_and_shared(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = DecisionOverrides.of({("product", "ab12"): "loops"})
    with Database(cache_dir / DATABASE, "1") as db:
        db.record_decisions("f" * 40, CPU, loops, error="it crashed", verdict=Verdict.CRASHED)
    assert "no search ended" in answer("tune", "list") and "it crashed" in answer("tune", "show", "ff")
    with Database(cache_dir / DATABASE, "2") as db:
        db.record_decisions("f" * 40, CPU, loops, 1e-3, ratio=0.8, count=36, sigma=0.01, verdict=Verdict.ACCEPTED)
    text = answer("tune", "list")
    assert "product:ab12=loops" in text and "1.25x" in text and "0 tuned kernels" in text and "1 searched graph" in text
    (told,) = json.loads(answer("tune", "list", "--json"))["searched"]
    assert told["decisions"] == {"product:ab12": "loops"} and told["measured"] == 2
    first, second = json.loads(answer("tune", "show", "ffff", "--json"))["measurements"]
    assert (first["verdict"], first["count"], second["error"]) == ("accepted", 36, "it crashed")
    raced(cache_dir / DATABASE)
    assert "kernels and graphs" in answer("tune", "show", "", code=2)
    answer("tune", "export", f"{tmp_path}/shared/")
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "another"))
    assert "took 5 measurements, into" in answer("tune", "import", f"{tmp_path}/shared/")
    assert "1 tuned kernel, 3 measurements, 1 searched graph" in answer("info")
    assert "1 searched graph" in answer("tune", "clear") and "nothing was tuned" in answer("tune", "list")


def test_verify_names_what_does_not_replay(cache_dir: Path, tmp_path: Path) -> None:
    assert "0 schedules replayed, 0 refused" in answer("tune", "verify")
    raced(cache_dir / DATABASE)
    file = tmp_path / "a.jsonl"
    answer("tune", "export", str(file))
    assert "3 schedules replayed, 0 refused" in answer("tune", "verify")
    file.write_text(
        file.read_text().replace("b0_i0", "nowhere").replace('\\"loop\\":\\"b\\"', '\\"loop\\":\\"nowhere\\"')
    )
    named = answer("tune", "verify", str(file), code=1)
    assert f"{KEY[:12]} on {target_key(CPU)}: a schedule of by hand is refused: " in named and "nowhere" in named
    told = json.loads(answer("tune", "verify", str(file), "--json", code=1))
    assert told["faults"][0]["targets"] == [target_key(CPU)] and len(told["faults"]) >= 2
    answer("tune", "import", str(file))  # the sessions are known: nothing of ours is replaced
    assert "3 schedules replayed" in answer("tune", "verify", code=1)
    assert "removed" in answer("tune", "verify", "--forget", code=1)
    assert "3 schedules replayed, 0 refused" in answer("tune", "verify")
    assert "not for files" in answer("tune", "verify", "--forget", str(file), code=2)


def test_training_names_what_it_needs(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "lightgbm" else object() if name.endswith(".train") else really(name, package)

    monkeypatch.setattr("torch_mlc.dynamo_backend.cli.tune.find_spec", without)
    assert "pip install 'torch-mlc[tune]'" in answer("tune", "train", "--quick", code=1)


def test_a_newer_database_is_said_so(cache_dir: Path) -> None:
    cache_dir.mkdir()
    raw = sqlite3.connect(cache_dir / DATABASE)
    raw.execute("PRAGMA user_version = 7")
    raw.close()
    for words in ("tune list", "tune show x", "tune verify", "info", "tune clear"):
        assert "a newer torch-mlc wrote it: its schema is 7" in answer(*words.split(), code=1)
