"""What the doctor's checks find, and that they find it: planted wrong kernels, folders, settings, versions."""

import re
import stat
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling import kernels
from torch_mlc.dynamo_backend.doctor import absent, installation, on_cpu, on_gpu
from torch_mlc.dynamo_backend.doctor.programs import PROGRAMS, DisagreementError, Outcome, SampleProgram, run
from torch_mlc.ir.target import TargetError, gpu_target
from torch_mlc.runtime.gpu.libraries import NoGpuLibrary


@pytest.fixture
def plant(monkeypatch):
    """Writes other kernels than those that are asked for: what is replaced in their text, and by what."""

    def planted(emitter, pattern, by):
        plain = getattr(kernels, emitter)

        def emit(nest, target):
            source = plain(nest, target)
            text = re.sub(pattern, by, source.text)
            assert text != source.text
            return KernelSource(**{f: getattr(source, f) for f in source.__dataclass_fields__} | {"text": text})

        monkeypatch.setattr(kernels, emitter, emit)

    return planted


def only(rows):
    (row,) = rows
    return row


def test_a_right_kernel_on_the_cpu_is_found_right():
    row = only(on_cpu.program("softmax", "cpu"))
    assert row["mark"] == "ok" and row["figures"]["kernels"] == 1 and row["figures"]["error"] < 1e-6


def test_a_wrong_kernel_on_the_cpu_is_found(plant):
    plant("emit_llvm", r"\b0x3FE0000000000000\b|\b5\.0+e-0*1\b", "0x3FE0010000000000")  # 0.5 and a little
    row = only(on_cpu.program("pointwise", "cpu"))
    assert row["mark"] == "failed" and "differs from eager at element" in row["found"]


def test_a_wrong_kernel_for_a_gpu_that_is_not_here_is_found(plant):
    pytest.importorskip("triton")
    plant("emit_triton", r"\b0\.5\b", "0.502")
    row = only(absent.program("pointwise", "cuda:sm_90"))
    assert row["mark"] == "failed" and "differs from its definition" in row["found"]


def test_a_right_kernel_for_a_gpu_that_is_not_here_is_interpreted_and_read():
    pytest.importorskip("triton")
    row = only(absent.program("softmax", "cuda:sm_90"))
    assert row["mark"] == "ok"
    assert (row["figures"]["kernels"], row["figures"]["verified"], row["figures"]["spills"]) == (1, 1, 0)
    assert row["figures"]["slots_a_byte"] > 1


def test_a_target_that_is_none_is_told():
    pytest.importorskip("triton")
    assert only(absent.target_known("cuda:sm_12"))["mark"] == "failed"
    assert not list(absent.program("softmax", "cuda:sm_12"))  # which is told once
    assert "H200" in only(absent.target_known("cuda:sm_90"))["found"]


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a gradient", "a shape", "a type", "no number"])
def test_what_differs_from_eager_is_named(how):
    want = torch.linspace(-1, 1, 9, dtype=torch.float64)
    got = want.float()
    got = {
        "a gradient": got * torch.where(torch.arange(9) == 4, 1.0, 1.00002),
        "a shape": got[:8],
        "a type": got.half(),
        "no number": got.masked_fill(torch.arange(9) == 3, float("nan")),
    }[how]
    with pytest.raises(DisagreementError, match="the gradient"):
        Outcome().judge("the gradient", got, want, want.float())


def test_roundings_are_no_difference():
    want = torch.randn(1000, dtype=torch.float64)
    outcome = Outcome()
    outcome.judge("x", want.float() * (1 + 1e-7), want, want.float())
    assert 0 < outcome.error < outcome.limit < 1e-5


def test_a_program_of_which_no_kernel_is_made_is_found():
    with pytest.raises(DisagreementError, match="no kernel"):
        run(SampleProgram("nothing", lambda x: x.view(-1), ((3, 4),)), "cpu", on_cpu.OPTIONS)


# --- what is installed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "fit"),
    [("2.11", True), ("2.15.1+cu130", True), ("2.16.0", False), ("2.9.1", False), ("2.11.0a0+git12", True)],
)
def test_versions_fit_what_the_package_says_that_it_needs(version, fit):
    needed = installation.requirement("torch")
    assert needed == ">=2.11,<2.16" and installation.fits(version, needed) == fit
    assert installation.requirement("triton") == ">=3.6,<3.10" and installation.fits("9", "")


def test_a_package_that_is_missing_or_too_old_says_what_to_install(monkeypatch):
    def version(name):
        if name == "triton":
            raise installation.metadata.PackageNotFoundError
        return "2.9.0" if name == "torch" else "0.50.0"

    monkeypatch.setattr(installation.metadata, "version", version)
    rows = {row["what"]: row for row in installation.packages()}
    assert {name: row["mark"] for name, row in rows.items()} == {
        "torch": "warning", "llvmlite": "ok", "triton": "warning",
    }  # fmt: skip
    assert "pip install 'torch>=2.11,<2.16'" in rows["torch"]["mend"] and "triton>=3.6" in rows["triton"]["mend"]


def test_a_wrong_setting_is_found(monkeypatch):
    monkeypatch.setenv("MLC_TUNEE", "1")
    assert "MLC_TUNE" in only(installation.settings())["found"] and only(installation.settings())["mark"] == "failed"
    assert list(installation.cache()) == []


