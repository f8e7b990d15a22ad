"""The suite slots: what the workloads of static take of several GPUs, in one table, with a gate on sm_90."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("triton")

from benchmarks.cli import main
from benchmarks.static.across import FORM, NOT_BOUND_BY_MEMORY, Footprint, over, print_slots, slots_limit
from benchmarks.static.results import begin, go_on
from benchmarks.static.workloads import WORKLOADS

TARGETS = "cuda:sm_90,hip:gfx942"
ROW = Footprint("cuda:sm_90", "GELU", 1, 0, 1.0, 1.0, 4.25, 7.8, 32, 0, 0, 64.0, 1.0, 1.0)


def _run(folder: Path, *more: str) -> tuple[int, str]:
    arguments = ["--suite", "slots", "--size", "tiny", "--target", TARGETS, "--out", str(folder), *more]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    return result.exit_code, result.output


def test_a_workload_has_a_row_for_each_target(tmp_path: Path) -> None:
    code, output = _run(tmp_path, "--filter", "column sums")
    (written,) = tmp_path.glob("slots_sm90_gfx942_*.json")
    body = json.loads(written.read_text())
    assert (body["schema"], body["version"], body["complete"]) == ("torch-mlc-slots", 1, True) and not body["failed"]
    assert [(r["workload"], r["target"]) for r in body["rows"]] == [("column sums", t) for t in TARGETS.split(",")]
    for r in body["rows"]:
        assert r["launches"] == sum(k["calls"] for k in r["kernels"]) > 0 and not r["error"]
        assert r["bytes_over"] >= 1 == r["reads"] and r["registers"] > 0 == r["spills"]
        least = sum(k["least_bytes"] * k["calls"] for k in r["kernels"])
        assert r["slots_a_byte"] == sum(k["issue"]["slots"] * k["calls"] for k in r["kernels"]) / least
        assert f"{r['slots_a_byte']:.2f}" in output
    stopped = [r for r in body["rows"] if r["is_over"] and r["target"] == "cuda:sm_90"]
    assert code == (1 if stopped else 0), output
    # Nothing is compiled again by a run that goes on.
    assert _run(tmp_path, "--filter", "column sums", "--resume", str(written))[0] == code
    assert json.loads(written.read_text())["rows"] == body["rows"]


@pytest.mark.parametrize(
    ("row", "is_over"),
    [
        (ROW, False),
        (replace(ROW, slots_a_byte=7.84), False),
        (replace(ROW, slots_a_byte=7.86), True),
        (replace(ROW, slots_a_byte=None), True),
        (replace(ROW, slots_a_byte=9.0, workload="gated MLP"), False),
        (replace(ROW, slots_a_byte=None, launches=0), False),
        (replace(ROW, error="fused_0: too much shared memory"), True),
    ],
)
def test_what_is_over_its_limit(row: Footprint, is_over: bool) -> None:
    assert row.is_over is is_over


def test_the_gate_is_of_the_gpu_that_was_measured(tmp_path: Path) -> None:
    results = begin(FORM, target=TARGETS, size="tiny")
    heavy = replace(ROW, slots_a_byte=9.0)
    results.rows += [ROW, replace(heavy, target="hip:gfx942"), replace(heavy, workload="gated MLP")]
    assert over(results) == ["GELU for hip:gfx942"] and not over(results, measured=True)
    results.rows.append(replace(heavy, workload="dropout"))
    assert over(results, measured=True) == ["dropout for cuda:sm_90"]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results.to_json()))
    again, changed = go_on(FORM, path, target=TARGETS, size="tiny")
    assert again.rows == results.rows and not changed
    console = Console(width=200, record=True)
    print_slots(again, console)
    text = console.export_text()
    assert "2 of 4 over the limit" in text and "over the limit: dropout for cuda:sm_90" in text
    assert f"gated MLP: {NOT_BOUND_BY_MEMORY['gated MLP']}" in text


def test_reasons_are_of_workloads_and_limits_of_machines() -> None:
    assert NOT_BOUND_BY_MEMORY.keys() <= WORKLOADS.keys()
    assert slots_limit("cuda:sm_90") == 7.8 and 5 < slots_limit("cuda:sm_100") < 6


def test_one_of_several_targets_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--suite", "slots", "--target", "cuda:sm_80,cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "cpu" in result.output and not list(tmp_path.iterdir())
