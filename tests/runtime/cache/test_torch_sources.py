"""The digest of torch's Python text: of contents, looked at once as long as no file changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_mlc.runtime.cache import torch_sources as module
from torch_mlc.runtime.cache.cache import DiskCache


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the place of torch."""
    folder = tmp_path / "torch"
    for name in ("__init__.py", "fx/graph.py", "lib/left_out.py", "fx/notes.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    monkeypatch.setattr(module, "torch", SimpleNamespace(__file__=str(folder / "__init__.py"), __version__="1.0"))
    yield folder
    module.torch_sources.cache_clear()


def digest(cache: Path | None) -> str:
    """As a new process finds it."""
    module.torch_sources.cache_clear()
    return module.torch_sources(DiskCache(cache) if cache is not None else None)


def test_contents_count_and_times_do_not(package: Path, tmp_path: Path) -> None:
    first = digest(tmp_path / "cache")
    assert digest(None) == digest(tmp_path / "cache") == first
    os.utime(package / "fx/graph.py", (1, 1))
    assert digest(tmp_path / "cache") == first
    (package / "fx/notes.txt").write_text("other")
    (package / "lib/left_out.py").write_text("other")
    assert digest(tmp_path / "cache") == first
    (package / "fx/graph.py").write_text("# FX/graph.py")  # as long as before
    second = digest(tmp_path / "cache")
    assert second != first
    (package / "fx/graph.py").rename(package / "fx/graphs.py")
    assert digest(tmp_path / "cache") not in (first, second)


def test_files_are_read_once(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(tmp_path / "cache")
    monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=lambda _: pytest.fail("files were read again")))
    assert digest(tmp_path / "cache") == first