def test_settings_that_are_given_are_told(monkeypatch):
    monkeypatch.setenv("MLC_TUNE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    given, disabled = installation.settings()
    assert "MLC_TUNE=1" in given["found"] and given["mark"] == "ok" and disabled["mark"] == "warning"


def test_a_cache_folder_is_looked_at_and_not_made(monkeypatch, tmp_path):
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv("MLC_CACHE_DIR", str(folder))
    row = only(installation.cache())
    assert row["mark"] == "ok" and "made when" in row["found"] and not folder.exists()
    folder.mkdir(parents=True)
    (folder / "entry").write_bytes(b"x" * 1_500_000)
    assert "1.5 MB of at most 4.3 GB" in only(installation.cache())["found"]


def test_a_cache_folder_that_cannot_be_used_fails(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "file"))
    assert only(installation.cache())["mark"] == "failed"

    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(installation.tempfile, "TemporaryFile", refused)
    row = only(installation.cache())
    assert row["mark"] == "failed" and "Permission denied" in row["found"] and "MLC_CACHE_DIR" in row["mend"]
    assert stat.S_ISDIR(tmp_path.stat().st_mode)


def test_little_room_and_no_cache_are_warnings(monkeypatch, tmp_path):
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(installation.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert only(installation.cache())["mark"] == "warning"
    monkeypatch.setenv("MLC_CACHE", "0")
    assert only(installation.cache())["mark"] == "warning"


def test_an_import_that_fails_is_told(monkeypatch):
    def imported(name):
        if name == "llvmlite.binding":
            raise OSError("libz.so.1: cannot open")
        return None

    monkeypatch.setattr(installation, "import_module", imported)
    rows = {row["what"]: row for row in installation.imports()}
    assert rows["import llvmlite"]["mark"] == "failed" and "libz" in rows["import llvmlite"]["found"]
    assert rows["import torch"]["mark"] == "ok"


def test_the_processor_is_told():
    assert re.search(r"\d+ threads, vectors of \d+ bits", only(installation.processor())["found"])


# --- GPUs, on what plays one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "built", "mark", "told"),
    [
        (False, None, "not done", "nothing is launched"),
        (True, None, "failed", "built for CPUs alone"),
        (True, "13.0", "failed", "torch sees no GPU"),
    ],
)
def test_no_gpu_is_no_failure_but_a_driver_without_a_gpu_is(monkeypatch, library, built, mark, told):
    def load(kind):
        if not library or kind == "hip":
            raise NoGpuLibrary("none")

    monkeypatch.setattr(on_gpu, "load_driver_library", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    row = only(on_gpu.driver())
    assert row["mark"] == mark and told in row["found"] and row["figures"]["gpu"] is False


@pytest.mark.parametrize("known", [True, False])
def test_a_gpu_is_described_and_one_that_is_too_old_refused(monkeypatch, known):
    def target_for(device):
        if not known:
            raise TargetError("sm_35 is too old")
        return gpu_target("cuda:sm_90")

    about = SimpleNamespace(name="NVIDIA H200", total_memory=141e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(on_gpu, "target_for", target_for)
    row = only(on_gpu.driver())
    assert row["mark"] == ("ok" if known else "failed") and row["figures"]["gpu"] is known
    assert "NVIDIA H200" in row["found"] and ("and 1 more" in row["found"] if known else "sm_35" in row["found"])


class Event:
    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The checks of a GPU, whose tensors are the CPU's."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(on_gpu, "_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(on_gpu, "GpuGuard", nullcontext)
    monkeypatch.setattr(on_gpu, "driver_of", lambda kind: None)
    for name, value in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": nullcontext, "Event": Event,
        "mem_get_info": lambda: (1 << 30, 1 << 31), "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(on_gpu, "target_for", lambda device: gpu_target("cuda:sm_90"))


@pytest.mark.parametrize("check", ["context", "backward in a thread", "two streams"])
def test_checks_of_a_gpu_run(on_the_cpu, check):
    assert only(on_gpu.CHECKS[check]())["mark"] == "ok"


def test_slow_copies_are_a_warning(on_the_cpu):
    copy, ours = on_gpu.bandwidth()
    assert copy["mark"] == "warning" and "H200" in copy["found"] and copy["figures"]["bytes_per_s"] > 1e8
    assert ours["figures"]["bytes_per_s"] > 1e7


def test_a_graph_of_which_nothing_is_captured_is_found(on_the_cpu):
    row = only(on_gpu.graph_capture())
    assert row["mark"] == "failed" and "nothing was captured" in row["found"]


def test_a_context_that_cannot_be_made_is_told(on_the_cpu, monkeypatch):
    def refuse(index):
        raise RuntimeError("CUDA error: all devices are busy\nmore")

    monkeypatch.setattr(on_gpu, "GpuGuard", refuse)
    row = only(on_gpu.context())
    assert row["mark"] == "failed" and row["found"] == "CUDA error: all devices are busy" and row["mend"]


def test_a_context_that_is_gone_is_known(monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not on_gpu.gpu_is_well()


def test_every_program_has_inputs_of_its_shapes():
    for program in PROGRAMS.values():
        for first in (None, *program.first_sizes):
            for t, shape in zip(program.inputs("cpu", first), program.shapes, strict=True):
                assert t.shape == (shape if first is None else (first, *shape[1:]))
