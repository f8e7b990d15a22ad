"""What the net chooses by a commit, and what it fails for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.net import programs as random_programs
from tests.net.commands import command, run
from tests.net.commit import PARTS, Commit, part_of
from tests.net.operators import operators
from tests.net.report import Part
from tests.net.tenth import tenth
from tests.opinfo.cases import Job


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout


def commits(folder: Path, count: int) -> list[Commit]:
    """So many commits in a row, one of which merges two others."""
    folder.mkdir()
    git(folder, "init", "-q")
    found = []
    for k in range(count):
        if k == 4:
            git(folder, "checkout", "-q", "-b", "side")
            for n in range(2):
                git(folder, "commit", "-q", "--allow-empty", "-m", f"side {n}")
            git(folder, "checkout", "-q", "main")
            git(folder, "merge", "-q", "--no-ff", "side", "-m", "merged")
        else:
            git(folder, "commit", "-q", "--allow-empty", "-m", f"commit {k}")
        found.append(Commit.at(folder))
    return found


def test_ten_commits_in_a_row_run_all_parts(tmp_path: Path) -> None:
    found = commits(tmp_path / "made", PARTS)
    assert sorted(c.part for c in found) == list(range(PARTS))
    assert len({c.seed // 10_000 for c in found}) == PARTS, "and each has seeds of its own"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path / 'made'}", "shallow")
    shallow = Commit.at(tmp_path / "shallow")
    assert shallow.name == found[-1].name and shallow.number is None, "no history, no number"
    assert shallow.part == int(shallow.name, 16) % PARTS and "shallow" in str(shallow)


def test_without_git_it_is_the_first_part(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (commit,) = commits(made, 1)
    (made / "unpacked").mkdir()
    for place in (tmp_path, made / "unpacked"):
        found = Commit.at(place)
        assert found == Commit() and (found.seed, found.part) == (0, 0), "an sdist inside of another checkout"
        assert "not a checkout" in str(found)
    assert commit != Commit()


def test_each_slow_test_is_in_one_part() -> None:
    names = [f"tests/room/test_file.py::test_some[{k}]" for k in range(500)]
    sizes = [sum(part_of(n) == k for n in names) for k in range(PARTS)]
    assert sum(sizes) == len(names) and min(sizes) > 25


def test_a_part_of_the_tests_is_what_pytest_runs(repository: Path, tmp_path: Path) -> None:
    inside = tmp_path / "test_some.py"
    inside.write_text("import pytest\n@pytest.mark.parametrize('k', range(40))\ndef test_some(k): pass\n")
    configuration = ["-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path), "-n", "0", "-q", "--co"]
    options = ["-p", "tests.conftest", *configuration, "--tenth", "3", str(inside)]
    _, lines = run(["-m", "pytest", *options], 120, lambda line: None)
    expected = [name for k in range(40) if part_of(name := f"test_some.py::test_some[{k}]") == 3]
    assert [line for line in lines if "::" in line] == expected != []


def test_an_operator_that_raises_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker whose compiler refuses its settings raises for all of them.
    monkeypatch.setenv("MLC_NUMERICS", "no such")
    part = Part("operators")
    operators(part, tmp_path, 1, lambda text: None, [Job("add", "float32"), Job("mul", "float32", "gradient")])
    assert part.ran == "2 of 2 operators: 2 raises"
    assert [f.fails for f in part.found] == [True, True]
    assert "add float32 forward raises" in str(part.found[0]) and "--ops 'add'" in part.found[0].again


@pytest.mark.parametrize(("status", "fails"), [("wrong", 1), ("crash", 1), ("raises", 0), ("hang", 0), ("equal", 0)])
def test_wrong_programs_and_crashes_fail_and_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, fails: int
) -> None:
    def first(campaign: object, worker: object, seed: int) -> tuple[None, dict[str, str]]:
        return None, {"status": status if seed % 7 == 3 else "equal", "detail": "said"}

    monkeypatch.setattr(random_programs.Campaign, "first", first)
    part = Part("programs")
    random_programs.programs(part, tmp_path, 1, 0, 0.2, lambda text: None)
    assert bool(part.found) == (status != "equal") and bool(part.faults) == bool(fails)
    if part.found:
        assert part.found[0].again == "python -m tests.fuzz --one 3"
        assert part.found[-1].again.endswith("--target cuda:sm_90")


def test_commands_that_fail_and_such_that_never_end(tmp_path: Path) -> None:
    part, told = Part("command"), list[str]()
    (status, lines) = run(["-c", "print(1); raise SystemExit(3)"], 60, told.append)
    assert (status, lines) == (3, ["1"]) == (3, told)
    # What it has started and left behind is ended with it.
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run(["-c", endless], 1, told.append) == (None, [])
    command(part, "tests.no_such_module", (), 60, told.append)
    assert part.faults and part.faults[0].again == "python -m tests.no_such_module "


def test_slow_tests_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("tenth")
    lines = ["FAILED tests/a/test_b.py::test_c[d-1] - assert 1 == 2", "ERROR tests/e.py", "=== 1 failed in 3 s ==="]
    monkeypatch.setattr("tests.net.tenth.run", lambda *_: (1, lines))
    tenth(part, 4, 1, lambda text: None)
    assert part.ran == "part 4: 1 failed in 3 s"
    assert [f.again for f in part.faults] == ["python -m pytest -m slow -n 0 'tests/a/test_b.py::test_c[d-1]'"]
    monkeypatch.setattr("tests.net.tenth.run", lambda *_: (None, []))
    tenth(part, 4, 1, lambda text: None)
    assert "did not end" in part.faults[-1].what
