"""`pytest --mlc-conformance` as users run it: in a folder of theirs, with their own tests and options."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dynamo_backend.conformance.known import KNOWN
from torch_mlc.dynamo_backend.conformance.registry import CASES

PLUGIN = "torch_mlc.dynamo_backend.conformance.plugin"
# A checkout that was installed before there was a plug-in does not have its entry point.
PLACES = importlib.metadata.distributions(path=site.getsitepackages())
INSTALLED = any(e.value == PLUGIN and e.group == "pytest11" for d in PLACES for e in d.entry_points)


def run(folder: Path, *words: str, code: int = 0, seconds: float = 300) -> str:
    """The output of pytest in ``folder``."""
    given = [] if INSTALLED else ["-p", PLUGIN]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, "-p", "no:cacheprovider", *words],
        cwd=folder, capture_output=True, text=True, timeout=seconds, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_cases_run_as_items_with_a_table_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text("def test_of_the_users():\n    raise AssertionError\n")
    only = "written_input or test_of_the_users or unknown"
    text = run(
        tmp_path, "--mlc-conformance", "--backend", "eager", "-v", "-k", only, "--conformance-skip", "aliasing",
        "--conformance-xfail", "options::unknown_mode=it takes any", "--mlc-conformance-json", "result.json", code=1,
    )  # fmt: skip
    assert "mutation::written_input PASSED" in text and "test_of_the_users" not in text
    assert "options::unknown_option FAILED" in text and "options::unknown_mode XFAIL" in text
    assert "an option that does not exist was accepted\n  the trap: An option that does not exist is ignored." in text
    assert "conformance of eager" in text and "failed as said:\n  options::unknown_mode: it takes any" in text
    told = json.loads((tmp_path / "result.json").read_text())
    by_name = {c["name"]: c for c in told["cases"]}
    assert told["backend"] == "eager" and not told["passed"]
    assert told["counts"] == {"passed": 1, "failed": 1, "known": 1, "skipped": 1}
    assert by_name["mutation::written_input"]["seconds"] > 0 and by_name["options::unknown_option"]["trap"]


def test_workers_of_xdist_run_them_too(tmp_path: Path) -> None:
    text = run(tmp_path, "-n", "2", "--mlc-conformance", "--backend", "eager", "-k", "written_input or empty_input")
    assert "3 passed" in text and "conformance of eager" in text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor alone")
def test_all_cases_are_shared_among_workers_without_being_asked(tmp_path: Path) -> None:
    """But for runs of chosen ones, where starting workers takes longer than the cases. Those that wait come first."""
    others = ",".join({c.topic for c in CASES} - {"options"})
    words = ["--mlc-conformance", "--backend", "eager", "--conformance-skip", others, "-v"]
    text = run(tmp_path, *words, code=1)
    shown = re.findall(r"\[gw\d\] .* (?:PASSED|FAILED|SKIPPED) conformance/?::(\S+)", text)
    assert " workers [" in text and sorted(shown) == sorted(c.name for c in CASES)
    waiting = {c.name for c in CASES if c.starts_processes}
    assert waiting <= set(shown[: len(CASES) // 2])
    assert "[gw0]" not in run(tmp_path, *words, "-k", "unknown_option", code=1)


def test_without_the_flag_nothing_of_it_is_there(tmp_path: Path) -> None:
    """Users' options of the same names stay theirs, and torch is not loaded."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend', default='theirs')\n"
    )
    (tmp_path / "test_users.py").write_text(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.getoption('--backend') == 'mine'\n"
        f"    assert '{PLUGIN}' in sys.modules and 'torch' not in sys.modules\n"
        "    ours = {m for m in sys.modules if m.startswith('torch_mlc')}\n"
        f"    assert len(ours) == 4, ours\n"
    )
    assert "1 passed" in run(tmp_path, "--backend", "mine")


def test_an_option_that_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--backend')\n")
    told = run(tmp_path, "--mlc-conformance", "--backend", "eager", code=4)
    assert "--mlc-conformance-backend where another plug-in has --backend" in told
    assert "1 passed" in run(tmp_path, "--mlc-conformance", "--mlc-conformance-backend", "eager", "-k", "empty_input")


def test_the_list(tmp_path: Path) -> None:
    text = run(tmp_path, "--mlc-conformance-list")
    assert f"{len(CASES)} cases" in text and all(f"  {c.name.partition('::')[2]}: {c.trap}" in text for c in CASES)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "asks for a backend: --backend NAME"),
        (["--backend", "mcl"], "no backend 'mcl'. There are: aot_eager, "),
        (["--backend", "no.module:backend"], "no backend 'no.module:backend': No module named 'no'"),
        (["--backend", "eager", "--backend-options", "{"], "is no JSON"),
        (["--backend", "eager", "--backend-options", "1"], "is no object"),
        (["--backend", "eager", "--conformance-skip", "mutations"], "no case is named 'mutations'. Topics: mutation, "),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(words: list[str], told: str, tmp_path: Path) -> None:
    assert told in run(tmp_path, "--mlc-conformance", *words, code=4)


def test_names_are_unique_and_say_what_goes_wrong() -> None:
    assert len({c.name for c in CASES}) == len(CASES)
    assert all(c.trap.endswith(".") and c.why.endswith(".") for c in CASES)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch_mlc", "conformance", "--backend", "aot_eager", "--only", "numbers",
         "--only", "options::unknown_*", "--skip", "numbers::ties", "--json", str(file)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "failed options::unknown_option: an option that" in done.stdout, done.stderr
    counts = json.loads(file.read_text())["counts"]
    assert counts["failed"] == 2 and counts["passed"] == sum(c.topic == "numbers" for c in CASES) - 1


def compiles_cpp() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torchs_backends(backend: str, tmp_path: Path) -> None:
    if backend == "inductor" and not compiles_cpp():
        pytest.skip("Inductor asks for a C++ compiler, and there is none")
    known = [w for name, why in KNOWN[backend].items() for w in ("--conformance-xfail", f"{name}={why}")]
    text = run(tmp_path, "--mlc-conformance", "--backend", backend, *known, seconds=3000)
    assert f"{len(KNOWN[backend])} xfailed" in text
