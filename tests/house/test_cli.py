"""The command line: every command answers, and a wrong word or setting says what there is."""

import io
import json
import os
import sys
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from torch_mlc import __version__
from torch_mlc.dynamo_backend.cli.cache import ago
from torch_mlc.dynamo_backend.cli.main import COMMANDS, cli, main
from torch_mlc.dynamo_backend.compiling.tuning import DATABASE
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.dynamo_backend.reports.report import GraphBreak
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.cache.cache import DiskCache, Entry
from torch_mlc.runtime.cache.fingerprint import environment_fingerprint
from torch_mlc.runtime.log import CacheWarning
from torch_mlc.runtime.settings.options import option_specs
from torch_mlc.scheduler.schedule.overrides import load_overrides
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database, target_key

CPU = Target("cpu", "znver3", 2)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


def answer(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_loads_and_helps(command: str) -> None:
    assert "Usage:" in answer(command, "--help")
    assert command in answer("--help")


def test_the_pages_are_shown() -> None:
    assert "glossary" in answer("docs")
    assert answer("docs", "numbers").startswith("# Numbers") and answer("docs", "docs/numbers.md") == answer(
        "docs", "numbers"
    )
    assert "Did you mean 'glossary'?" in answer("docs", "glosary", code=2)


def test_help_of_a_primitive_says_what_it_does() -> None:
    for name in PRIMITIVES:
        told = getattr(Schedule, name).__doc__
        assert told and "ScheduleError" in told, name


def test_version() -> None:
    assert __version__ in answer("--version")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("dmeo", "demo"), ("opt", "options"), ("option", "options"), ("cach", "cache"), ("tuen", "tune"), ("inf", "info")],
)
def test_a_wrong_command_names_the_nearest(asked: str, meant: str) -> None:
    assert f"no command '{asked}'. Did you mean '{meant}'? There are: demo, " in answer(asked, code=2)
    assert "Did you mean 'list'?" in answer("cache", "lst", code=2)


@pytest.mark.parametrize("asked", ["mode", "run", "compile", "x", "train", "config"])
def test_what_is_near_to_nothing_has_no_suggestion(asked: str) -> None:
    assert f"no command '{asked}'. There are: demo, " in answer(asked, code=2)


@pytest.mark.parametrize(("asked", "told"), [("version", "--version"), ("explain", "torch_mlc.explain(")])
def test_what_is_found_elsewhere_is_said_so(asked: str, told: str) -> None:
    text = answer(asked, code=2)
    assert told in text and "Did you mean" not in text


@pytest.mark.parametrize("words", [("demo", "--steps", "0"), ("demo", "--device", "tpu"), ("cache", "lst")])
def test_wrong_values_are_usage_errors(words: tuple[str, ...]) -> None:
    assert "Error:" in answer(*words, code=2)


def test_a_wrong_variable_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_TUNEE", "1")
    text = answer("cache", "list", code=1)
    assert "Did you mean 'MLC_TUNE'?" in text and "Traceback" not in text


def test_cache_list_and_clear(cache_dir: Path) -> None:
    assert "0 entries" in answer("cache", "list")
    disk = DiskCache(cache_dir)
    for i in range(3):
        disk.write(Entry("kernel", f"{i}abc", {}, b"x" * 1000, f"row reduction {i}"))
    listed = answer("cache", "list", "--limit", "2")
    assert "row reduction" in listed and "and 1 more" in listed and "3 entries" in listed
    assert "removed 3 entries" in answer("cache", "clear")
    assert "0 entries" in answer("cache", "list")


def test_info_tells_versions_targets_and_the_cache(cache_dir: Path) -> None:
    text = answer("info")
    for word in ("torch-mlc", __version__, "llvmlite", "cpu", "C++ compiler", "0 entries"):
        assert word in text
    assert str(cache_dir) in text.replace("\n", "")


def test_cache_list_as_json(cache_dir: Path) -> None:
    DiskCache(cache_dir).write(Entry("kernel", "abc", {}, b"x" * 1000, "a row's reduction"))
    told = json.loads(answer("cache", "list", "--json"))
    (entry,) = told["entries"]
    assert told["folder"] == str(cache_dir) and told["size"] == entry["size"] > 1000
    assert (entry["kind"], entry["key"], entry["description"]) == ("kernel", "abc", "a row's reduction")
    assert datetime.fromisoformat(entry["used"]).tzinfo is not None


