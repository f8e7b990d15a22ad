"""The suite ``memory``: peaks of allocations, by hand and of steps whose peak is known."""

from pathlib import Path

import torch
import torch.nn.functional as F
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.memory import Event, peak, peak_of
from benchmarks.peers import parse_peers
from benchmarks.schema import from_json

MIB = 1 << 20


def test_the_peak_of_events_in_any_order() -> None:
    events = [Event(4, 1, -10), Event(1, 1, 10), Event(3, 2, 5), Event(5, 1, 12), Event(2, 9, -100), Event(6, 2, -5)]
    assert peak(events) == 17
    assert peak([]) == 0


def test_intermediates_count_while_they_are_held() -> None:
    x = torch.ones(MIB // 4)

    def step() -> torch.Tensor:
        y = x + 1  # 1 MiB
        y = y * 2  # 2 at once, then 1
        return y.double() + 1  # 1, 2 and 2

    # Numbers become tensors of one element.
    assert 5 * MIB <= peak_of(step, "cpu") < 5 * MIB + 256


def test_what_a_library_op_takes_for_itself_counts() -> None:
    x = torch.randn(64, 512)
    whole = x.numel() * x.itemsize
    # Neither the result nor the indices are as large as what sorting takes besides.
    assert peak_of(lambda: torch.unique(x).sum(), "cpu") >= 2 * whole


def test_what_was_there_before_is_not_subtracted() -> None:
    held = [torch.ones(MIB)]

    def step() -> None:
        held.clear()
        torch.ones(MIB // 4)

    assert MIB <= peak_of(step, "cpu") < MIB + 256


def test_gradients_count() -> None:
    w = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(4, 256)
    found = peak_of(lambda: F.linear(x, w).sum().backward(), "cpu")
    assert w.nbytes <= found <= w.nbytes + MIB // 8


def test_a_run_writes_json_with_peaks(tmp_path: Path) -> None:
    arguments = ["--suite", "memory", "--size", "tiny", "--filter", "dlrm", "--out", str(tmp_path), "--no-plot"]
    result = CliRunner().invoke(main, [*arguments, "--peers", "eager,aot_eager"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "aot_eager of eager" in result.output
    (written,) = tmp_path.glob("memory_*.json")
    report = from_json(written.read_text())
    assert [case.mode for case in report.cases] == ["inference", "training"]
    assert all((peer.peak_bytes or 0) > 0 for case in report.cases for peer in case.peers.values())
    inference, training = (case.peers["eager"].peak_bytes or 0 for case in report.cases)
    assert inference < training
    assert all(case.nbytes > 0 for case in report.cases if case.nbytes is not None)
    ratio = report.cases[0].ratio("aot_eager", "eager")
    assert ratio is not None and [p.name for p in parse_peers("eager,aot_eager")] == list(report.cases[0].peers)
