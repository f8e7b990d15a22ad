"""A campaign keeps what was told whatever happens to its processes and to itself, and goes on where it was."""

import io
import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from benchmarks.campaign import clock, command, plan, run
from benchmarks.campaign.cases import MARGIN, NamedKernel, in_poison, margins_hold
from benchmarks.campaign.plan import GPU_TESTS, STAGES, Settings, kernel_checks
from benchmarks.campaign.record import Record
from benchmarks.campaign.stages import (
    counters,
    fill,
    inductor,
    kernels,
    machine,
    models,
    sanitizer,
    sweep,
    tests,
    timing,
)
from benchmarks.cli import main
from benchmarks.steps import newest
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling import kernels as compiling
from torch_mlc.ir.errors import MlcError

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("campaign_child.py")
HERE = Settings(False, "cpu", "cuda:sm_90", "tiny", 10)


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """``campaign(how, *words)``: a campaign whose processes misbehave; its status, its text and its record."""
    folder = tmp_path / "child"
    folder.mkdir()
    plain = plan.plan

    def quick(settings):
        return tuple(replace(s, each=3.0) for s in plain(settings))

    def run_with_child(*args, **options):
        run.run_campaign(*args, **options, child=(sys.executable, str(CHILD), str(folder)))

    monkeypatch.setattr(command, "plan", quick)
    monkeypatch.setattr(command, "run_campaign", run_with_child)

    def campaign(how, *words):
        for old in folder.iterdir():
            old.unlink()
        (folder / how).touch()
        arguments = ["--suite", "campaign", "--size", "tiny", "--out", str(tmp_path / "out"), *words]
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        record = newest(tmp_path / "out", "campaign_*.jsonl")
        calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
        return result.exit_code, result.output, record and Record.read(record), calls

    return campaign


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("well", 0, ""),
        ("crash", 1, "was ended by SIGSEGV"),
        ("hang", 1, "took more than 3 s"),
        ("garbage", 1, "told something that is no row"),
        ("raise", 1, "ValueError: what it raises"),
        ("wrong", 1, "a number"),
    ],
)
def test_a_check_that_goes_wrong_is_kept_and_the_others_are_done(campaign, how, status, told):
    stages = STAGES[:-2] if how == "crash" else STAGES[:1]  # processes take a while to start
    found, text, record, calls = campaign(how, *(word for s in stages for word in ("--stage", s)))
    assert found == status and told in " ".join(text.split())
    assert len(calls) == len(record.ended) == sum(len(s.checks) for s in plan.plan(HERE) if s.name in stages)
    assert [r["check"] for r in record.failures] == ["rates"] * status
    assert all(r["strict"] == "1" for r in record.rows if "strict" in r)
    results = json.loads(record.path.with_suffix(".json").read_text())
    assert results["schema"] == "torch-mlc-campaign" and results["rows"] == record.rows
    assert results["settings"]["gpu"] is torch.cuda.is_available() and results["versions"]["torch"]


def test_one_stage_runs_alone_and_a_wrong_name_is_told(campaign):
    _, text, record, calls = campaign("well", "--stage", "machine")
    assert {r["stage"] for r in record.rows} == {"machine"} and len(calls) == 3 and "kernels:" not in text
    status, text, *_ = campaign("well", "--stage", "machin")
    assert status == 2 and "did you mean 'machine'" in " ".join(text.replace("│", " ").split())


def test_a_stage_that_is_out_of_time_is_gone_on_with(campaign, monkeypatch):
    quick = command.plan
    monkeypatch.setattr(command, "plan", lambda s: tuple(replace(x, seconds=0.0) for x in quick(s)))
    status, _, record, calls = campaign("well", "--stage", "machine", "--stage", "tests")
    assert status == 0 and not calls and {r["status"] for r in record.rows} == {"not done"} and not record.ended
    monkeypatch.setattr(command, "plan", quick)
    status, _, record, calls = campaign("well", "--resume", "--stage", "machine", "--stage", "tests")
    assert status == 0 and len(calls) == len(record.ended) == len(record.rows) == 7