@pytest.fixture
def tuned(cache_dir: Path) -> dict[str, str]:
    """Two kernels of which measurements are kept, of each the fastest schedule as text."""
    traces = {n: Trace((Step("vectorize", (("loop", f"b0_i{n}"),)),), "cpu_pointwise") for n in range(3)}
    with Database(cache_dir / DATABASE, environment_fingerprint()) as database:
        for workload in ("a" * 64, "b" * 64):
            database.record(workload, CPU, traces[0], 2e-6)
            database.record(workload, CPU, traces[1], 1e-6)
            database.record(workload, CPU, traces[2], None, "does not compile")
    return {workload * 64: traces[1].to_json() for workload in "ab"}


def test_tuning_results_are_listed(tuned: dict[str, str], cache_dir: Path) -> None:
    listed = answer("tune", "list", "--limit", "1")
    for part in ("a" * 12, target_key(CPU), "1 us", "cpu_pointwise", "and 1 more", "2 tuned kernels, 6 measurements"):
        assert part in listed
    told = json.loads(answer("tune", "list", "--json"))
    assert told["database"] == str(cache_dir / DATABASE)
    assert {t["workload"]: (t["seconds"], t["measured"], t["rule"]) for t in told["tuned"]} == dict.fromkeys(
        tuned, (1e-6, 3, "cpu_pointwise")
    )
    assert "2 tuned kernels, 6 measurements" in answer("info")


def test_predictions_are_told_apart(tuned: dict[str, str], cache_dir: Path) -> None:
    trace, gpu = Trace((), "gpu_pointwise"), gpu_target("cuda:sm_90")
    with Database(cache_dir / DATABASE, environment_fingerprint(), predicted=True) as database:
        database.record("c" * 64, gpu, trace, 3e-6)
        database.record("a" * 64, CPU, trace, 1e-9)
    listed = answer("tune", "list")
    assert (
        "prediction" in listed and "measuring" in listed and "4 tuned kernels, 6 measurements, 2 predictions" in listed
    )
    told = json.loads(answer("tune", "list", "--json"))
    assert [t["predicted"] for t in told["tuned"]] == [False, False, True, True]
    path = cache_dir.parent / "fast.json"
    answer("tune", "export", str(path), "--target", target_key(CPU))
    # Of the first kernel the schedule that was measured, not the one that was predicted to be faster.
    assert json.loads(path.read_text()) == {w: json.loads(t) for w, t in tuned.items()}
    answer("tune", "clear")
    assert "nothing was tuned" in answer("tune", "list")


def test_nothing_is_made_to_say_that_nothing_was_tuned(cache_dir: Path) -> None:
    assert "nothing was tuned" in answer("tune", "list")
    assert "0 tuned kernels" in answer("info")
    assert "there were no tuning results" in answer("tune", "clear")
    assert "nothing was tuned" in answer("tune", "export", str(cache_dir.parent / "x.json"), code=1)
    assert not cache_dir.exists()


def test_exported_schedules_are_what_the_option_takes(tuned: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "fast.json"
    assert "wrote 2 schedules" in answer("tune", "export", str(file))
    given = load_overrides(str(file))
    assert {o.workload: o.how.to_json() for o in given.items if isinstance(o.how, Trace)} == tuned
    assert "ends in .json" in answer("tune", "export", str(tmp_path / "x"), code=2)


def test_schedules_of_several_machines_are_exported_one_by_one(
    tuned: dict[str, str], cache_dir: Path, tmp_path: Path
) -> None:
    other = Target("cpu", "elsewhere", 2)
    with Database(cache_dir / DATABASE) as database:
        database.record("c" * 64, other, Trace((), "cpu_pointwise"), 1e-6)
    file = tmp_path / "fast.json"
    asked = answer("tune", "export", str(file), code=2)
    assert "several machines" in asked and target_key(other) in asked
    assert "wrote 1 schedule to" in answer("tune", "export", str(file), "--target", target_key(other))
    assert "nothing was tuned on 'x'" in answer("tune", "export", str(file), "--target", "x", code=2)


def test_clearing_the_cache_says_what_stays(tuned: dict[str, str], cache_dir: Path) -> None:
    cleared = answer("cache", "clear")
    assert "kept 2 tuned kernels, 6 measurements, which still decide" in cleared
    assert "cache clear --tuning` removes them" in cleared and "2 tuned kernels" in answer("info")
    assert "removed 2 tuned kernels, 6 measurements" in answer("cache", "clear", "--tuning")
    assert "0 tuned kernels" in answer("info") and "tuned" not in answer("cache", "clear")


def test_tune_clear_clears_measurements_alone(tuned: dict[str, str], cache_dir: Path) -> None:
    DiskCache(cache_dir).write(Entry("kernel", "abc", {}, b"x"))
    assert "removed 2 tuned kernels, 6 measurements" in answer("tune", "clear")
    assert "nothing was tuned" in answer("tune", "list") and "1 entry" in answer("cache", "list")


def test_a_database_that_is_none_is_said_so(cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / DATABASE).write_text("this is no database, but long enough to look like one " * 100)
    assert "cannot be read" in answer("tune", "list", code=1)


def test_compiling_with_a_cache_folder_that_is_a_file_warns_of_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="file is a file, so nothing is kept; set MLC_CACHE_DIR to a folder"):
        disk = DiskCache(tmp_path / "file")
    assert not disk.write(Entry("kernel", "abc", {}, b"x")) and disk.read("kernel", "abc") is None


