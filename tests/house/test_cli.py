"""The command line: every command answers, and a wrong word or setting says what there is."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from torch_mlc import __version__
from torch_mlc.dynamo_backend.cli.cache import ago
from torch_mlc.dynamo_backend.cli.main import COMMANDS, cli
from torch_mlc.runtime.cache import DiskCache, Entry


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


def test_version() -> None:
    assert __version__ in answer("--version")


def test_a_wrong_command_names_the_nearest() -> None:
    assert "no command 'dmeo'. Did you mean 'demo'?" in answer("dmeo", code=2)


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


def test_options_show_values_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MLC_THREADS", "7")
    row = next(line for line in answer("options").splitlines() if "MLC_THREADS" in line)
    assert "7" in row and "environment" in row
    assert answer("options", "--markdown").startswith("# Settings")


@pytest.mark.parametrize(("seconds", "text"), [(3, "3 s"), (90, "1 min"), (7300, "2 h"), (200000, "2 d"), (-1, "0 s")])
def test_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text
