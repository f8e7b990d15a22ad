"""The suite ``generate``: what a step reads, and a run from end to end."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.generate.run_generate import CASES, LENGTH, SHAPES, build, nbytes_of, run_generate
from benchmarks.peers import parse_peers
from benchmarks.schema import from_json
from benchmarks.timing import TimingSettings


def test_what_a_step_reads() -> None:
    model, config = build("tiny", torch.float32, "cpu"), SHAPES["tiny"]
    inside = config.width * (config.heads + 2 * config.kv_heads) * config.head_width
    layer = inside + config.width**2 + 3 * config.width * config.hidden + 2 * config.width
    weights = 4 * (layer + config.width + config.vocabulary * config.width)
    row = 2 * config.kv_heads * config.head_width * 4
    assert nbytes_of(model, CASES["decode_short"]) == weights + 101 * row
    assert nbytes_of(model, CASES["decode_batch"]) == weights + 8 * 101 * row
    assert nbytes_of(model, CASES["decode_long"]) == weights + (LENGTH - 7) * row


@pytest.mark.parametrize("name", list(CASES))
def test_every_case_runs(name: str) -> None:
    timing = TimingSettings("cpu", 1, least_s=1e-4, warmup_s=0.0)
    result = run_generate(CASES[name], "tiny", parse_peers("eager"), torch.float32, timing, 1e9)
    assert result.peers["eager"].error is None and result.peers["eager"].samples
    assert result.floor_s == result.nbytes / 1e9 if result.nbytes else False


def test_a_run_is_written(tmp_path: Path) -> None:
    args = ["--suite", "generate", "--size", "tiny", "--peers", "eager", "--repeat", "1", "--filter", "decode_short"]
    done = CliRunner().invoke(main, [*args, "--out", str(tmp_path), "--no-plot"])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("generate_cpu_*.json")
    report = from_json(path.read_text())
    assert report.roofline is not None and report.roofline["read_bytes_per_s"] > 0
    assert [c.name for c in report.cases] == ["decode_short"]
