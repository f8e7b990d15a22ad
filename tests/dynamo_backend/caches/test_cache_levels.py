"""Caches as users meet them: a shared place, torch's artifacts, and misses that say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_mlc
from torch_mlc.runtime.compile.kernels import kernel_store
from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")

X = torch.linspace(-2, 2, 35).reshape(5, 7)


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3, -1) - x.mean(0)


def counted(folder: Path, **options: object) -> dict[str, int]:
    """What a process with this cache folder and nothing in memory does to run the function."""
    torch._dynamo.reset()
    before = counters.snapshot()
    compiled = torch.compile(fn, backend="mlc", options={"cache_dir": str(folder), **options})
    torch.testing.assert_close(compiled(X), fn(X))
    if "cache_remote" in options:
        levels = kernel_store(folder, torch_mlc.Options().cache_size, str(options["cache_remote"])).levels
        assert levels is not None and levels.remote is not None
        levels.remote.finish()
    return counters.since(before)


def test_a_second_machine_compiles_nothing(tmp_path: Path) -> None:
    shared = f"file://{tmp_path}/shared"
    assert counted(tmp_path / "a", cache_remote=shared)["kernels_generated"] > 0
    found = counted(tmp_path / "b", cache_remote=shared)
    assert found["graph_cache_hits"] == 1 and "kernels_generated" not in found
    found = counted(tmp_path / "b")
    assert found["graph_cache_hits"] == 1, "what was fetched is kept"


@pytest.mark.parametrize("load", [torch.compiler.load_cache_artifacts, torch_mlc.load_cache_artifacts])
def test_artifacts_carry_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[bytes], object]
) -> None:
    torch.compiler._cache.CacheArtifactManager.clear()
    assert counted(tmp_path / "a")["kernels_generated"] > 0
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    data, info = saved
    assert any(key.startswith("graph/") for key in info.mlc_artifacts)
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "b"))
    load(data)
    found = counted(tmp_path / "b")
    assert found["graph_cache_hits"] == 1 and "kernels_generated" not in found


def test_a_miss_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counted(tmp_path, log="cache")
    assert "which has no graph" in capfd.readouterr().err
    counted(tmp_path, log="cache", numerics="eager")
    assert "the closest entry differs in settings\n" in capfd.readouterr().err
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fn(x) + 1, backend="mlc", options={"cache_dir": str(tmp_path), "log": "cache"})
    compiled(X)
    assert "the closest entry differs in graph\n" in capfd.readouterr().err
