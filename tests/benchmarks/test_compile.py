"""The suites compile and scaling: where seconds went, and what is asked of them."""

import json
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.cli import main
from benchmarks.schema import CaseResult, PeerResult, Report
from benchmarks.table import own_limit, own_table


def case(layers: int, state: str, **phases: float) -> CaseResult:
    kept = {f"own: {k.replace('_', ': ')}": s for k, s in phases.items()} | {"dynamo": 1.0}
    return CaseResult("gpt", f"{layers} layers, {state}", "training", "float32", peers={"mlc": PeerResult(phases=kept)})


def test_own_seconds_stand_against_their_limits() -> None:
    report = Report("compile", "cpu", [], "", {}, {}, {}, None)
    report.cases = [
        case(2, "cold", forward_fuse=0.1),
        case(12, "cold", forward_fuse=1.0, forward_emit=1.0, backward_fuse=2.0),
        case(12, "warm", forward_key=0.25),
        case(48, "cold", forward_fuse=6.0),
        case(48, "warm", forward_key=0.3),
    ]
    limits = [own_limit(report, c) for c in report.cases]
    assert limits == [None, 2.5, 0.5, pytest.approx(4.0 * 1.3), pytest.approx(0.25 * 1.3)]
    console = Console(record=True, width=200, force_terminal=True, color_system="truecolor", file=StringIO())
    console.print(own_table(report))
    lines = console.export_text(styles=True).splitlines()
    together = [line for line in lines if "together" in line]
    assert ["4.00 s" in together[0], "6.00 s" in together[2]] == [True, True]
    assert ["\x1b[1;31m" in line for line in together] == [True, False, True, False]
    assert sum("backward" in line for line in lines) == 1


def test_scaling_writes_sizes_and_phases(tmp_path: Path) -> None:
    arguments = ["--suite", "scaling", "--nodes", "12,24", "--filter", "chain", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("scaling_cpu_*.json")
    assert list(tmp_path.glob("scaling_cpu_*.png"))
    few, many = json.loads(written.read_text())["cases"]
    nodes = [c["peers"]["mlc"]["counts"]["all"]["nodes"] for c in (few, many)]
    assert nodes[1] == 2 * nodes[0] and abs(nodes[0] - 12) <= 6
    assert {"import", "fuse", "emit", "compile", "load"} <= few["peers"]["mlc"]["phases"].keys()
