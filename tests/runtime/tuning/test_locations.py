"""Where measurements are shared: files, folders, and what fsspec reaches."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from torch_mlc.ir.target import Target
from torch_mlc.runtime.tuning.locations import LocationError, read_files, write_lines
from torch_mlc.scheduler.schedule.trace import Step, Trace
from torch_mlc.scheduler.tuning.database import Database


def read(*places: str) -> dict[str, list[str]]:
    return {name.rpartition("/")[2]: [line.rstrip("\n") for line in lines] for name, lines in read_files(places)}


@pytest.fixture(params=["", "memory:/"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{tmp_path}/shared"


def test_writers_of_a_folder_have_files_of_their_own(folder: str) -> None:
    names = {write_lines(f"{folder}/", [f'{{"a": {n}}}', "ö"])[0] for n in range(3)}
    assert len(names) == 3 and all(re.search(r"shared/tuning-\d{8}T\d{6}-[0-9a-f]{8}\.jsonl$", n) for n in names)
    found = read(folder)
    assert sorted(found.values()) == [[f'{{"a": {n}}}', "ö"] for n in range(3)]
    assert read(f"{folder}/*.jsonl") == found == {k: v for n in names for k, v in read(n).items()}
    assert len(read(*names)) == 3


def test_a_file_is_appended_to_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    assert write_lines(str(path), ["1", "2"]) == (str(path), 2)
    path.write_text(path.read_text() + '{"half')
    write_lines(str(path), ["3"])
    assert read(str(path)) == {"a.jsonl": ["1", "2", '{"half', "3"]}


def test_what_cannot_be_appended_to_is_left_alone(tmp_path: Path) -> None:
    place = f"memory:/{tmp_path}/a.jsonl"
    write_lines(place, ["1"])
    with pytest.raises(LocationError, match="name its folder"):
        write_lines(place, ["2"])
    assert read(place) == {"a.jsonl": ["1"]}


def test_wrong_places_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, told in {
        str(tmp_path / "none.jsonl"): "no such file", str(tmp_path): "without files", f"{tmp_path}/*.x": "no such file",
        "nosuch://x/": "no place that fsspec reaches", f"memory:/{tmp_path}/none.jsonl": "no such file",
    }.items():  # fmt: skip
        with pytest.raises(LocationError, match=told):
            read(place)
    with pytest.raises(LocationError, match=r"ends in \.jsonl"):
        write_lines(str(tmp_path / "x.txt"), [])
    with pytest.raises(LocationError, match="cannot be written"):
        write_lines(str(tmp_path / "file" / "x.jsonl"), [])


def test_without_fsspec_plain_files_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("fsspec"):
            raise ImportError(name)
        return really(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    file, _ = write_lines(f"{tmp_path}/", ["1"])
    assert list(read(str(tmp_path)).values()) == [["1"]] == list(read(file).values())
    with pytest.raises(LocationError, match="pip install fsspec"):
        read("s3://bucket/folder")


def test_lines_without_end_come_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * (20 << 20) + b"\n\xff\n1")
    (lines,) = read(str(tmp_path)).values()
    assert [len(line) for line in lines] == [8 << 20, 8 << 20, 4 << 20, 1, 1] and lines[-1] == "1"


def test_another_database_is_read_as_one(tmp_path: Path) -> None:
    with Database(tmp_path / "a.sqlite") as a, Database(tmp_path / "b.sqlite") as b:
        a.record("w", Target("cpu", "znver3", 2), Trace((Step("unroll", (("loop", "i"),)),)), 1e-6)
        assert b.take(read_files([str(a.path)])).added == 1
        assert [t.workload for t in b.tuned()] == ["w"]
