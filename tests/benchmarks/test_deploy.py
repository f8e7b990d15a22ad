"""The suite ``deploy``: exported models under several runtimes, each in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.deploy.run_deploy import DeploySettings, run_deploy
from benchmarks.models.registry import MODELS
from benchmarks.schema import from_json
from benchmarks.timing import TimingSettings

ARGS = ["--suite", "deploy", "--size", "tiny", "--repeat", "2", "--threads", "1", "--clock", "cpu"]
# Of the extra `bench`.
DRAWS = importlib.util.find_spec("matplotlib") is not None


def test_a_run_is_written(tmp_path: Path) -> None:
    args = [*ARGS, "--filter", "mixer", "--runtimes", "eager,library", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, args if DRAWS else [*args, "--no-plot"])
    assert done.exit_code == 0, done.output
    assert "times eager's speed" in done.output and "open and first call" in done.output
    (path,) = tmp_path.glob("deploy_cpu_*.json")
    assert not DRAWS or path.with_suffix(".png").stat().st_size > 1000
    report = from_json(path.read_text())
    (case,) = report.cases
    eager, library = case.peers["eager"], case.peers["library"]
    assert [len(p.samples) for p in (eager, library)] == [2, 2] and case.nbytes
    assert library.accuracy is not None and library.accuracy["ok"]
    # What is taken along is the weights and little more, and torch is not in the process.
    assert case.nbytes < library.counts["files"]["bytes"] < case.nbytes + 2**20
    assert library.counts["process"]["resident"] < eager.counts["process"]["resident"] / 2
    assert "library/eager" in report.geomeans()


def test_a_model_that_changes_its_arguments_is_given_them_anew_by_each_runtime() -> None:
    settings = DeploySettings(("eager", "library"), {}, 1, TimingSettings("cpu", 1, least_s=1e-4))
    result = run_deploy(MODELS["llama_decode"], "tiny", settings)
    assert [p.error for p in result.peers.values()] == [None, None]
    assert all(p.accuracy is not None and p.accuracy["ok"] for p in result.peers.values())


def test_runtimes_that_fail_leave_the_others_theirs(tmp_path: Path) -> None:
    ends = tmp_path / "python"
    ends.write_text("#!/bin/sh\necho it ends here >&2\nexit 3\n")
    ends.chmod(ends.stat().st_mode | stat.S_IXUSR)
    args = [
        *ARGS,
        "--filter",
        "mixer",
        "--runtimes",
        "eager,onnxruntime",
        "--python",
        f"onnxruntime={ends}",
        "--no-plot",
    ]
    done = CliRunner().invoke(main, [*args, "--out", str(tmp_path)])
    assert done.exit_code == 1
    (path,) = tmp_path.glob("deploy_cpu_*.json")
    (case,) = json.loads(path.read_text())["cases"]
    assert case["peers"]["onnxruntime"]["error"] == "the process ended with 3: it ends here"
    assert case["peers"]["eager"]["error"] is None and case["peers"]["eager"]["samples"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--runtimes", "eager,tvm"], "there is no runtime 'tvm'; give eager, compiled"),
        (["--device", "cuda"], "deploy runs models on the CPU alone"),
        (["--runtimes", ","], "there is no runtime ','"),
        (["--python", "onnxruntime=/nowhere/python"], "no RUNTIME=PATH"),
        (["--python", "/usr/bin/python3"], "no RUNTIME=PATH"),
    ],
)
def test_options_that_mean_nothing(args: list[str], text: str) -> None:
    done = CliRunner().invoke(main, [*ARGS, *args])
    assert done.exit_code == 2 and text in " ".join(done.output.replace("│", " ").split())
