"""Kernels that are compiled for a GPU on a machine without one are found by the compilation that a GPU asks for."""

import platform
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.explaining.precompile import precompile
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.runtime.cache import fingerprint
from torch_mlc.runtime.compile.kernels import kernel_store
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options

pytest.importorskip("triton")
TARGET = "cuda:sm_90"


def rows(x):
    return torch.softmax(x, -1), x.sum(0)


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight)


def compiled(fn, inputs, folder, target=TARGET):
    """What compiling the graphs of a call adds to the counters, from the files of a cache folder alone."""
    kernel_store.cache_clear()
    options = Options.resolve(None, {"target": target, "cache_dir": str(folder)}, {"MLC_STRICT": "1"})
    graphs = capture(fn, inputs)
    retarget(graphs, "cuda")
    before = counters.snapshot()
    for gm in graphs:
        compile_graph(gm, (), options=options, load=False)
    kernel_store.cache_clear()
    return counters.since(before)


def test_kernels_are_found_where_the_gpu_is(tmp_path):
    x = torch.randn(33, 130)
    done = precompile(rows, x, target=TARGET, folder=tmp_path / "cache")
    assert done.kept >= 2 and not done.errors
    found = compiled(rows, (x,), tmp_path / "cache")
    assert found.get("kernels_generated", 0) == 0 and found["kernel_cache_hits"] == done.kept
    other = compiled(rows, (x,), tmp_path / "cache", "cuda:sm_80")
    assert other["kernels_generated"] == done.kept and "kernel_cache_hits" not in other


def test_backwards_are_compiled_where_they_are_asked_for(tmp_path):
    inputs = [torch.randn(33, 128, requires_grad=True), torch.randn(128, requires_grad=True)]
    forward = precompile(norm, *inputs, target=TARGET, folder=tmp_path / "a")
    both = precompile(norm, *inputs, target=TARGET, folder=tmp_path / "b", training=True)
    assert both.kept > forward.kept > 0


def test_no_setting_of_the_environment_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("MLC_NUMERICS", "eager")
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "other"))
    x = torch.randn(8, 64)
    done = precompile(rows, x, target=TARGET, folder=tmp_path / "cache")
    assert not (tmp_path / "other").exists()
    assert compiled(rows, (x,), tmp_path / "cache")["kernel_cache_hits"] == done.kept


def prints(monkeypatch, **versions):
    """Both fingerprints with some versions in the place of those that are installed."""
    plain = metadata.version
    monkeypatch.setattr(fingerprint, "version", lambda name: versions.get(name) or plain(name))
    python = versions.get("python", "3.11.7")
    monkeypatch.setattr(platform, "python_version", lambda: python)
    monkeypatch.setattr(platform, "python_version_tuple", lambda: tuple(python.split(".")))
    found = []
    for of in (fingerprint.environment_fingerprint, fingerprint.gpu_code_fingerprint):
        of.cache_clear()
        found.append(of())
        of.cache_clear()
    return found


@pytest.mark.parametrize(
    ("versions", "same"),
    [
        ({"torch": "2.13.0+cu130"}, True),
        ({"llvmlite": "0.99"}, True),
        ({"python": "3.11.9"}, True),
        ({"torch": "2.14.0+cpu"}, False),
        ({"triton": "3.9.0+git1"}, False),
        ({"sympy": "9"}, False),
        ({"python": "3.12.7"}, False),
    ],
)
def test_code_of_gpus_depends_on_what_it_is_made_by(monkeypatch, versions, same):
    here, gpu = prints(monkeypatch, torch="2.13.0+cpu", triton="3.9.0")
    other, other_gpu = prints(monkeypatch, **{"torch": "2.13.0+cpu", "triton": "3.9.0", **versions})
    assert here != other and (gpu == other_gpu) is same