def test_a_report_prints_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report((), breaks=(GraphBreak("größer × …", "model.py:3: y = größe"),))
    assert "größer × …" in str(report) and "größe" in str(report)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    print(report, report.show())
    assert rb"gro\xdfer x ..." in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", ["info", "cache list", "cache clear --tuning", "tune list", "tune clear"])
def test_a_cache_folder_that_is_a_file_is_said_so(words: str, cache_dir: Path) -> None:
    cache_dir.write_text("")
    text = answer(*words.split(), code=1)
    assert f"{cache_dir} is a file, not a folder: name another by MLC_CACHE_DIR" in text


def test_options_take_two_lines_each_and_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "MLC_" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    for name, value in {
        "MLC_THREADS": "7", "TORCH_MLC_TUNE_BUDGET": "1.5m", "MLC_TUNE_BUDGET": "3s", "MLC_LLM_HOME": "x",
        "MLC_LOG": "timing,cache", "MLC_MEMORY_LIMIT": "1536MiB",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    lines = answer("options").splitlines()
    assert len(lines) == 2 * len(option_specs()) + 1
    assert (
        "tune = 0   (default; MLC_TUNE: 0, model, 1, replay)" in lines
        and "cache_size = 4GiB   (default; " in "\n".join(lines)
    )
    assert lines[-1] == "MLC_LLM_HOME is no setting of torch-mlc, and is left alone"
    changed = answer("options", "--changed").splitlines()
    assert [line.split(":")[0] for line in changed[:-1:2]] == [
        "tune_budget = 90s   (from TORCH_MLC_TUNE_BUDGET", "log = timing,cache   (from MLC_LOG",
        "threads = 7   (from MLC_THREADS", "memory_limit = 1536MiB   (from MLC_MEMORY_LIMIT",
    ]  # fmt: skip
    told = json.loads(answer("options", "--json"))
    assert {s["name"]: (s["value"], s["from"]) for s in told["settings"]}["tune_budget"] == (
        "90s", "TORCH_MLC_TUNE_BUDGET",
    )  # fmt: skip
    assert told["left_alone"] == ["MLC_LLM_HOME"]
    assert answer("options", "--markdown").startswith("# Settings")


def test_without_variables_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "MLC_" in name]:
        monkeypatch.delenv(name)
    assert answer("options", "--changed") == "every setting has its default: the environment sets none\n"


@pytest.mark.parametrize(
    "words",
    ["", "--version", "info", "options", "options --json", "options --markdown", "cache list", "tune list", "nothing"],
)
def test_every_command_answers_on_an_ascii_terminal(
    words: str, tuned: dict[str, str], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskCache(cache_dir).write(Entry("kernel", "abc", {}, b"", "größer × …"))
    monkeypatch.setattr(sys, "argv", ["torch-mlc", *words.split()])
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = (stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]
    assert out.isascii() and (err if words == "nothing" else out or not words)
    assert end.value.code == (2 if words == "nothing" else 0) or not words
    if words == "cache list":
        assert rb"gro\xdfer x ..." in out


@pytest.mark.parametrize(("seconds", "text"), [(3, "3 s"), (90, "1 min"), (7300, "2 h"), (200000, "2 d"), (-1, "0 s")])
def test_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text
