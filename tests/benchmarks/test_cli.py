"""The command line: bad input is refused with the nearest right one, a small run writes what it promises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.kernels.registry import KERNELS
from benchmarks.machine import Roofline
from benchmarks.models.registry import MODELS
from benchmarks.peers import parse_peers
from benchmarks.run_kernels import failed, meant, run_kernel
from benchmarks.run_models import MODES, run_model
from benchmarks.schema import from_json
from benchmarks.timing import TimingSettings

ROOFLINE = Roofline(1e10, 1e11, "float32")
QUICK = TimingSettings("cpu", rounds=2, least_s=0.0, warmup_s=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "kernel"], "'kernel' is not one of"),
        ([], "Missing option '--suite'"),
        (["--suite", "kernels", "--peers", "inducter"], "did you mean 'inductor'"),
        (["--suite", "kernels", "--filter", "softmux"], "did you mean 'softmax'"),
        (["--suite", "models", "--filter", "softmax"], "the cases are gpt2_d128"),
        (["--suite", "models", "--dtype", "float8"], "'float8' is not one of"),
        (["--suite", "models", "--repeat", "0"], "0 is not in the range"),
        (["--suite", "compile", "--layers", "two"], "not a list of numbers"),
        (["--suite", "compile", "--layers", "0"], "at least one layer"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu() -> None:
    result = CliRunner().invoke(main, ["--suite", "kernels", "--device", "cuda"])
    assert result.exit_code == 2 and "torch sees no GPU" in result.output


def test_models_run_writes_json_and_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cli.measure_roofline", lambda *_: ROOFLINE)
    arguments = ["--suite", "models", "--size", "tiny", "--filter", "dlrm", "--repeat", "2", "--out", str(tmp_path)]
    arguments += ["--peers", "eager,aot_eager"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        arguments.append("--no-plot")
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("*.json")
    report = from_json(written.read_text())
    assert [case.mode for case in report.cases] == ["inference", "training"]
    assert all(len(peer.samples) == 2 for case in report.cases for peer in case.peers.values())
    assert report.versions["torch"] == json.loads(written.read_text())["versions"]["torch"]
    if "--no-plot" not in arguments:
        (picture,) = tmp_path.glob("*.png")
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_peer_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = parse_peers("eager,aot_eager")
    compile_ = type(peers[0]).compile

    def broken(peer, function, dynamic):  # type: ignore[no-untyped-def]
        def raising(*_: object) -> None:
            raise RuntimeError("no such kernel")

        return compile_(peer, function, dynamic) if peer.name == "eager" else raising

    monkeypatch.setattr(type(peers[0]), "compile", broken)
    case = KERNELS["row_sum"]
    result = run_kernel(case, "odd", "inference", peers, torch.float32, False, QUICK, ROOFLINE)
    assert result.peers["aot_eager"].error == "RuntimeError: no such kernel"
    assert failed(result) == ["aot_eager"]
    assert len(result.peers["eager"].samples) == 2


def test_a_kernel_in_training_has_its_gradients_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = KERNELS["huber_loss"]
    case = replace(case, shapes={"cpu": {"odd": (12, 18)}})
    peers = parse_peers("eager,aot_eager")
    settings = replace(QUICK, clock="cpu")
    assert meant(case, MODES) == ["inference", "training"] and meant(KERNELS["row_sum"], MODES) == ["inference"]
    result = run_kernel(case, "odd", "training", peers, torch.float32, False, settings, ROOFLINE)
    assert (result.mode, failed(result)) == ("training", [])
    assert all(len(p.samples) == 2 for p in result.peers.values())
    compile_ = type(peers[0]).compile

    def doubled(peer, function, dynamic):  # type: ignore[no-untyped-def]
        if peer.name == "eager":
            return compile_(peer, function, dynamic)
        return lambda *args: (loss := function(*args)) * 2 - loss.detach()

    monkeypatch.setattr(type(peers[0]), "compile", doubled)
    result = run_kernel(case, "odd", "training", peers, torch.float32, False, settings, ROOFLINE)
    assert failed(result) == ["aot_eager"]
    assert result.peers["aot_eager"].accuracy["worst"] == "output 1"


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = parse_peers("eager,aot_eager")
    compile_ = type(peers[0]).compile

    def doubled(peer, function, dynamic):  # type: ignore[no-untyped-def]
        if peer.name == "eager":
            return compile_(peer, function, dynamic)
        # The value is right and its gradient is twice the right one.
        return lambda *args: (loss := function(*args)) * 2 - loss.detach()

    monkeypatch.setattr(type(peers[0]), "compile", doubled)
    result = run_model(MODELS["dlrm"], "tiny", "training", peers, torch.float32, False, QUICK, ROOFLINE)
    assert failed(result) == ["aot_eager"]
    assert result.peers["aot_eager"].accuracy["worst"].startswith("grad ")
