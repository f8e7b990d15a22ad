"""The doctor's stages: what a process does to itself is one clear line, and the others go on."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from torch_mlc.dynamo_backend.cli.main import cli
from torch_mlc.dynamo_backend.doctor import absent, command, examine, installation, on_cpu, on_gpu

CHILD = Path(__file__).with_name("misbehaving.py")


@pytest.fixture
def doctored(monkeypatch):
    """Runs `torch-mlc doctor` with processes that misbehave in a way; its status and text."""

    def run(how, *words):
        child = (sys.executable, str(CHILD), how)

        def asked(target, tell, *, begin):
            return examine.examine(target, tell, begin=begin, child=child)

        monkeypatch.setattr(command, "examine", asked)
        monkeypatch.setattr(examine, "CPU", replace(examine.CPU, each=2.0))
        result = CliRunner().invoke(cli, ["doctor", *words])
        return result.exit_code, result.output

    return run


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("crash", "✗ softmax                was ended by SIGABRT: Aborted in check"),
        ("hang", "✗ softmax                took more than 2 s: in check"),
        ("raise", "✗ softmax                RuntimeError: what a kernel raises"),
        ("garbage", "✗ softmax                told something that is no finding"),
    ],
)
def test_a_program_that_goes_wrong_is_one_line_and_the_rest_is_looked_at(doctored, how, told):
    status, text = doctored(how)
    assert status == 1 and told in text and "1 failed" in text
    assert "✓ norm backward          norm backward of CPU" in text and "✓ target" in text


@pytest.mark.parametrize(("how", "status"), [("well", 0), ("warning", 0), ("crash", 1), ("broken", 1)])
def test_the_status_is_one_where_something_failed_and_warnings_are_none(doctored, how, status):
    found, text = doctored(how, "--json")
    told = json.loads(text)
    assert found == status and told["ok"] == (status == 0)
    assert {f["mark"] for f in told["findings"]} >= {"warning": {"warning"}, "broken": {"failed"}}.get(how, {"ok"})


def test_a_torch_that_cannot_be_loaded_is_told_and_ends_nothing(doctored):
    status, text = doctored("broken")
    assert status == 1 and text.count("ImportError: libtorch.so: no such file") == 4  # one a stage


def test_a_gpu_that_is_here_is_looked_at_and_another_only_when_it_is_named(doctored):
    names = [{f["stage"] for f in json.loads(doctored("gpu", "--json", *words)[1])["findings"]} for words in (
        (), ("--target", "hip:gfx942"))]  # fmt: skip
    assert names == [
        {"installation", "CPU", "driver", "GPU"}, {"installation", "CPU", "driver", "GPU", "absent GPU"}
    ]  # fmt: skip


def test_stages_name_the_checks_that_there_are():
    for stage, checks in (
        (examine.INSTALLATION, installation.CHECKS), (examine.CPU, on_cpu.CHECKS), (examine.DRIVER, on_gpu.DRIVER),
        (examine.GPU, on_gpu.CHECKS), (examine.ABSENT, absent.checks_for("cuda:sm_90")),
    ):  # fmt: skip
        assert stage.checks == tuple(checks)


def test_the_doctor_needs_no_torch_itself():
    probe = (
        "import sys, torch_mlc.dynamo_backend.doctor.command, torch_mlc.dynamo_backend.doctor.installation\n"
        "assert 'torch' not in sys.modules and 'llvmlite' not in sys.modules"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.slow
def test_this_machine_is_well():
    """The whole command, as one types it."""
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    told = json.loads(result.output)
    bad = [f for f in told["findings"] if f["mark"] == "failed"]
    assert result.exit_code == 0 and told["ok"] and not bad
    assert {"CPU", "installation", "driver"} < {f["stage"] for f in told["findings"]}
