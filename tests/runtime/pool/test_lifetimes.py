"""A process in which blocks are made, held and let go of at random, in every way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    ("lifetimes", "seed"), [(600, 1), pytest.param(10000, 2, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_nobody_sees_what_another_wrote(lifetimes: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.runtime.pool.lifetimes", str(lifetimes), str(seed)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0 and found.stdout.endswith("fine\n"), found.stdout + found.stderr
