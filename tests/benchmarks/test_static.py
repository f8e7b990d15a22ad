"""The suite static: its rows tell what was compiled, and what misses a target is shown as missed."""

import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import torch_mlc
from benchmarks.cli import main
from benchmarks.static.report import Row, StaticReport
from benchmarks.static.run import Compiled, compile_workload, rows_of
from benchmarks.static.workloads import GPT_FEW, GPT_STEP, WORKLOADS

pytest.importorskip("triton")


def run(tmp_path: Path, *patterns: str) -> dict:  # type: ignore[type-arg]
    arguments = ["--suite", "static", "--size", "tiny", "--out", str(tmp_path)]
    for pattern in patterns:
        arguments += ["--filter", pattern]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("static_sm90_*.json")
    body = json.loads(written.read_text())
    for row in body["rows"]:
        assert row["name"][:20] in result.output
    assert f"{sum(r['met'] for r in body['rows'])} of {len(body['rows'])} targets met" in result.output
    assert f"Triton {body['versions']['triton']}," in result.output
    return body  # type: ignore[no-any-return]


def test_rows_of_the_chosen_workloads(tmp_path: Path) -> None:
    body = run(tmp_path, "int8-weight", "layer norm backward, N=4096", "softmax rows, N=1024, float32")
    assert body["schema"] == "torch-mlc-static" and not body["failed"]
    assert body["versions"]["triton"] == metadata.version("triton")
    assert list(body["workloads"]) == [
        "layer norm backward, N=4096", "int8-weight linear", "softmax rows, N=1024, float32"
    ]  # fmt: skip
    rows = {r["name"]: r for r in body["rows"]}
    m, n, k = 16, 384, 256
    least = m * k * 2 + n * k + n * 2 + m * n * 2
    (graph,) = body["workloads"]["int8-weight linear"].values()
    assert graph["compulsory_bytes"] == least
    linear = rows["int8-weight linear: bytes over the least"]
    assert linear["value"] == (graph["kernel_bytes"] + graph["library_bytes"]) / least
    assert linear["inductor"] == 4.97 and linear["met"] == (round(linear["value"], 2) <= 1.05)
    assert rows["softmax rows, N=1024: reads per input"]["value"] == 1
    assert not any("GPT-2" in name for name in rows)
    kernels = [k for w in body["workloads"].values() for g in w.values() for k in g["kernels"]]
    assert kernels and all(k["resources"]["registers"] > 0 and k["compile_cpu_s"] > 0 for k in kernels)
    for k in kernels:
        assert k["predicted"]["seconds"] >= max(k["predicted"]["bounds"].values())
        assert k["predicted"]["bounds"][k["predicted"]["bound"]] == max(k["predicted"]["bounds"].values())
    for g in (g for w in body["workloads"].values() for g in w.values()):
        alone = sum(k["predicted"]["seconds"] * k["calls"] for k in g["kernels"])
        assert g["predicted_s"] == pytest.approx(alone + g["predicted_library_s"])
    assert rows["spilled bytes, worst kernel"]["value"] == max(k["resources"]["spills"] for k in kernels)
    kept = StaticReport.from_json(body)
    assert kept.rows == rows_of(kept.workloads, kept.size, kept.target, kept.memory) and body["complete"]
    forward, backward = body["workloads"]["layer norm backward, N=4096"].values()
    value = rows["layer norm backward, N=4096: bytes over the least"]["value"]
    assert value == (backward["kernel_bytes"] + backward["library_bytes"]) / backward["compulsory_bytes"]
    assert forward["launches"] == 1
    both = [k for g in (forward, backward) for k in g["kernels"]]
    slots = sum(k["issue"]["slots"] * k["calls"] for k in both) / sum(k["least_bytes"] * k["calls"] for k in both)
    assert rows["layer norm backward, N=4096: slots a byte"]["value"] == pytest.approx(slots) and slots > 0.5


