"""What the tests of lock files under torch.compile share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own."""
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The lock file of a test."""
    return tmp_path / "model.mlc.lock"