def test_nothing_is_resumed_where_nothing_is(campaign, tmp_path):
    status, text, *_ = campaign("well", "--resume")
    assert status == 2 and "there is no campaign_*.jsonl" in text
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "campaign_x.jsonl").write_text("{}\n")
    status, text, *_ = CliRunner().invoke(main, ["--suite", "campaign", "--resume", "--out", str(tmp_path / "out")]), ""
    assert status.exit_code == 1 and "is no record of a campaign" in status.output


def test_a_campaign_that_is_interrupted_loses_nothing_and_is_gone_on_with(campaign, tmp_path):
    folder, out = tmp_path / "child", tmp_path / "out"
    (folder / "wait").touch()
    script = f"""
        import sys
        sys.argv = ["benchmarks"]
        from benchmarks.campaign import command, run
        def with_child(*args, plain=run.run_campaign):
            plain(*args, child=({sys.executable!r}, {str(CHILD)!r}, {str(folder)!r}))
        command.run_campaign = with_child
        from benchmarks.cli import main
        main(["--suite", "campaign", "--size", "tiny", "--out", {str(out)!r}])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        written = newest(out, "campaign_*.jsonl")
        if (folder / "waits").exists() and written is not None and '"rates"' in written.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED and "--resume goes on from here" in text
    path = newest(out, "campaign_*.jsonl")
    kept = Record.read(path)
    assert [r["check"] for r in kept.rows] == ["versions", "clocks", "rates"] and len(kept.ended) == 2
    assert json.loads(path.with_suffix(".json").read_text())["rows"] == kept.rows
    with path.open("a") as file:
        file.write('{"stage": "machine", "check": "rates", "figu')  # what a power cut leaves
    status, _, record, calls = campaign("well", "--resume", "--stage", "machine", "--stage", "tests")
    assert status == 0 and record.path == path and record.damaged == 0
    assert calls[0] == "machine: rates" and len(calls) == len(record.ended) - 2 == len(record.rows) - 2


def test_a_record_of_another_machine_is_not_gone_on_with(campaign, tmp_path):
    _, _, record, _ = campaign("well", "--stage", "machine")
    lines = record.path.read_text().splitlines()
    about = json.loads(lines[0])
    about["settings"]["gpu"] = not about["settings"]["gpu"]
    record.path.write_text("\n".join([json.dumps(about), *lines[1:]]) + "\n")
    status, text, *_ = campaign("well", "--resume")
    assert status == 1 and "with a GPU" in text


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_has_what_was_promised():
    full = {s.name: s for s in plan.plan(replace(HERE, gpu=True, device="cuda", size="full"))}
    assert len(full["kernels"].checks) == len(set(full["kernels"].checks)) == min(300, len(kernel_checks()))
    assert set(full) <= set(STAGES) and all(not s.without for s in full.values())
    assert sum(s.seconds for s in plan.plan(HERE)) > 0 and all(s.without for s in plan.plan(HERE))


def test_every_file_with_tests_for_a_gpu_is_in_the_plan():
    found = subprocess.run(["grep", "-rl", "pytest.mark.gpu", "tests"], cwd=ROOT, capture_output=True, text=True)
    marked = {p for p in found.stdout.split() if p.endswith(".py") and "conftest" not in p and "test_campaign" not in p}
    assert marked == set(GPU_TESTS)


# --- the stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "adamw", "layer_norm"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_kernels_are_compared_on_a_device(name, mode, monkeypatch):
    full = next((n for n in kernel_checks() if name in n and n.endswith(f"odd, float32, {mode}")), None)
    if full is None:
        pytest.skip("no gradient")
    monkeypatch.setattr(
        NamedKernel, "shape", lambda self, kind: tuple(min(n, 67) for n in (self.case.shapes[kind]["odd"]))
    )
    row = kernels.compared(NamedKernel.of(full), "cpu")
    assert row["status"] == "ok" and row["same_bits_again"] and row["error"] <= row["limit"]


@pytest.fixture
def wrong_kernels(monkeypatch):
    """Plants other text in kernels."""

    def planted(emitter, change):
        plain = getattr(compiling, emitter)

        def emit(nest, target):
            source = plain(nest, target)
            text = change(source.text)
            assert text != source.text
            return KernelSource(**{f: getattr(source, f) for f in source.__dataclass_fields__} | {"text": text})

        monkeypatch.setattr(compiling, emitter, emit)

    return planted


@pytest.fixture
def gelu():
    """Its name; the names of all kernels take seconds, since each is differentiated."""
    return next(n for n in kernel_checks() if "gelu" in n and n.endswith("aligned, float32, inference"))


def test_a_wrong_kernel_is_found_on_a_device(wrong_kernels, gelu, monkeypatch):
    wrong_kernels("emit_llvm", lambda text: text.replace("fmul", "fadd"))
    monkeypatch.setattr(
        NamedKernel, "shape", lambda self, kind: tuple(min(n, 64) for n in self.case.shapes[kind]["odd"])
    )
    monkeypatch.setenv("MLC_CACHE", "0")
    row = kernels.compared(NamedKernel.of(gelu), "cpu")
    assert row["status"] == "wrong" and "output 0: error" in row["why"]


def test_a_wrong_kernel_is_found_in_the_interpreter(wrong_kernels, gelu, monkeypatch):
    wrong_kernels("emit_triton", lambda text: text.replace("0.5", "0.51"))
    monkeypatch.setattr(
        NamedKernel, "shape", lambda self, kind: tuple(min(n, 64) for n in self.case.shapes[kind]["odd"])
    )
    row = kernels.interpreted(NamedKernel.of(gelu), "cuda:sm_90")
    assert row["status"] == "wrong" and "differs from its definition" in row["why"]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    "t", [torch.ones(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.ones(0), torch.ones(4, 6).T]
)
def test_writes_beside_an_input_are_seen(t, shifted):
    copy, flat = in_poison(t, shifted)
    assert torch.equal(copy, t) and copy.stride() == t.stride() and margins_hold(copy, flat)
    assert (copy.storage_offset() * copy.element_size() == MARGIN) is not shifted
    for place in (-1, t.numel()):
        copy, flat = in_poison(t, shifted)
        byte = (copy.storage_offset() + place) * copy.element_size()
        flat[byte] = 0
        assert not margins_hold(copy, flat)


@pytest.mark.slow
def test_tests_for_a_gpu_are_run_and_counted():
    rows = list(tests.run_tests("tests/codegen/triton/test_functions.py"))
    assert [r["status"] for r in rows] == ["ok"] and rows[-1]["failed"] == 0


def test_a_failing_test_is_a_row(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_a():\n    assert 1 == 2\n@pytest.mark.gpu\ndef test_b(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    failed, whole = tests.run_tests(str(file), "-c", str(tmp_path / "pytest.ini"))
    assert failed["status"] == whole["status"] == "wrong" and "assert 1 == 2" in failed["why"] and whole["passed"] == 1


def test_clocks_are_read_from_what_nvidia_smi_tells():
    line = "1980, 3201, 1980, 3201, 120.5, 700.00, 35, 580.65.06, P0\n"
    row = machine.parsed_clocks(line * 2)
    assert row["status"] == "ok" and row["gpus"] == 2 and row["clocks.sm"] == 1980.0 and row["pstate"] == "P0"
    assert machine.parsed_clocks("No devices were found\n")["status"] == "not done"


def test_the_table_names_what_is_not_done_without_a_gpu(tmp_path):
    record = Record.begin(tmp_path / "campaign_x.jsonl", {"device_name": "none", "settings": HERE.to_json()})
    console = Console(width=200, record=True, file=io.StringIO())
    run.print_campaign(record, plan.plan(HERE), console)
    text = console.export_text()
    assert all(stage in text for stage in STAGES[:3]) and "nothing is launched" in text


def small(name, monkeypatch, most=64):
    """A kernel by its name, of at most so many elements in a dimension."""
    plain = NamedKernel.shape
    monkeypatch.setattr(NamedKernel, "shape", lambda self, kind: tuple(min(n, most) for n in plain(self, kind)))
    return NamedKernel.of(name)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_kernels_are_timed_against_eager(mode, monkeypatch):
    kernel = small(next(n for n in kernel_checks() if "softmax" in n and n.endswith(f"float32, {mode}")), monkeypatch)
    row = timing.against_eager(kernel, "cpu", "cpu")
    assert row["status"] == "ok" and row["speedup"] == row["eager_s"] / row["mlc_s"] > 0
    assert ("bytes_per_s" in row) == (mode == "inference") and row["how"] == {"eager": "calls", "mlc": "calls"}
    json.dumps(row)


def test_inductor_is_timed_on_the_same_kernels(gelu, monkeypatch):
    kernel = small(gelu, monkeypatch)
    monkeypatch.setattr(inductor, "_MODES", {"default": None})
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, backend, mode, **kw: plain(f, backend="aot_eager", **kw))
    row = inductor.by_inductor(kernel, None, "cpu", "cpu")
    assert row["inductor_s"] > 0 and row["mode"] == "default"
    names = {s.name: s.checks for s in plan.plan(replace(HERE, minutes=45))}
    assert [n.partition("; ")[0] for n in names["inductor"][::2]] == list(names["timing"])


def test_short_kernels_are_timed_in_a_graph(monkeypatch):
    """On a clock that is played, for which a call takes 2 µs in a graph and 10 without."""

    class Played:
        cuda = True

        def __init__(self, device, flush):
            pass

        def time(self, call, calls):
            return 40e-6 if call is replay else {"short": 10e-6, "long": 1e-3, "refused": 10e-6}[call.__name__]

    def short():
        pass

    def long():
        pass

    def refused():
        pass

    def replay():
        pass

    monkeypatch.setattr(clock, "Clock", Played)
    monkeypatch.setattr(clock, "captured", lambda call: None if call is refused else replay)
    found = clock.timed({"a": short, "b": long, "c": refused}, "cuda")
    assert {n: (t.how, pytest.approx(t.seconds)) for n, t in found.items()} == {
        "a": ("graph", 40e-6 / clock.GRAPH_CALLS), "b": ("calls", 1e-3), "c": ("calls", 10e-6)
    }  # fmt: skip


def test_schedules_are_swept_with_their_figures_and_times(monkeypatch):
    class Measurer:
        def measure(self, schedules):
            return [2e-6, MlcError("it crashed")][: len(schedules)]

        def close(self):
            self.closed = True

    measurer = Measurer()
    monkeypatch.setattr(sweep, "measurer_for", lambda *_: measurer)
    kernel = small(next(n for n in kernel_checks() if n.startswith("softmax, aligned, bfloat16")), monkeypatch, 1024)
    (found,) = timing.explained(kernel, "cuda:sm_90").kernels
    fast, crashed = sweep.swept(found, 2, True)
    assert fast["seconds"] == 2e-6 and crashed["seconds"] is None and crashed["status"] == "wrong" and measurer.closed
    assert fast["resources"]["registers"] > 0 and fast["issue"]["slots"] > 0 and fast["moved_bytes"] > 0
    assert fast["trace"] != crashed["trace"] and fast["workload"] == found.workload
    json.dumps([fast, crashed])
    (untimed,) = sweep.swept(found, 1, False)
    assert untimed["seconds"] is None and untimed["status"] == "ok" and untimed["resources"] == fast["resources"]


@pytest.mark.slow
def test_models_are_compiled_without_a_gpu_and_run_with_one():
    row = models.counted("gpt2_d768", "training", HERE)
    assert row["status"] == "ok" and row["launches"] > 10 and row["spills"] == 0
    json.dumps(row)
    row = models.measured("gpt2_d128", "training", HERE)
    assert row["status"] == "ok", row
    assert row["speedup"] > 0 and row["mlc_peak_bytes"] > 0 and row["eager_s"] > 0
    json.dumps(row)


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        ("ran gelu\n========= ERROR SUMMARY: 0 errors\n", 0, "ok"),
        ("========= ERROR SUMMARY: 0 errors\n", 1, "wrong"),
        (
            "========= Invalid __global__ read of size 4 bytes\n=========     at fused_gelu_0+0x1\n"
            "========= ERROR SUMMARY: 2 errors\n", 1, "wrong",
        ),
        ("Failed to find injection library", 1, "not done"),
    ],
)  # fmt: skip
def test_what_the_sanitizer_tells_is_a_row(text, status, found):
    row = sanitizer.sanitized_row(text, status, "gelu")
    assert row["status"] == found and ("Invalid" not in text or "fused_gelu_0" in row["why"])


def test_a_kernel_runs_under_a_tool(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\n"$@" && echo "========= ERROR SUMMARY: 0 errors"\n')
    tool.chmod(0o700)
    name = next(n for n in kernel_checks() if n.startswith("softmax, odd, float32"))
    row = sanitizer.sanitized([str(tool)], f"{name}{plan.AND}{name.replace('odd', 'aligned')}")
    assert row["status"] == "ok" and row["seconds"] > 0 and row["kernels"] == 2


def test_counters_are_read_from_what_ncu_tells():
    names = ",".join(f'"{m}"' for m in counters.METRICS)
    units = ",".join('"byte"' for _ in counters.METRICS)
    values = ",".join(f'"{k},000.5"' for k in range(1, len(counters.METRICS) + 1))
    text = f'==PROF== done\n"ID","Kernel Name",{names}\n"","",{units}\n"0","fused_softmax_0",{values}\n'
    (row,) = counters.counted_rows(text)
    assert row["kernel"] == "fused_softmax_0" and row[counters.METRICS[1]] == 2000.5
    assert row["units"][counters.METRICS[1]] == "byte"
    for text, told in (("==ERROR== ERR_NVGPUCTRPERM", "administrators"), ("no such option", "told no counters")):
        (row,) = counters.counted_rows(text)
        assert row["status"] == "not done" and told in row["why"]


def test_what_needs_a_gpu_says_that_there_is_none(gelu):
    for stage in (sanitizer, counters, inductor):
        (row,) = stage.check(HERE, gelu)
        assert row["status"] == "not done" and "no GPU" in row["why"]


def test_a_cache_is_filled_with_what_the_stages_launch(tmp_path, monkeypatch):
    kernel = next(n for n in kernel_checks() if n.startswith("softmax, odd, bfloat16"))
    settings = replace(HERE, cache=str(tmp_path / "cache"))
    (row,) = fill.check(settings, f"timing: {kernel}")
    assert row["status"] == "ok" and row["kernels"] == 1 and list((tmp_path / "cache").rglob("*"))
    checks = plan.fill_plan(replace(settings, size="full"))[0].checks
    assert len(checks) == len(set(checks)) > 300 and "models: gpt2_d768, training" in checks
    named = {n.partition(": ")[0] for n in checks}
    assert named == {"kernels", "timing", "models"}
    environment = run.environment_of(settings)
    assert environment["MLC_TARGET"] == "cuda:sm_90" and environment["MLC_CACHE_DIR"] == settings.cache
    assert environment["MLC_STRICT"] == "1" and "MLC_TARGET" not in run.environment_of(HERE)


def test_filling_without_a_folder_is_refused():
    result = CliRunner().invoke(main, ["--suite", "campaign", "--fill"])
    assert result.exit_code == 2 and "--cache FOLDER" in result.output