def test_what_nobody_knows_meets_no_target() -> None:
    name = "softmax rows, N=131072"
    compiled = compile_workload(WORKLOADS[name], "tiny", "cuda:sm_90").to_json()
    kernels = [k for g in compiled.values() for k in g["kernels"]]

    def row() -> Row:
        return next(r for r in rows_of({name: compiled}, "tiny", "cuda:sm_90") if r.name.endswith("slots a byte"))

    assert math.isfinite(row().value)
    kernels[0]["issue"]["guessed"] = (12,)
    assert not row().met and row().text(row().value) == "not known" and kernels[0]["name"] in row().detail


@pytest.mark.parametrize(
    ("value", "target", "digits", "at_least", "met"),
    [
        (260, 260, 0, False, True),
        (261, 260, 0, False, False),
        (1.04, 1.0, 1, False, True),
        (1.06, 1.0, 1, False, False),
        (1.06, 1.05, 2, False, False),
        (0.95, 0.95, 2, True, True),
        (0.94, 0.95, 2, True, False),
        (math.inf, 1.0, 1, False, False),
        (math.nan, 1.0, 1, True, False),
    ],
)
def test_what_misses_its_target(value: float, target: float, digits: int, at_least: bool, met: bool) -> None:
    assert Row("figure", value, target, None, at_least, digits=digits).met is met


def test_a_target_that_is_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--suite", "static", "--target", "cuda:sm90", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "no target 'cuda:sm90'" in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_launches_and_bytes_of_a_step_and_kernels_of_more_layers() -> None:
    def step(layers: int) -> Compiled:
        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(layers):
                x = torch.softmax(torch.tanh(x) @ w, -1)
            return x

        x, w = (torch.randn(n, 24, requires_grad=True) for n in (8, 24))
        name = GPT_FEW if layers == 2 else GPT_STEP
        report = torch_mlc.explain(f, x, w, training=True)
        return Compiled(WORKLOADS[name], "full", report, (0.1,) * len(report.kernels))

    few, many = step(2), step(4)
    rows = {r.name: r for r in rows_of({c.workload.name: c.to_json() for c in (many, few)}, "full", "cuda:sm_90")}
    forward, backward = many.report.graphs
    calls = sum(c.calls for g in (forward, backward) for c in g.libraries)
    assert rows[f"{GPT_STEP}: launches"].value == forward.launches + backward.launches + calls > 10
    assert calls == 4 + 4 + 1  # the products that make the gradient of the weights, which all layers share, are one
    ratio = rows[f"{GPT_STEP}: bytes over inputs and outputs, backward"]
    assert ratio.value == backward.traffic.moved / backward.traffic.compulsory > 1
    assert ratio.inductor == 4.0
    assert rows["distinct cubins per repeated layer"].value == len(many.report.kernels) / len(few.report.kernels)
    # Nothing here is machine code of a GPU.
    assert rows["kernels that do not compile"].value == len(many.report.kernels) + len(few.report.kernels)
    assert not rows["kernels that do not compile"].met


def test_defaults_are_compared_with_what_rules_offer(tmp_path: Path) -> None:
    arguments = ["--suite", "defaults", "--size", "tiny", "--filter", "column sums", "--tries", "3"]
    arguments += ["--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("defaults_sm90_*.json")
    body = json.loads(written.read_text())
    assert body["schema"] == "torch-mlc-defaults" and body["target"] == "cuda:sm_90" and not body["failed"]
    (gap,) = body["gaps"]
    assert gap["workload"] == "column sums" and gap["kernel"] in result.output
    assert 1 < gap["tried"] <= 3 and gap["failed"] == 0
    assert gap["ratio"] == gap["default"] / gap["best"] >= 1
    assert "no measurement has corrected" in result.output
    # A run that goes on with it has nothing to do; one with other settings is another run.
    again = CliRunner().invoke(main, [*arguments, "--resume"], catch_exceptions=False)
    assert again.exit_code == 0 and json.loads(written.read_text()) == body and body["complete"]
    other = CliRunner().invoke(main, [*arguments, "--target", "cuda:sm_80", "--resume", str(written)])
    assert other.exit_code == 2 and "was made with target cuda:sm_90" in " ".join(
        other.output.replace("│", " ").split()
    )
