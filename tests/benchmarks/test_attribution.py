"""The figures of attribution: one file for several runs, models that raise are told, tables have what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attribution.__main__ import measure_all, measured, results_in, row

SETTINGS = {"size": "tiny", "dtype": "bfloat16", "budget": 6, "training": True, "against": "eager"}


def found(model: str, kept: float | None = 0.03) -> dict[str, Any]:
    place = {"kind": "order of a sum", "places": ["aten.mm.default at net.py:3 in f: x @ w"], "share": 0.7}
    rows = [] if kept is None else [place]
    whole = {"relative": 0.01, "ulp": 2.0}
    return {"model": model, "whole": whole, "rows": rows, "kept": kept, "explained": 0.999, "rest": 0.0, "programs": 9}


def test_a_file_goes_on_with_the_models_that_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"

    def raises() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    assert not measure_all(results_in(path, **SETTINGS), path, {"one": lambda: found("one"), "two": raises})
    body = json.loads(path.read_text())
    assert [m["model"] for m in body["models"]] == ["one"] and body["failed"] == {"two": "RuntimeError: no such kernel"}
    assert body["training"] is True and body["versions"]["torch"] and body["machine"]["cores"]
    assert "two: RuntimeError" in capsys.readouterr().err
    assert measure_all(results_in(path, **SETTINGS), path, {"one": raises, "two": lambda: found("two", None)})
    body = json.loads(path.read_text())
    assert [m["model"] for m in body["models"]] == ["one", "two"] and not body["failed"]
    told = capsys.readouterr().out.splitlines()
    assert told[2:] == [row(m) for m in body["models"]]
    with pytest.raises(ValueError, match="was made with dtype bfloat16, this run has float32"):
        results_in(path, **{**SETTINGS, "dtype": "float32"})


def test_a_row_has_what_is_asked_of_it() -> None:
    assert row(found("net")) == (
        "| `net` | 0.01 (2 ulp) | 99.9 % | 0.0 % | 3.0 % | order of a sum: mm.default at net.py:3, 70 % | 9 |"
    )
    assert row(found("net", None)) == "| `net` | none | | | | | 9 |"


def test_a_model_is_measured() -> None:
    made = measured("dlrm", "tiny", "bfloat16", 6, False, "eager")
    assert made["model"] == "dlrm" and made["programs"] >= 2 and "difference" in made["text"].lower()
