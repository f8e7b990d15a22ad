"""The suite attention: what kernels of attention take of several GPUs, in one table and one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("triton")

from benchmarks.cli import main
from benchmarks.static.attention import FORM, WORKLOADS, Taken, print_attention
from benchmarks.static.results import begin, go_on

TARGETS = "cuda:sm_80,cuda:sm_120"


def _run(folder: Path, *more: str) -> tuple[int, str]:
    arguments = ["--suite", "attention", "--size", "tiny", "--target", TARGETS, "--out", str(folder), *more]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    return result.exit_code, result.output


def test_every_type_width_and_variant_has_a_workload() -> None:
    assert len(WORKLOADS) == 3 * 3 * 4
    assert all(w.training for w in WORKLOADS.values())
    shapes = {name: [tuple(x.shape) for x in w.make("full").inputs] for name, w in WORKLOADS.items()}
    assert shapes["float32, 256, bias"] == [(4, 16, 2048, 256)] * 3 + [(16, 2048, 2048)]
    assert shapes["float16, 64, window"] == [(4, 16, 2048, 64)] * 3


def test_kernels_of_all_targets_are_in_one_file(tmp_path: Path) -> None:
    code, output = _run(tmp_path, "--filter", "bfloat16, 64, bias")
    assert code == 0, output
    (written,) = tmp_path.glob("attention_sm80_sm120_*.json")
    body = json.loads(written.read_text())
    assert (body["schema"], body["version"], body["complete"]) == ("torch-mlc-attention", 1, True)
    made = [(k["target"], k["kernel"]) for k in body["kernels"]]
    roles = ("forward", "queries", "keys and values", "bias")
    assert sorted(made) == sorted((target, role) for target in TARGETS.split(",") for role in roles)
    for k in body["kernels"]:
        assert k["workload"] == "bfloat16, 64, bias" and not k["error"]
        assert k["registers"] > 0 and k["shared"] > 0 and k["seconds"] > 0 and k["spills"] == 0
        assert k["parameters"]["warps"] in (4, 8) and set(k["lighter"]) <= set(k["parameters"])
    assert "0 of 8 kernels spill" in output
    # Nothing is compiled again by a run that goes on.
    before = written.read_text()
    assert _run(tmp_path, "--filter", "bfloat16, 64, bias", "--resume", str(written))[0] == 0
    assert json.loads(written.read_text())["kernels"] == json.loads(before)["kernels"]


def test_one_of_several_targets_that_is_none_is_refused(tmp_path: Path) -> None:
    arguments = ["--suite", "attention", "--target", "cuda:sm_80,cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "cpu" in result.output and not list(tmp_path.iterdir())


def test_rows_come_back_from_a_file_and_those_that_spill_stand_first(tmp_path: Path) -> None:
    results = begin(FORM, target=TARGETS, size="tiny")
    parameters = {"queries": 64, "keys": 32, "warps": 4, "stages": 2}
    light = Taken("cuda:sm_80", "a", "forward", parameters, (), 128, 0, 1024, 1e-5)
    heavy = Taken("cuda:sm_120", "b", "queries", parameters, ("keys",), 255, 16, 2048, None)
    broken = Taken("cuda:sm_120", "b", "bias", {}, (), 0, 0, 0, None, "too much shared memory")
    results.rows += [light, heavy, broken]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results.to_json()))
    again, changed = go_on(FORM, path, target=TARGETS, size="tiny")
    assert again.rows == [light, heavy, broken] and not changed
    console = Console(width=200, record=True)
    print_attention(again, console)
    lines = console.export_text().splitlines()
    rows = [line for line in lines if "cuda:sm_" in line]
    assert "1 of 3 kernels spill" in lines[0]
    assert "64 x 32" in rows[0] and "queries" in rows[0] and "keys" in rows[0] and "10" in rows[1]
    assert "too much shared memory" in rows[2]
